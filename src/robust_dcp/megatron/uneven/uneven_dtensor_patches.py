"""What is replaced of Megatron-FSDP's functions for uneven DTensors, wherever they are bound.

Owns the table and the replacements' shape: each does what it replaces unless robust_dcp is the planner that was
chosen. Imports neither torch nor Megatron. Applied by ``install``.

| replaced | by |
| --- | --- |
| ``preprocess_state_dict_for_uneven_dtensor`` | one keyed exchange of all DTensors (``place_chunks``) |
| ``update_uneven_dtensor_chunk_metadata`` | a note that the chunk is to be found (``defer_chunk``), no exchange |
| ``validate_uneven_dtensor`` | what can be seen here (``check_part``); the rest is validated by the exchange |
| ``gather_and_compute_chunk_metadata`` | the chunk that was found; else a named exchange with the ranks of the mesh |
| ``make_fsdp_dtensor`` in the SwiGLU, GDN and MLA splits | itself without ``run_check``: no world collective a split |
| ``handle_*_in_state_dict`` | themselves; a failure is told to the ranks that wait. GDN: one exchange before it |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.switch.patching import Patch

__all__ = ["PATCHES"]

Function = Callable[..., Any]

_CORE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_PACKAGE = "megatron_fsdp"
_SPLITS = "megatron.core.transformer.fsdp_dtensor_checkpoint"
_CALLERS = ("megatron.training.checkpointing", "megatron.bridge.training.checkpointing")


def _is_chosen() -> bool:
    """Whether robust_dcp is to be used, and there are ranks to talk to (a simulated job has none)."""
    if current_options().planner != "robust_dcp":
        return False
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_backend() != "fake"


def _timeout_seconds() -> float:
    return current_options().exchange_timeout_seconds


def _channel() -> Any:
    from robust_dcp.comm import Channel

    return Channel.for_group(operation="uneven DTensors", timeout_seconds=_timeout_seconds())


def _when_chosen(make: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A maker of replacements that give way to the original when robust_dcp is not chosen."""

    def make_one(original: Function) -> Function:
        ours = make(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (ours if _is_chosen() else original)(*args, **kwargs)

        return replacement

    return make_one


@_when_chosen
def _preprocess(_: Function) -> Function:
    def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
        from robust_dcp.megatron.checkpoint_call import meet_before_saving
        from robust_dcp.megatron.uneven.uneven_dtensors import place_chunks

        meet_before_saving(is_last=False)
        place_chunks(state_dict, _channel())
        return state_dict

    return preprocess_state_dict_for_uneven_dtensor


@_when_chosen
def _preprocess_in_hook(_: Function) -> Function:
    """In a hook of ``state_dict()``, which the ranks of that model call: not always all ranks."""

    def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
        from robust_dcp.megatron.checkpoint_call import meet_before_saving
        from robust_dcp.megatron.uneven import uneven_dtensors

        if uneven_dtensors.spans_the_world(state_dict):
            meet_before_saving(is_last=False)
            uneven_dtensors.place_chunks(state_dict, _channel())
        else:
            uneven_dtensors.place_chunks_one_by_one(state_dict, _timeout_seconds())
        return state_dict

    return preprocess_state_dict_for_uneven_dtensor


@_when_chosen
def _update(_: Function) -> Function:
    def update_uneven_dtensor_chunk_metadata(dtensor: Any) -> None:
        from robust_dcp.megatron.uneven.uneven_dtensors import defer_chunk

        defer_chunk(dtensor, _timeout_seconds())

    return update_uneven_dtensor_chunk_metadata


@_when_chosen
def _validate(_: Function) -> Function:
    def validate_uneven_dtensor(dtensor: Any) -> None:
        from robust_dcp.megatron.uneven.uneven_dtensors import check_part

        check_part(dtensor)

    return validate_uneven_dtensor


@_when_chosen
def _gather(_: Function) -> Function:
    def gather_and_compute_chunk_metadata(dtensor: Any) -> Any:
        from robust_dcp.megatron.uneven.uneven_chunk import chunk_of

        return chunk_of(dtensor, _timeout_seconds())

    return gather_and_compute_chunk_metadata


@_when_chosen
def _make_split(original: Function) -> Function:
    """``run_check`` gathers an object from all ranks for each tensor of a tensor-parallel model, and validates it."""

    def make_fsdp_dtensor(*args: Any, run_check: bool = False, **kwargs: Any) -> Any:
        return original(*args, run_check=False, **kwargs)

    return make_fsdp_dtensor


@_when_chosen
def _handle(original: Function) -> Function:
    return functools.partial(_tell_if_it_fails, original)


@_when_chosen
def _handle_gdn(original: Function) -> Function:
    """Where a fused projection is to be split depends on where its parts begin: found for all of them at once."""

    def handle_gdn_in_state_dict(model: Any, model_state_dict: Any, optimizer_state_dict: Any) -> Any:
        from robust_dcp.megatron.checkpoint_call import meet_before_saving
        from robust_dcp.megatron.uneven.uneven_dtensors import place_chunks

        meet_before_saving(is_last=False)
        place_chunks({"model": model_state_dict, "optimizer": optimizer_state_dict}, _channel())
        return _tell_if_it_fails(original, model, model_state_dict, optimizer_state_dict)

    return handle_gdn_in_state_dict


def _tell_if_it_fails(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; if it raises here, raise on the ranks too that go on to the next exchange of DTensors.

    Within ``save_checkpoint`` of Megatron-LM they meet before that exchange, and hear of it there.
    """
    from robust_dcp.megatron.checkpoint_call import is_shared
    from robust_dcp.megatron.uneven.uneven_dtensors import fail_exchange

    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not is_shared():
            fail_exchange(error, _channel())
        raise


_HANDLERS: dict[str, Callable[[Function], Function]] = {
    "handle_swiglu_in_state_dict": _handle,
    "handle_gdn_in_state_dict": _handle_gdn,  # from 0.17
    "handle_mla_down_proj_in_state_dict": _handle,  # after 0.19
    "handle_mtp_in_state_dict": _handle,  # after 0.19
}

_BOUND: dict[str, Callable[[Function], Function]] = {
    "preprocess_state_dict_for_uneven_dtensor": _preprocess,
    **_HANDLERS,
}
"""What other modules import by name, so that each has a binding of its own."""


def _of_package(package: str) -> tuple[Patch, ...]:
    return (
        Patch(f"{package}.uneven_dtensor", "gather_and_compute_chunk_metadata", _gather),
        Patch(f"{package}.uneven_dtensor", "update_uneven_dtensor_chunk_metadata", _update),
        Patch(f"{package}.uneven_dtensor", "validate_uneven_dtensor", _validate),
        Patch(f"{package}.uneven_dtensor", "preprocess_state_dict_for_uneven_dtensor", _preprocess),
        Patch(f"{package}.param_and_grad_buffer", "update_uneven_dtensor_chunk_metadata", _update),
        Patch(f"{package}.param_and_grad_buffer", "validate_uneven_dtensor", _validate),
        Patch(f"{package}.fully_shard", "preprocess_state_dict_for_uneven_dtensor", _preprocess_in_hook),
    )


PATCHES: tuple[Patch, ...] = (
    *_of_package(_CORE),
    *_of_package(_PACKAGE),
    Patch(_SPLITS, "make_fsdp_dtensor", _make_split, optional=True),
    *(Patch(_SPLITS, name, make, optional=True) for name, make in _HANDLERS.items()),
    *(Patch(module, name, make, optional=True) for module in _CALLERS for name, make in _BOUND.items()),
)
