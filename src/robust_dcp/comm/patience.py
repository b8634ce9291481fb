"""How long we wait for each thing, in seconds. What a caller chooses (``timeout_seconds``) is not here.

Write ``patience.BEAT_SECONDS`` in other modules, so that a test can set a shorter time for all of them.
"""

from __future__ import annotations

TICK_SECONDS = 0.1
"""How often the thread that sends beats looks whether there is something to do."""

BEAT_SECONDS = 1.0
"""How often a rank that works or waits sends a beat."""

IDLE_SECONDS = 1.0
"""How long a thread that has waited in gloo stays for the next exchange."""

LOG_SECONDS = 10.0
"""How long the others wait for a rank before the log names it. The next line comes after twice that time, and so on."""

ANNOUNCE_SECONDS = 2.0
"""Connecting: how long a rank waits at most until the others can find it. Then it begins its own work."""

GREETING_SECONDS = 10.0
"""Connecting: how long the first frame of a rank may take that says it is connecting."""

CONNECTING_SECONDS = 0.5
"""At the end: how long a rank lets gloo finish a connection that it is making before it drops them all."""

RECONNECT_SECONDS = 5.0
"""How long a rank has to come back after its connection broke before it said anything in an operation."""

STALLED_SECONDS = 10.0
"""How long a rank has to come back that was there to connect, and then did not answer. Its host may be busy."""

ELSEWHERE_SECONDS = 10.0
"""How long a rank may wait in another operation before we call that a mistake. Its threads may have started both."""

ROLL_CALL_SECONDS = 1.0
"""At the end: how long ranks have to say where they are."""

VERDICT_SECONDS = 3.0
"""At the end: how long ranks wait for the verdict of the rank that makes it, before the next one makes it instead. The
others wait for twice as long."""

GONE_SECONDS = 0.05
"""At the end: how long a rank leaves its connections open after its last word. Otherwise gloo may not hand it over."""

HEARD_SECONDS = 2.0
"""At the end: how long the rank that hosts the store stays, so that the others can read the verdict there."""

STORE_ANSWER_SECONDS = 2.0
"""How long the store has to answer a question after a failure."""

STORE_BUSY_SECONDS = 8.0
"""How long the store has to answer while ranks connect. All of them come to it then, and torch's store looks up each in
the DNS before it answers anybody."""

STORE_LOST_SECONDS = 5.0
"""How long we do not ask a store again after it did not answer. Ranks should not wait for it each time."""

EXIT_SECONDS = 12.0
"""How long the process waits at its end for its threads in gloo, which connects for 10 seconds at most, and in the
store. A thread that Python ends there takes the process along."""
