"""The report of one save, from its session, on the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robust_dcp.plan.save_report import SaidOfRank, bounded_changes, make_report
from robust_dcp.report_file import Plan, SavedReport, shortened

if TYPE_CHECKING:
    from robust_dcp.plan.session import SaveSession

__all__ = ["report_of"]

_REASON_LENGTH = 2000


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
