"""One round: every rank's frame on every rank, or the same decision on every rank to ask once more.

It owns the confirming frames and their store key. It never reads a frame's meaning beyond kind, operation and
sequence. The exchange calls it for headers and for verdicts.

A rank that gets a bad frame cannot repeat the round alone. So each round is followed by a confirmation, in which
any rank may ask for the round again. A confirmation can be damaged too; the rank that cannot read one asks the store,
where a rank that wants a repetition has said so before it confirmed. Thus all ranks decide alike.
"""

from __future__ import annotations

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.frames import FRAME_NBYTES, Fault, Frame, FrameError, Kind, Status
from robust_dcp.comm.link import Link
from robust_dcp.comm.post_mortem import BadRound, Trouble
from robust_dcp.comm.stats import PhaseStats

__all__ = ["gather_frames"]


def gather_frames(link: Link, frame: Frame, deadline: Deadline, cost: PhaseStats) -> list[Frame]:
    """The frames of all ranks, in rank order, each of the kind, operation and sequence of ``frame``.

    Raises:
        BadRound: some rank got a frame, twice, that is damaged or belongs elsewhere. Raised on all ranks.
        TransportFailure: see there.
        StoreLost: a confirmation was damaged, and the store does not answer.
    """
    frames, troubles = _gather_once(link, frame, deadline, cost)
    if troubles:
        cost.repeats += 1
        frames, troubles = _gather_once(link, frame, deadline, cost)
    if troubles:
        raise BadRound(troubles)
    return frames


def _gather_once(link: Link, frame: Frame, deadline: Deadline, cost: PhaseStats) -> tuple[list[Frame], list[Trouble]]:
    """The frames and what is wrong with them on some rank: nothing on all ranks, or something on all ranks."""
    frames, own_troubles = _collect(link, frame, deadline, cost)
    return frames, own_troubles + _confirm(link, frame, own_troubles, deadline, cost)


def _collect(link: Link, frame: Frame, deadline: Deadline, cost: PhaseStats) -> tuple[list[Frame], list[Trouble]]:
    frames: list[Frame] = []
    troubles: list[Trouble] = []
    for rank, data in enumerate(_all_gather(link, frame, deadline, cost)):
        found = _read(data, link.rank, rank, frame.kind)
        if isinstance(found, Frame):
            frames.append(found)
            trouble = _belongs_elsewhere(found, frame, link.rank, rank)
        else:
            trouble = found
        if trouble is not None:
            troubles.append(trouble)
    return frames, troubles


def _read(data: bytes, receiver: int, sender: int, kind: Kind) -> Frame | Trouble:
    try:
        frame = Frame.decode(data)
    except FrameError as error:
        return Trouble(receiver, sender, error.fault, error.detail)
    if frame.kind != kind:
        return Trouble(receiver, sender, Fault.KIND, f"it is a {frame.kind.name}, not a {kind.name}")
    return frame


def _belongs_elsewhere(found: Frame, own: Frame, receiver: int, sender: int) -> Trouble | None:
    if found.operation != own.operation:
        detail = f"it is of operation {found.operation:#010x}, not {own.operation:#010x}"
        return Trouble(receiver, sender, Fault.OPERATION, detail)
    if found.sequence != own.sequence:
        return Trouble(receiver, sender, Fault.SEQUENCE, f"it is of exchange {found.sequence}, not {own.sequence}")
    return None


def _confirm(link: Link, frame: Frame, troubles: list[Trouble], deadline: Deadline, cost: PhaseStats) -> list[Trouble]:
    """What other ranks complain of. If any rank has ``troubles``, all others get some from here."""
    tag = link.next_tag()
    own = Frame(Kind.CONFIRM, frame.operation, frame.sequence)
    if troubles:
        first = troubles[0]
        own = Frame(Kind.CONFIRM, frame.operation, frame.sequence, Status.AGAIN, flags=first.fault, value=first.sender)
        link.roll_call.ask_again(link.generation, tag)
    complaints: list[Trouble] = []
    unread: list[Trouble] = []
    for rank, data in enumerate(_all_gather(link, own, deadline, cost)):
        found = _read(data, link.rank, rank, Kind.CONFIRM)
        if isinstance(found, Trouble):
            unread.append(found)
        elif found.status == Status.AGAIN and rank != link.rank:
            complaints.append(_complaint(rank, found))
    if not complaints and unread and link.roll_call.was_asked_again(link.generation, tag):
        return unread
    return complaints


def _complaint(receiver: int, found: Frame) -> Trouble:
    try:
        fault = Fault(found.flags)
    except ValueError:
        fault = Fault.NONE
    return Trouble(receiver, found.value, fault, fault.name.lower())


def _all_gather(link: Link, frame: Frame, deadline: Deadline, cost: PhaseStats) -> list[bytes]:
    cost.header_nbytes_sent += FRAME_NBYTES
    return link.transport(deadline).all_gather_frames(frame.encode(), link.next_tag(), deadline)
