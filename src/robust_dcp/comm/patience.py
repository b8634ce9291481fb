"""How long what is waited for, in seconds. What a caller may choose (``timeout_seconds``) is not here.

Used as ``patience.BEAT_SECONDS``, so that all modules see the same value when a test chooses shorter ones.
"""

from __future__ import annotations

TICK_SECONDS = 0.1
"""How often the clock looks what there is to do."""

BEAT_SECONDS = 1.0
"""How often ranks that work or wait say so."""

LOG_SECONDS = 10.0
"""How long ranks are waited for before the log says for whom; then after twice that, and so on."""

ANNOUNCE_SECONDS = 2.0
"""Connecting: how long a rank waits at most until the store has its addresses, before it begins its own work."""

MEETING_SECONDS = 1.0
"""Connecting: how often a rank that waits for another looks whether the operation has ended meanwhile."""

PROBE_SECONDS = 0.5
"""Connecting: when a rank that has said where it listens has not answered, how soon it is looked whether it does still;
then after twice as long, and so on. gloo itself takes half a minute to find that nobody does."""

RECONNECT_SECONDS = 5.0
"""How long a rank whose connection broke between two operations has to come back."""

ELSEWHERE_SECONDS = 10.0
"""How long a rank may be in another operation before that is taken for a mistake: its threads may have started two."""

TOGETHER_SECONDS = 0.2
"""At the end: how long a rank that has lost another waits for others to be lost as well, before it says who is."""

PARENT_LOST_SECONDS = 0.8
"""At the end: how long a rank that has lost its parent waits for what others have to say of it."""

SURVEY_SECONDS = 1.0
"""At the end: how long ranks have to say where they are."""

HEARD_SECONDS = 0.5
"""At the end: how long a rank waits at most until others have heard of it, before it raises."""

GOODBYE_SECONDS = 1.0
"""How long other ranks have to answer when this one leaves the group."""

STORE_ANSWER_SECONDS = 2.0
"""How long the store has to answer a question after a failure."""

STORE_LOST_SECONDS = 5.0
"""How long a store that has not answered is not asked again: the ranks shall hear of it, not wait for it each time."""
