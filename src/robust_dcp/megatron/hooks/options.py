"""The user's options for Megatron's checkpoints. Arguments come first, then the environment, then the defaults.

Owns :class:`MegatronOptions` and the names of the environment variables. It reads Megatron's arguments after Megatron
has parsed them, and imports nothing of Megatron. Called by everything in this package.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from robust_dcp.environment import value_of

__all__ = [
    "OPTIONS",
    "MegatronOptions",
    "Option",
    "choose_planner",
    "current_options",
    "default_planner",
    "megatron_arguments",
    "options_from_environment",
    "save_argument",
]

Planner = Literal["default", "robust_dcp"]
Layout = Literal["torch", "safetensors"]
OnStructureChange = Literal["rebuild", "error", "quiet"]
OnUnloadableObject = Literal["warn", "error", "ignore"]
SaveFailure = Literal["raise", "warn"]


class Option(NamedTuple):
    """One option: its field in :class:`MegatronOptions`, its argument and its environment variable."""

    field: str
    argument: str
    variable: str
    choices: tuple[str, ...]
    parse: Callable[[str], Any]
    help: str

    @property
    def dest(self) -> str:
        """The attribute of Megatron's parsed arguments."""
        return self.argument.removeprefix("--").replace("-", "_")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


OPTIONS: tuple[Option, ...] = (
    Option(
        "planner",
        "--ckpt-planner",
        "ROBUST_DCP",
        ("default", "robust_dcp"),
        str,
        "who plans, writes and reads distributed checkpoints: Megatron's own code, or robust_dcp",
    ),
    Option(
        "writer_threads",
        "--ckpt-writer-threads",
        "ROBUST_DCP_WRITER_THREADS",
        (),
        _positive_int,
        "threads, and files, with which each rank writes; robust_dcp chooses if it is not given",
    ),
    Option(
        "writer_buffer_bytes",
        "--ckpt-writer-buffer-bytes",
        "ROBUST_DCP_WRITER_BUFFER_BYTES",
        (),
        _positive_int,
        "limit for the memory that each rank's writer takes, in bytes; robust_dcp chooses if it is not given",
    ),
    Option(
        "layout",
        "--ckpt-layout",
        "ROBUST_DCP_LAYOUT",
        ("torch", "safetensors"),
        str,
        "format of the files: torch is what Megatron reads; safetensors is for other tools",
    ),
    Option(
        "exchange_timeout_seconds",
        "--ckpt-exchange-timeout-seconds",
        "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS",
        (),
        _positive_seconds,
        "how long ranks wait for each other in each exchange of a save or load before the missing ones are named",
    ),
    Option(
        "on_structure_change",
        "--ckpt-on-structure-change",
        "ROBUST_DCP_ON_STRUCTURE_CHANGE",
        ("rebuild", "error", "quiet"),
        str,
        "when the state dict is not what it was in the last save: plan anew and log the keys, fail, or plan anew",
    ),
    Option(
        "on_unloadable_object",
        "--ckpt-on-unloadable-object",
        "ROBUST_DCP_ON_UNLOADABLE_OBJECT",
        ("warn", "error", "ignore"),
        str,
        "when a save holds an object that a load would refuse: warn once, fail, or say nothing",
    ),
    Option(
        "trusted",
        "--ckpt-trusted",
        "ROBUST_DCP_TRUSTED",
        (),
        _switch,
        "1: load objects of any class, which runs whatever code the checkpoint names; 0: refuse what is not plain data",
    ),
    Option(
        "save_failure",
        "--ckpt-save-failure",
        "ROBUST_DCP_SAVE_FAILURE",
        ("raise", "warn"),
        str,
        "when a save fails on any rank: raise on all of them, or log why and go on with training",
    ),
)


_chosen: list[Planner] = []


def choose_planner(planner: Planner) -> None:
    """Set the planner of this process, for jobs in which neither the arguments nor the environment name one."""
    _chosen[:] = [planner]


def default_planner() -> Planner:
    """The planner that :func:`choose_planner` has set, or ``"default"``."""
    return _chosen[0] if _chosen else "default"


@dataclass(frozen=True)
class MegatronOptions:
    """How Megatron's checkpoints are saved and loaded.

    Attributes:
        planner: ``"robust_dcp"`` or ``"default"``. With ``"default"`` every replacement calls Megatron's own code.
        writer_threads: the number of threads of each rank. Each writes a file. ``None`` lets the writer choose.
        writer_buffer_bytes: limit for the memory of each rank's writer; ``None`` lets the writer choose.
        layout: the format of the files. Megatron itself reads ``"torch"`` only.
        exchange_timeout_seconds: the timeout of each exchange between ranks.
        on_structure_change: ``"rebuild"`` (log the keys and plan anew), ``"error"`` or ``"quiet"`` (plan anew).
        on_unloadable_object: what to do if a load would refuse an object: ``"warn"``, ``"error"`` or ``"ignore"``.
        trusted: whether objects may run code when they are loaded.
        save_failure: ``"raise"`` or ``"warn"``. With ``"warn"`` a failed save is logged and training goes on.
    """

    planner: Planner = field(default_factory=default_planner)
    writer_threads: int | None = None
    writer_buffer_bytes: int | None = None
    layout: Layout = "torch"
    exchange_timeout_seconds: float = 300.0
    on_structure_change: OnStructureChange = "rebuild"
    save_failure: SaveFailure = "raise"
    on_unloadable_object: OnUnloadableObject = "warn"
    trusted: bool = False


def options_from_environment(environment: Mapping[str, str] = os.environ) -> MegatronOptions:
    """The options that environment variables set, and defaults for the others. An empty variable counts as not set.

    Raises:
        ValueError: a variable has an invalid value. The message says which, what is expected and what was found.
    """
    found = {option.field: value_of(option.variable, environment) for option in OPTIONS}
    if found["planner"] is not None:
        found["planner"] = "robust_dcp" if found["planner"] else "default"
    return MegatronOptions(**{name: value for name, value in found.items() if value is not None})


def current_options() -> MegatronOptions:
    """The options in force now.

    ``ROBUST_DCP=0`` wins over everything. Else an option comes from Megatron's parsed arguments. If they do not have
    it, as with ms-swift or verl, which parse arguments of their own, it comes from the environment. Otherwise it has
    its default.

    Raises:
        ValueError: an environment variable has an invalid value, see :func:`options_from_environment`.
    """
    options = options_from_environment()
    arguments = megatron_arguments()
    if arguments is None:
        return options
    found = {option.field: getattr(arguments, option.dest, None) for option in OPTIONS}
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("planner", "robust_dcp") != "robust_dcp" or value_of("ROBUST_DCP") is False:
        given["planner"] = "default"  # a later Megatron's own argument may name other planners, which are Megatron's
    return dataclasses.replace(options, **given)


def save_argument() -> Any:
    """Megatron's ``--save``, the directory of all its checkpoints, or ``None`` if there is no such argument."""
    return getattr(megatron_arguments(), "save", None)


def megatron_arguments() -> Any:
    """What ``megatron.training.get_args()`` returns, or ``None`` if it is not imported or has not parsed arguments."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None or not hasattr(global_vars, "get_args"):
        return None
    try:
        return global_vars.get_args()
    except AssertionError:  # "args is not initialized."
        return None
