"""How long we wait for each thing, in seconds. What a caller chooses (``timeout_seconds``) is not here.

Write ``patience.BEAT_SECONDS`` in other modules, so that a test can set a shorter time for all of them.
"""

from __future__ import annotations

TICK_SECONDS = 0.1
"""How often the clock thread looks whether there is something to do."""

BEAT_SECONDS = 1.0
"""How often a rank that works or waits sends a beat."""

LOG_SECONDS = 10.0
"""How long the others wait for a rank before the log names it. The next line comes after twice that time, and so on."""

ANNOUNCE_SECONDS = 2.0
"""Connecting: how long a rank waits at most until the store has its addresses. Then it begins its own work."""

MEETING_SECONDS = 1.0
"""Connecting: how often a rank that waits for another one checks whether the operation has ended."""

PROBE_SECONDS = 0.5
"""Connecting: a rank may have said where it listens and then not answer. After this time we check whether it still
listens, then after twice this time, and so on. gloo itself needs half a minute to notice that nobody does."""

RECONNECT_SECONDS = 5.0
"""How long a rank has to come back after its connection broke between two operations."""

ELSEWHERE_SECONDS = 10.0
"""How long a rank may be in another operation before we call that a mistake. Its threads may have started both."""

TOGETHER_SECONDS = 0.2
"""At the end: how long a rank that lost another rank waits for more ranks to be lost, before it reports them."""

PARENT_LOST_SECONDS = 0.8
"""At the end: how long a rank that lost its parent waits for the report of others."""

SURVEY_SECONDS = 1.0
"""At the end: how long ranks have to answer where they are."""

HEARD_SECONDS = 0.5
"""At the end: how long a rank waits at most, before it raises, until others have heard of the end."""

GOODBYE_SECONDS = 1.0
"""How long other ranks have to answer when this one leaves the group."""

STORE_ANSWER_SECONDS = 2.0
"""How long the store has to answer a question after a failure."""

STORE_LOST_SECONDS = 5.0
"""How long we do not ask a store again after it did not answer. Ranks should not wait for it each time."""
