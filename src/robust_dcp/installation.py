"""One switch lets robust_dcp save and load for ``torch.distributed.checkpoint`` and for Megatron.

Owns :func:`install` and :func:`uninstall`, the table of all that is replaced, and the log lines that say so. A variable
of the environment switches it on while ``import torch`` still runs. So it imports neither torch nor Megatron, and the
functions of the table are imported when they are first called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from robust_dcp import __version__
from robust_dcp.environment import check, value_of
from robust_dcp.megatron.options import Planner, add_arguments, choose_planner, current_options, is_chosen
from robust_dcp.switch.patching import Patch, Patches, announce, log_left_to_stock, megatron_version

Function = Callable[..., Any]
Make = Callable[[Function], Function]


def _ours(where: str) -> Make:
    """A replacement that calls a function of ``robust_dcp.megatron`` with stock's function and the arguments.

    Where robust_dcp is not the chosen planner, stock's function runs.

    Args:
        where: the module and the function, such as ``"save.strategy_save"``.
    """
    module, _, name = f"robust_dcp.megatron.{where}".rpartition(".")

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # When Python ends nothing can be imported, and a queue that is deleted then has held no save of ours.
            if not is_chosen() or (sys.is_finalizing() and module not in sys.modules):
                return stock(*args, **kwargs)
            return getattr(import_module(module), name)(stock, *args, **kwargs)

        return replacement

    return make


def _dcp(name: str) -> Make:
    """A replacement for one of ``save``, ``load`` and ``async_save`` of ``torch.distributed.checkpoint``.

    Megatron calls them, and so does everybody else. Calls by Megatron's checkpointing go through robust_dcp if it is
    the chosen planner, and all others if :func:`install` was called.
    """

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals
            module = str(caller.get("__name__"))
            is_megatron = module in _CALLERS or _MARK in caller
            if is_megatron and name != "async_save" and is_chosen():
                return getattr(import_module("robust_dcp.megatron.dcp_formats"), name)(stock, args, kwargs)
            if _switch.is_for_all:
                return getattr(import_module("robust_dcp.switch.dcp_calls"), name)(stock, args, kwargs)
            is_said = not is_megatron and not module.startswith("torch.")
            if is_said and current_options().planner == "robust_dcp":
                log_left_to_stock(
                    f"torch.distributed.checkpoint.{name} by {module}",
                    "in this job only calls that Megatron's checkpointing makes are taken over; others call "
                    f"robust_dcp.{name}",
                )
            return stock(*args, **kwargs)

        return replacement

    return make


def _arguments(stock: Function) -> Function:
    @functools.wraps(stock)
    def _add_checkpointing_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        return add_arguments(stock(parser, *args, **kwargs))

    return _add_checkpointing_args


_LM = "megatron.training.checkpointing"
_BRIDGE = "megatron.bridge.training.checkpointing"
_CORE = "megatron.core.dist_checkpointing"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_SPLITS = "megatron.core.transformer.fsdp_dtensor_checkpoint"

_CALLERS = (_LM, _BRIDGE)
"""The modules whose calls of ``torch.distributed.checkpoint`` are Megatron's."""

_MARK = "preprocess_state_dict_for_uneven_dtensor"
"""A module with this global name saves ``fsdp_dtensor`` checkpoints by its own code. verl has such a module."""


def _of_class(module: str, owner: str, **ours: str) -> tuple[Patch, ...]:
    return tuple(Patch(module, f"{owner}.{method}", _ours(where)) for method, where in ours.items())


def _uneven(package: str) -> tuple[Patch, ...]:
    names = ("gather_and_compute_chunk_metadata", "update_uneven_dtensor_chunk_metadata", "validate_uneven_dtensor")
    module = f"{package}.uneven_dtensor"
    return tuple(Patch(module, name, _ours(f"uneven.{name}")) for name in (*names, _MARK))


_CALLBACKS = "get_save_and_finalize_callbacks"
_ARGUMENTS = Patch("megatron.training.arguments", "_add_checkpointing_args", _arguments)

