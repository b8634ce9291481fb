"""The report of one save, from its session, on the coordinator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from robust_dcp.plan.structure import StructureDiff
from robust_dcp.report_file import Changes, Plan, SavedReport, shortened
from robust_dcp.storage.writing.save_report import SaidOfRank, make_report

if TYPE_CHECKING:
    from robust_dcp.plan.session import SaveSession

__all__ = ["bounded_changes", "report_of"]

_REASON_LENGTH: Final = 2000
_MOST_KEYS: Final = 100
"""How many keys of each kind a report names."""

_KEY_LENGTH: Final = 300


def report_of(session: SaveSession, save_id: str, fallbacks: tuple[str, ...]) -> SavedReport:
    """The report of a save that is committed. Called on the coordinator.

    Args:
        save_id: the id in ``.metadata``.
        fallbacks: what the commit went without.
    """
    plan, coordinator = session.plan, session.plan.coordinator
    metadata = None if coordinator is None else coordinator.metadata
    return make_report(
        [
            (rank, SaidOfRank(message.row, message.node, message.how))
            for rank, message in enumerate(session.messages)
            if message is not None and message.row
        ],
        session.times,
        checkpoint=session.checkpoint,
        save_id=save_id,
        world_size=session.channel.size,
        coordinator_rank=session.rank,
        plan=Plan(plan.outcome, shortened(plan.reason, _REASON_LENGTH), bounded_changes(plan.changes)),
        waits=session.channel.stragglers,
        fallbacks=fallbacks,
        modules=None if metadata is None else metadata.module_sizes,
    )


def bounded_changes(changes: StructureDiff | None) -> Changes | None:
    """The first keys of each kind, and how many there are."""
    if changes is None:
        return None

    def first(keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(shortened(key, _KEY_LENGTH) for key in keys[:_MOST_KEYS])

    told = itertools.islice(changes.changed.items(), _MOST_KEYS)
    return Changes(
        n_added=len(changes.added),
        n_removed=len(changes.removed),
        n_changed=len(changes.changed),
        added=first(changes.added),
        removed=first(changes.removed),
        changed={shortened(key, _KEY_LENGTH): shortened(how, _KEY_LENGTH) for key, how in told},
    )
