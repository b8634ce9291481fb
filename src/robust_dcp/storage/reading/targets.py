"""The tensors that a planner gives us to read into.

This module owns when we may ask for them, which of them take bytes as they are stored, and the check of their size.
``plan_reader``, ``reading_threads`` and ``sharable_reads`` call it.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from robust_dcp.errors import PlanConflict
from robust_dcp.staging import host_address

__all__ = ["is_flat", "is_plain", "may_ask_early", "takes_bytes", "target_of"]


def may_ask_early(planner: LoadPlanner) -> bool:
    """Whether we may ask for targets at any time, and fill them on other threads.

    A planner whose ``commit_tensor`` does nothing cannot depend on when it is called. Other planners (Megatron-Core's)
    are asked for a target only once the data is there, and the target is committed at once.
    """
    return getattr(type(planner), "commit_tensor", None) is DefaultLoadPlanner.commit_tensor


def is_plain(target: torch.Tensor) -> bool:
    """Whether the memory of ``target``, on any device, holds its elements as they are stored, in any order."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.layout == torch.strided
        and not (target.is_quantized or target.is_conj() or target.is_neg())
    )


def is_flat(target: torch.Tensor) -> bool:
    """Whether ``target``, on any device, holds its elements one after the other, as they are stored."""
    return is_plain(target) and target.is_contiguous()


def takes_bytes(target: torch.Tensor) -> bool:
    """Whether the bytes of a tensor can be read straight into ``target``."""
    return is_flat(target) and target.is_cpu


def target_of(planner: LoadPlanner, item: ReadItem, *, early: bool) -> torch.Tensor:
    """The tensor that ``item`` is to be read into.

    Args:
        early: whether :func:`may_ask_early` holds.

    Raises:
        ValueError: the tensor has another size than ``item``.
        PlanConflict: the tensor's memory was freed.
    """
    target: torch.Tensor = planner.resolve_tensor(item)
    try:
        host_address(target)
    except RuntimeError as error:
        name = item.dest_index.fqn
        raise PlanConflict(f"{name!r} cannot be loaded into: {error}", key=name) from error
    if target.requires_grad or not early:  # planners get detached tensors to commit, as from DCP
        target = target.detach()
    if target.size() != item.lengths and target.size() != torch.Size(item.lengths):
        raise ValueError(
            f"the planner asked for {list(item.lengths)} elements of {item.storage_index}, and gave a tensor of "
            f"size {list(target.size())} for them"
        )
    return target