PATCHES: tuple[Patch, ...] = (
    _ARGUMENTS,
    Patch("torch.distributed.checkpoint.state_dict_saver", "save", _dcp("save")),
    Patch("torch.distributed.checkpoint.state_dict_saver", "save_state_dict", _dcp("save"), optional=True),
    Patch("torch.distributed.checkpoint.state_dict_saver", "async_save", _dcp("async_save")),
    Patch("torch.distributed.checkpoint.state_dict_loader", "load", _dcp("load")),
    Patch("torch.distributed.checkpoint.state_dict_loader", "load_state_dict", _dcp("load"), optional=True),
    Patch(f"{_CORE}.serialization", "save", _ours("save.save")),
    Patch(f"{_CORE}.serialization", "load", _ours("load.load")),
    Patch(f"{_CORE}.serialization", "load_common_state_dict", _ours("load.load_common_state_dict")),
    *_of_class(
        f"{_CORE}.strategies.torch",
        "TorchDistSaveShardedStrategy",
        save="save.strategy_save",
        async_save="save.strategy_async_save",
    ),
    *_of_class(
        f"{_CORE}.strategies.torch",
        "TorchDistLoadShardedStrategy",
        load="load.strategy_load",
        load_tensors_metadata="load.load_tensors_metadata",
        load_sharded_metadata="load.load_sharded_metadata",
    ),
    *_of_class(
        f"{_CORE}.strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper",
        save="save.strategy_save",
        async_save="save.strategy_async_save",
    ),
    *_of_class(f"{_CORE}.strategies.fully_parallel", "FullyParallelLoadStrategyWrapper", load="load.parallel_load"),
    *(
        patch
        for module in (f"{_CORE}.strategies.async_utils", "nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        for patch in _of_class(
            module,
            "AsyncCallsQueue",
            schedule_async_request="async_requests.schedule_async_request",
            close="async_requests.close",
        )
    ),
    Patch(_LM, "save_checkpoint", _ours("failures.save_checkpoint"), optional=True),
    *(
        Patch(_LM, name, _ours(f"resume.{name}"), optional=True)
        for name in ("load_checkpoint", "generate_state_dict", "get_rng_state")
    ),
    Patch(
        "megatron.training.async_utils",
        "maybe_finalize_async_save",
        _ours("failures.maybe_finalize_async_save"),
        optional=True,
    ),
    Patch(_LM, "get_async_strategy", _ours("dcp_formats.get_async_strategy"), optional=True),  # from 0.17
    Patch(_BRIDGE, "save_state_dict_async_plan", _ours("dcp_formats.start_save"), optional=True),
    *(Patch(module, _CALLBACKS, _ours(f"dcp_formats.{_CALLBACKS}"), optional=True) for module in _CALLERS),
    *_uneven(_FSDP),
    *_uneven("megatron_fsdp"),
    Patch(_SPLITS, "make_fsdp_dtensor", _ours("uneven.make_fsdp_dtensor"), optional=True),
    Patch(_SPLITS, "handle_swiglu_in_state_dict", _ours("uneven.handle_in_state_dict"), optional=True),
    Patch(_SPLITS, "handle_gdn_in_state_dict", _ours("uneven.handle_gdn_in_state_dict"), optional=True),  # from 0.17
    Patch(_SPLITS, "handle_mla_down_proj_in_state_dict", _ours("uneven.handle_in_state_dict"), optional=True),  # 0.20
    Patch(_SPLITS, "handle_mtp_in_state_dict", _ours("uneven.handle_in_state_dict"), optional=True),  # 0.20
)
"""All that is replaced. Some versions or wheels lack some modules. Such a module is never imported, so it is never
patched."""


class _Switch:
    """What is installed in this process.

    Attributes:
        is_for_all: whether calls of ``torch.distributed.checkpoint`` by any module go through robust_dcp.
    """

    def __init__(self) -> None:
        self.is_for_all = False
        self.patches = Patches(self._announce)
        self._announced: set[str] = set()

    def turn_on(self, planner: Planner, *, for_all: bool) -> None:
        is_off = value_of("ROBUST_DCP") is False
        check(is_asked_for=not is_off)
        if is_off:  # it wins over all that asks for robust_dcp
            planner, for_all = "default", False
        choose_planner(planner)
        self.is_for_all = for_all or self.is_for_all
        self.patches.apply(PATCHES if planner == "robust_dcp" else (_ARGUMENTS,))

    def turn_off(self) -> None:
        choose_planner("default")
        self.is_for_all = False
        self._announced.clear()
        self.patches.remove()

    def _announce(self, patch: Patch) -> None:
        """Say once for each world what is taken over, with its first patched module, when its version is known."""
        world = patch.module.partition(".")[0]
        if patch is _ARGUMENTS or world in self._announced or (world == "torch" and not self.is_for_all):
            return
        self._announced.add(world)
        torch: Any = sys.modules["torch"]
        if world == "torch":
            announce(
                f"robust_dcp {__version__} takes over save, load and async_save of torch.distributed.checkpoint "
                f"(torch {torch.__version__})"
            )
        elif world == "megatron":
            announce(
                f"robust_dcp {__version__} is the planner of Megatron's checkpoints: it takes over saves of "
                "torch_dist, loads of torch_dist, torch_dcp and fsdp_dtensor, uneven DTensors "
                f"(megatron-core {megatron_version()}, torch {torch.__version__})"
            )


_switch = _Switch()


def install() -> None:
    """Let robust_dcp run this process's saves and loads by ``torch.distributed.checkpoint``, and those of Megatron.

    ``ROBUST_DCP=1`` in the environment does the same in every process, without a change to the program. A second call
    changes nothing. Call this on every rank. It exchanges nothing.

        import robust_dcp

        robust_dcp.install()

    A module may have imported a function by ``from torch.distributed.checkpoint import save``. It is replaced there
    too. Stock code still runs the calls that robust_dcp does not support, such as those with a storage writer of
    another package. Each such case is logged once.

    ``ROBUST_DCP=0`` in the environment wins: then this does nothing, and says so.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    if value_of("ROBUST_DCP") is False:
        announce("robust_dcp.install() does nothing, because ROBUST_DCP=0 is in the environment")
    _switch.turn_on("robust_dcp", for_all=True)


def install_for_megatron(planner: Planner = "robust_dcp") -> None:
    """Let robust_dcp save and load Megatron's distributed checkpoints in this process.

    Megatron's modules that are imported already are patched now. The others are patched when they are imported. A
    second call can only change the planner. Call this on every rank. It exchanges nothing.

        import robust_dcp.megatron

        robust_dcp.megatron.install()

    Args:
        planner: the planner to use if neither the argument ``--ckpt-planner`` nor ``ROBUST_DCP`` names one. With
            ``"default"`` only the arguments are added to Megatron's parser, and no save or load is replaced.

    Raises:
        ValueError: an environment variable has an invalid value (:func:`robust_dcp.environment.check`), or ``planner``
            is neither ``"robust_dcp"`` nor ``"default"``.
    """
    if planner not in ("robust_dcp", "default"):
        raise ValueError(f"install(planner={planner!r}): expected 'robust_dcp' or 'default'")
    _switch.turn_on(planner, for_all=False)


def uninstall() -> None:
    """Undo :func:`install` and ``robust_dcp.megatron.install``: put back the original object of every attribute.

    Parsers of Megatron that were made in the meantime keep our arguments. It is harmless to call this twice or without
    :func:`install`.
    """
    _switch.turn_off()
