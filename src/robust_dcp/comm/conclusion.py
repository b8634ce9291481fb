"""Says in words why an operation ended out of step: which ranks are missing, gone or in another operation.

This module makes the exception from a :class:`Problem` and a survey of all ranks that can be reached. If several ranks
make one, it decides which counts. The operation calls it, after a failure only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from robust_dcp.comm import patience, wire
from robust_dcp.comm.failures import EndMessage, ErrorMessage, Problem
from robust_dcp.comm.link import Link, OperationKey, RunningOperation
from robust_dcp.comm.meeting import STORE_IS_LOST, StoreLost
from robust_dcp.comm.survey import Whereabouts
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError, error_from_fields, failure_of

__all__ = ["as_told_to", "conclude", "settle"]

_MAX_RANKS_DESCRIBED = 16


def conclude(problem: Problem, operation: RunningOperation, link: Link) -> EndMessage:
    """Decide which operations end, and make the exception for all ranks that are in them."""
    what, phase = operation.what, operation.phase
    ending = [operation.key]
    error: RobustCheckpointError
    if problem.cause is not None:
        failures = [failure_of(link.rank, problem.cause)]
        error = ExchangeError(f"{what} {problem.what}", failures=failures, phase=phase, ranks=[link.rank])
    elif problem.damaged_by is not None:
        error = ExchangeError(f"{what}: {problem.what}", phase=phase, ranks=[problem.damaged_by])
    else:
        found = link.surveyor.ask(min(patience.SURVEY_SECONDS, operation.timeout_seconds))
        if problem.is_elsewhere:
            error = _different_operations_error(phase, found, link.rank)
            ending += _operations_apart_from(operation.key, found)
        else:
            error = _missing_ranks_error(problem, operation, link.size, found)
    return EndMessage(tuple(sorted(ending)), ErrorMessage.of(error))


def _operations_apart_from(key: OperationKey, found: Whereabouts) -> list[OperationKey]:
    """The operations that share no rank with ``key``. Their ranks wait for the ranks of ``key``, and vice versa."""
    own = set(found.inside.get(key, ()))
    return [OperationKey(*other) for other, ranks in found.inside.items() if other != key and own.isdisjoint(ranks)]


def _different_operations_error(phase: str, found: Whereabouts, rank: int) -> ExchangeError:
    # Assume that the operation with the most ranks is the right one. If there are several, take this rank's own.
    counts = Counter({text: len(ranks) for text, ranks in found.doing.items()})
    expected = max(counts, key=lambda text: (counts[text], rank in found.doing[text]))
    where = "; ".join(f"{_ranks(found.doing[text])} in {text}" for text, _ in counts.most_common(_MAX_RANKS_DESCRIBED))
    return ExchangeError(
        f"the ranks are in different operations: {where}",
        phase=phase,
        ranks=sorted(each for text, ranks in found.doing.items() if text != expected for each in ranks),
    )


def _missing_ranks_error(
    problem: Problem, operation: RunningOperation, size: int, found: Whereabouts
) -> ExchangeTimeout:
    missing = {**problem.missing, **found.missing}
    for rank, text in problem.missing.items():
        # A rank that answers is alive: only its work does not advance.
        doing = next((each for each, ranks in found.doing.items() if rank in ranks), None)
        if doing is not None and operation.what not in doing:
            missing[rank] = f"{text}: it is in {doing}"
    described = [missing[rank] for rank in sorted(missing)[:_MAX_RANKS_DESCRIBED]]
    if len(missing) > len(described):
        described.append(f"and {len(missing) - len(described)} more: {sorted(missing)[_MAX_RANKS_DESCRIBED:]}")
    return ExchangeTimeout(
        f"{operation.what} {problem.what}; {len(missing)} of {size} ranks missing: {'; '.join(described)}",
        phase=operation.phase,
        ranks=sorted(missing),
        missing_ranks=sorted(missing),
        timeout_seconds=operation.timeout_seconds,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"


def as_told_to(rank: int, error: RobustCheckpointError) -> RobustCheckpointError:
    """The exception as ``rank`` raises it. If the others had given up on that rank, the message says so first."""
    if not isinstance(error, ExchangeTimeout) or rank not in (error.missing_ranks or ()):
        return error
    fields = error.to_fields()
    fields["message"] = f"this rank ({rank}) came after the others had given up on it: {error.message}"
    return error_from_fields(type(error).__name__, fields, error.rank_failures)


def settle(ended: EndMessage, operation: RunningOperation, link: Link) -> bytes:
    """Return the end message that counts for all ranks: that of the store if it has one, otherwise ``ended``."""
    end_message = wire.encode(ended)
    try:
        counts = link.settle([OperationKey(*key) for key in ended.operations], end_message)
        if operation.key not in wire.decode(counts, EndMessage).operations:  # it ends other operations, not this one
            counts = link.settle([operation.key], end_message)
        return counts
    except StoreLost as lost:  # the ranks can still tell each other directly
        return wire.encode(_without_store(ended, operation, link, str(lost)))


def _without_store(ended: EndMessage, operation: RunningOperation, link: Link, detail: str) -> EndMessage:
    """The same end message, which also says that the ranks could not agree on it in the store.

    If all missing ranks were never connected, they are missing because of the store. Then its host is named instead.
    """
    error, host = ended.error.to_error(), link.store_host
    fields = error.to_fields()
    missing = error.missing_ranks if isinstance(error, ExchangeTimeout) else None
    if host is not None and missing and not any(map(link.has_met, missing)):
        fields["message"] = (
            f"{operation.what} did not finish; 1 of {link.size} ranks missing: rank {host}, whose process hosts the "
            f"store unless a launcher's does, has ended or is frozen: {STORE_IS_LOST} ({detail}), and ranks meet there"
        )
        fields["missing_ranks"] = fields["ranks"] = [host]
    else:
        fields["message"] = (
            f"{error.message}; {STORE_IS_LOST} either ({detail}): the process that hosts it, rank 0 "
            "unless a launcher does, has ended or is frozen"
        )
    told = error_from_fields(type(error).__name__, fields, error.rank_failures)
    return EndMessage(ended.operations, ErrorMessage.of(told))
