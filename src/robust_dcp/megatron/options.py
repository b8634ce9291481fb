"""The user's options for Megatron's checkpoints. Arguments come first, then the environment, then the defaults.

Owns the arguments that an unmodified Megatron-LM gets, and who saves: :func:`is_chosen`. It reads Megatron's arguments
after Megatron has parsed them, and imports nothing of Megatron when it is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from robust_dcp.environment import VARIABLES, value_of
from robust_dcp.switch.patching import log_left_to_stock

Planner = Literal["default", "robust_dcp"]

FORMATS = ("torch_dist", "torch_dcp", "fsdp_dtensor")
"""The values of ``--ckpt-format`` that robust_dcp takes over."""


class Option(NamedTuple):
    """One option. Its names follow from its field in :class:`MegatronOptions`: of ``writer_threads`` the argument is
    ``--ckpt-writer-threads`` and the environment variable ``ROBUST_DCP_WRITER_THREADS``."""

    field: str
    choices: tuple[str, ...]
    help: str

    @property
    def dest(self) -> str:
        """The attribute of Megatron's parsed arguments."""
        return f"ckpt_{self.field}"

    @property
    def argument(self) -> str:
        """The argument of the command line."""
        return "--" + self.dest.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable. The one that switches robust_dcp on is ``ROBUST_DCP``."""
        return _VARIABLES.get(self.field, f"ROBUST_DCP_{self.field.upper()}")


_VARIABLES = {"planner": "ROBUST_DCP", "prove_resume": "ROBUST_DCP_PROVE"}

OPTIONS: tuple[Option, ...] = (
    Option(
        "planner",
        ("default", "robust_dcp"),
        "who plans, writes and reads distributed checkpoints: Megatron's own code, or robust_dcp",
    ),
    Option(
        "writer_threads",
        (),
        "threads, and files, with which each rank writes; robust_dcp chooses if it is not given",
    ),
    Option(
        "exchange_timeout_seconds",
        (),
        "how long ranks wait for each other in each exchange of a save or load before the missing ones are named",
    ),
    Option(
        "trusted",
        (),
        "1: load objects of any class, which runs whatever code the checkpoint names; 0: refuse what is not plain data",
    ),
    Option(
        "save_failure",
        ("raise", "warn"),
        "when a save fails on any rank: raise on all of them, or log why and go on with training",
    ),
    Option(
        "prove_resume",
        (),
        "after a load, compare model, optimizer, scheduler and random numbers with the checkpoint; a difference raises",
    ),
    Option(
        "parity_nodes",
        (),
        "where each node saves to a drive of its own: about how many nodes keep parity for each other, so that a "
        "checkpoint outlives the loss of any one of them; none if it is not given",
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
        exchange_timeout_seconds: the timeout of each exchange between ranks.
        trusted: whether objects may run code when they are loaded.
        save_failure: ``"raise"`` or ``"warn"``. With ``"warn"`` a failed save is logged and training goes on.
        prove_resume: whether ``load_checkpoint`` compares what is live with the checkpoint.
        parity_nodes: as for ``WriteOptions``.
    """

    planner: Planner = field(default_factory=default_planner)
    writer_threads: int | None = None
    exchange_timeout_seconds: float = 300.0
    trusted: bool = False
    save_failure: Literal["raise", "warn"] = "raise"
    prove_resume: bool = False
    parity_nodes: int | None = None


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
        given["planner"] = "default"
    return dataclasses.replace(options, **given)


def is_chosen() -> bool:
    """Whether Megatron's saves and loads go through robust_dcp.

    They do if robust_dcp is the planner and the files are on mounted file systems. With ``--enable-msc`` they are not,
    and only Megatron's own code can read and write them.
    """
    if current_options().planner != "robust_dcp":
        return False
    msc = sys.modules.get("megatron.core.msc_utils")
    if msc is None or not msc.MultiStorageClientFeature.is_enabled():
        return True
    log_left_to_stock(
        "every checkpoint of this job",
        "--enable-msc: the Multi-Storage Client's storage is not a mounted file system",
    )
    return False


def megatron_arguments() -> Any:
    """What ``megatron.training.get_args()`` returns, or ``None`` if it is not imported or has not parsed arguments."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None or not hasattr(global_vars, "get_args"):
        return None
    try:
        return global_vars.get_args()
    except AssertionError:  # "args is not initialized."
        return None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of robust_dcp to a parser, in a group of their own. Their defaults come from the environment.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    defaults = options_from_environment()
    group = parser.add_argument_group("robust_dcp", "distributed checkpoints by robust_dcp")
    for option in OPTIONS:
        if option.argument in parser._option_string_actions:  # argparse has no public way to look that up
            continue
        # Of a switch the word alone is enough.
        is_switch = isinstance(getattr(defaults, option.field), bool)
        alone: dict[str, Any] = {"nargs": "?", "const": True} if is_switch else {}
        group.add_argument(
            option.argument,
            type=str if option.choices else VARIABLES[option.variable],
            **alone,
            choices=option.choices or None,
            default=getattr(defaults, option.field),
            help=f"{option.help} (environment: {option.variable})",
        )
    return parser
