"""The replacements of Megatron-FSDP's functions for uneven DTensors, in every module that imports them by name.

Each replacement calls the original if robust_dcp is not the chosen planner. This module imports neither torch nor
Megatron. Applied by ``install``.

| function | what runs in its place |
| --- | --- |
| ``preprocess_state_dict_for_uneven_dtensor`` | one keyed exchange for all DTensors (``place_chunks``) |
| ``update_uneven_dtensor_chunk_metadata`` | ``defer_chunk`` notes that the chunk is not known yet; no exchange |
| ``validate_uneven_dtensor`` | ``check_part`` checks what this rank sees by itself; the exchange checks the rest |
| ``gather_and_compute_chunk_metadata`` | the known chunk, or an exchange with the ranks of the mesh |
| ``make_fsdp_dtensor`` in the SwiGLU, GDN and MLA splits | the original without ``run_check``, a world collective |
| ``handle_*_in_state_dict`` | the original; if it fails, waiting ranks are told. Before GDN's there is one exchange |
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
    """Whether robust_dcp is chosen and there are ranks to talk to. A simulated job has none."""
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
    """Wrap ``make``, so that its replacements call the original when robust_dcp is not chosen."""

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
    """This one runs in a hook of ``state_dict()``. Only the ranks of that model call it, which may not be all ranks."""

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
    """Without ``run_check``, which gathers an object from all ranks for each tensor of a tensor-parallel model."""

    def make_fsdp_dtensor(*args: Any, run_check: bool = False, **kwargs: Any) -> Any:
        return original(*args, run_check=False, **kwargs)

    return make_fsdp_dtensor


@_when_chosen
def _handle(original: Function) -> Function:
    return functools.partial(_tell_if_it_fails, original)


@_when_chosen
def _handle_gdn(original: Function) -> Function:
    """A fused projection is split by where its parts begin. One exchange finds that for all projections first."""

    def handle_gdn_in_state_dict(model: Any, model_state_dict: Any, optimizer_state_dict: Any) -> Any:
        from robust_dcp.megatron.checkpoint_call import meet_before_saving
        from robust_dcp.megatron.uneven.uneven_dtensors import place_chunks

        meet_before_saving(is_last=False)
        place_chunks({"model": model_state_dict, "optimizer": optimizer_state_dict}, _channel())
        return _tell_if_it_fails(original, model, model_state_dict, optimizer_state_dict)

    return handle_gdn_in_state_dict


def _tell_if_it_fails(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``. If it raises, raise on the other ranks too. They would wait in the next exchange of DTensors.

    Within Megatron-LM's ``save_checkpoint`` the ranks meet before that exchange and hear of the error there.
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
"""Functions that other modules import by name. Each of these modules is patched too."""


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
