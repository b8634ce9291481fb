"""Loaded tensors on their way from the rank that read them to those that want them, over their own process group.

Owns the order of sends and their buffers. All ranks of the group walk through the transfers in one order, so nothing
waits for what comes later. Called by ``parallel_load``, once every rank has read its share and has its targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from robust_dcp.comm import Channel

__all__ = ["Transfer", "exchange_tensors"]

_BUNDLE_NBYTES = 32 << 20
"""Small tensors with the same sender and receivers travel together, up to so many bytes."""


@dataclass(frozen=True, order=True)
class Transfer:
    """One tensor from ``reader`` to the other ranks in ``wanted_by`` (ranks of the group).

    Attributes:
        place: in the order of all transfers of the group.
        shard: which tensor.
    """

    place: int
    shard: Any
    reader: int
    wanted_by: tuple[int, ...]


def exchange_tensors(
    transfers: Sequence[Transfer],
    tensors: Mapping[Any, torch.Tensor],
    channel: Channel,
    group: dist.ProcessGroup | None,
) -> None:
    """Send what this rank has read, receive what it wants.

    Args:
        transfers: those that this rank takes part in, by place.
        tensors: by shard: what this rank has read, and targets for what it receives.
        channel: of the group.
        group: over which the tensors go: broadcast where all want them, else one by one.
    """
    device = _device_of(group)
    with torch.no_grad():
        for bundle in _bundles(transfers, tensors):
            _exchange([tensors[transfer.shard] for transfer in bundle], bundle[0], channel, group, device)


def _bundles(transfers: Sequence[Transfer], tensors: Mapping[Any, torch.Tensor]) -> Iterator[list[Transfer]]:
    """Transfers that go together. Every rank that takes part in one of a bundle takes part in all of it, so it is cut
    in the same places on all of them."""
    for _, same in groupby(sorted(transfers, key=_way), key=_way):
        bundle: list[Transfer] = []
        nbytes = 0
        for transfer in same:
            size = tensors[transfer.shard].nbytes
            if bundle and nbytes + size > _BUNDLE_NBYTES:
                yield bundle
                bundle, nbytes = [], 0
            bundle.append(transfer)
            nbytes += size
        yield bundle


def _way(transfer: Transfer) -> tuple[tuple[int, ...], int]:
    return transfer.wanted_by, transfer.reader


def _exchange(
    tensors: Sequence[torch.Tensor],
    like: Transfer,
    channel: Channel,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    sends = like.reader == channel.rank
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes == 0:
        return
    if sends:
        flat = torch.cat([_bytes_of(tensor).to(device) for tensor in tensors])
    else:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if len(like.wanted_by) == channel.size:
        dist.broadcast(flat, src=channel.ranks[like.reader], group=group)
    elif sends:
        works = [dist.isend(flat, channel.ranks[rank], group=group) for rank in like.wanted_by if rank != like.reader]
        for work in works:
            if work is not None:
                work.wait()
    else:
        dist.recv(flat, channel.ranks[like.reader], group=group)
    if not sends:
        for tensor, part in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
            if tensor.nbytes:
                # A part may begin anywhere; a view of another dtype has to begin at a multiple of its size.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors have to be to travel over ``group``; the same on all its ranks."""
    if "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
