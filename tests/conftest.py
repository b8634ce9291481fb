"""What every test gets: assertion messages in the harness, and hypothesis settings that suit a slow, shared machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.harness")
import tests.harness.without_inductor  # noqa: E402, F401

# A TCPStore looks up the name of each side whenever one connects. On a machine whose name server limits how often it is
# asked, each such connection costs five seconds else; ranks inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their children would inherit that. Some
# tests send it to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two cores and real fsyncs: no deadline for one example. A failure prints what reproduces it; CI draws the same
# examples each time, so that a red run is about the change and not about the dice.
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# These modules take longest, so they come first: else one worker still has minutes to go when the others are done.
# Those that wait for timeouts stand between those that compute, so that both cores have work all the time.
_LONG = ["async", "ranks", "round_trips", "cluster", "mixes", "reuse", "processes_that_end", "kills", "refusals"]
_LONG += ["stores", "autoload", "schedules", "damage", "switch", "verdicts", "small_files", "nodes", "parity"]
_LONG += ["torch_dist", "runs_in_stores", "names", "modules", "manager", "urls", "trust", "faults_are_found"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        rank = {f"test_{name}.py": place for place, name in enumerate(_LONG)}
        items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # all that is imported stays
    try:
        return (yield)
    finally:
        gc.freeze()  # at its end pytest looks for garbage several times
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _end_shared_ranks() -> Iterator[None]:
    yield
    if ranks := sys.modules.get("tests.harness.ranks"):
        ranks.end_shared_ranks()
