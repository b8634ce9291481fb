"""Adds ``--ckpt-planner`` and the other arguments of robust_dcp to Megatron-LM's own parser.

Owns how ``options.OPTIONS`` become arguments. Their defaults come from the environment. Megatron's parser calls this
through the patch in :data:`PATCHES`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.hooks.options import OPTIONS, Option, options_from_environment
from robust_dcp.switch.patching import Patch

__all__ = ["PATCHES", "add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of robust_dcp to a parser, in a group of their own.

    A later Megatron may have an argument of the same name already. Then Megatron's argument and its default stay. If it
    has choices, those of robust_dcp are added to them. ``args`` has the value either way.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    defaults = options_from_environment()
    group = parser.add_argument_group("robust_dcp", "distributed checkpoints by robust_dcp")
    for option in OPTIONS:
        # argparse has no public way to look up an existing argument.
        existing = parser._option_string_actions.get(option.argument)
        if existing is not None:
            _extend_choices(existing, option)
            continue
        group.add_argument(
            option.argument,
            type=option.parse,
            choices=option.choices or None,
            default=getattr(defaults, option.field),
            help=f"{option.help} (environment: {option.variable})",
        )
    return parser


def _extend_choices(existing: argparse.Action, option: Option) -> None:
    if existing.choices is not None:
        known = list(existing.choices)
        existing.choices = known + [choice for choice in option.choices if choice not in known]


def _add_checkpointing_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _add_checkpointing_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        return add_arguments(original(parser, *args, **kwargs))

    return _add_checkpointing_args


PATCHES: tuple[Patch, ...] = (Patch("megatron.training.arguments", "_add_checkpointing_args", _add_checkpointing_args),)
