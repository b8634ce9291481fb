"""``load_checkpoint`` of Megatron-LM with ``--ckpt-prove-resume``: afterwards the live state is compared with the
checkpoint, as a fresh sharded state dict holds it.

That state dict is made as ``load_checkpoint`` has made its own, but as for a save: one for a load may be cleared before
it is filled. Only ``torch_dist`` is compared.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.load import LAST_LOADED, load_common_state_dict
from robust_dcp.megatron.nodes import make_nodes_whole
from robust_dcp.megatron.options import current_options, megatron_arguments
from robust_dcp.plan.load_planner import RobustLoadPlanner
from robust_dcp.proof import compare
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.comparing import Comparison
from robust_dcp.switch.patching import log_without_effect

logger = logging.getLogger(__name__)

_OPTION: Final = "--ckpt-prove-resume"

_OF_THIS_JOB: Final = ("args", "checkpoint_version", "iteration", "rerun_state_machine")
"""Parts of the common state that a resumed job has of its own."""


class _Calls(msgspec.Struct):
    """What ``load_checkpoint`` has called, to be called once more."""

    generate: Callable[..., Any] | None = None
    arguments: inspect.BoundArguments | None = None
    random_numbers: Callable[[], Any] | None = None


_under_way: list[_Calls] = []


@entry_point
def load_checkpoint(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``megatron.training.checkpointing.load_checkpoint``, what nodes get before it, and the proof after it.

    Raises:
        RobustCheckpointError: what is live is not what the checkpoint holds, on all ranks.
    """
    load_arg = inspect.signature(stock).bind(*args, **kwargs).arguments.get("load_arg", "load")
    with as_megatron_raises():
        make_nodes_whole(getattr(megatron_arguments(), load_arg, None))
    if not current_options().prove_resume:
        return stock(*args, **kwargs)
    calls = _Calls()
    LAST_LOADED.clear()
    _under_way.append(calls)
    try:
        result = stock(*args, **kwargs)
    finally:
        _under_way.pop()
    if LAST_LOADED and calls.generate is not None:
        with as_megatron_raises():
            _prove(LAST_LOADED[0], calls)
    else:
        log_without_effect(_OPTION, "no torch_dist checkpoint was loaded, and no other is compared")
    return result


def generate_state_dict(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron-LM's, which is noted."""
    if _under_way:
        _under_way[-1].generate, _under_way[-1].arguments = stock, inspect.signature(stock).bind(*args, **kwargs)
    return stock(*args, **kwargs)


def get_rng_state(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron-LM's, which is noted."""
    if _under_way:
        _under_way[-1].random_numbers = lambda: stock(*args, **kwargs)
    return stock(*args, **kwargs)


def _without_padding(value: Any) -> Any:
    """A sharded state dict without what lies between the parameters of the distributed optimizer: nobody sets it."""
    if isinstance(value, dict):
        return {key: _without_padding(each) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    flags = (each.get("padding") if isinstance(each, dict) else None for each in value)
    is_padding = [isinstance(flag, LocalNonpersistentObject) and bool(flag.unwrap()) for flag in flags]
    return [_without_padding(each) for each, is_out in zip(value, is_padding, strict=True) if not is_out]


def _prove(directory: str, calls: _Calls) -> None:
    if calls.generate is None or calls.arguments is None:
        return
    given = calls.arguments.arguments
    if given.get("optim_sd_kwargs") is not None:
        given["optim_sd_kwargs"] = {**given["optim_sd_kwargs"], "is_loading": False}
    if given.get("rng_state") and calls.random_numbers is not None:
        given["rng_state"] = calls.random_numbers()
    live = _without_padding(calls.generate(*calls.arguments.args, **calls.arguments.kwargs))
    sharded, common = versions.prepare_to_save(live, None)
    # Megatron's tensors of one shard do not say which dtype they have.
    planner = RobustLoadPlanner(False, False, on_dtype_mismatch="cast")
    saved = load_common_state_dict(None, directory)

    def add_common(comparison: Comparison) -> None:
        for key in common.keys() & saved.keys() - set(_OF_THIS_JOB):
            comparison.add_object(f"common.{key}", common[key], saved[key], 0)

    report = compare(
        versions.to_dcp_live(sharded),
        planner=planner,
        storage_reader=RobustReader(directory, trusted=current_options().trusted),
        timeout_seconds=current_options().exchange_timeout_seconds,
        also=add_common,
    )
    if report.differing or report.missing:  # a job may leave out the optimizer on purpose
        report.raise_if_differs()
    logger.info("%s", report)
