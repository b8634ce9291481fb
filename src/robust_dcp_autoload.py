"""Switches robust_dcp on in processes that ask for it. PyTorch calls this module at every ``import torch``.

Owns only the entry point of group ``torch.backends``. A process that does not ask for robust_dcp pays for a look at its
arguments and its environment, and imports nothing. What was asked for and cannot be had ends the process here, before
it trains: a mistyped variable, or an installation that does not work.
"""

import os
import sys

__all__ = ["activate", "planner_asked_for"]

_FLAG = "--ckpt-planner"
_VARIABLE = "ROBUST_DCP"


def planner_asked_for(
    arguments: "list[object] | list[str]", environment: "os._Environ[str] | dict[str, str]"
) -> "str | None":
    """The planner that the command line or the environment names: ``"robust_dcp"``, ``"default"``, or ``None``.

    Args:
        arguments: the value of ``sys.argv``. The last ``--ckpt-planner X`` or ``--ckpt-planner=X`` counts.
        environment: the value of ``os.environ``. ``ROBUST_DCP=1`` counts if there is no such argument. ``ROBUST_DCP=0``
            wins over the argument, which is then only parsed.

    Raises:
        ValueError: a variable of robust_dcp has a value that makes no sense.
    """
    planner: str | None = None
    for place, argument in enumerate(arguments):
        if argument == _FLAG:
            planner = str(arguments[place + 1]) if place + 1 < len(arguments) else ""
        elif isinstance(argument, str) and argument.startswith(_FLAG + "="):
            planner = argument[len(_FLAG) + 1 :]
    is_on: bool | None = None
    if any(name.startswith(_VARIABLE) for name in environment):
        from robust_dcp.environment import check, value_of

        is_on = value_of(_VARIABLE, environment)
        check(environment, is_asked_for=is_on or (planner == "robust_dcp" and is_on is not False))
    if planner is None:
        return "robust_dcp" if is_on else None
    return "robust_dcp" if planner == "robust_dcp" and is_on is not False else "default"


def activate() -> None:
    """Install what the user asked for. This runs at each ``import torch``.

    ``ROBUST_DCP=1`` is for ``torch.distributed.checkpoint`` and Megatron. ``--ckpt-planner`` is for Megatron only.

    Raises:
        SystemExit: a variable of robust_dcp has a value that makes no sense, or robust_dcp cannot be installed.
    """
    try:
        arguments = getattr(sys, "argv", None)  # an embedded interpreter may have none
        planner = planner_asked_for([] if arguments is None else arguments, os.environ)
    except ValueError as error:
        sys.exit(f"robust_dcp: {error}")
    if planner is None:
        return
    try:
        from robust_dcp.environment import value_of
        from robust_dcp.installation import install, install_for_megatron

        if planner == "robust_dcp" and value_of(_VARIABLE):
            install()
        else:
            install_for_megatron("robust_dcp" if planner == "robust_dcp" else "default")
    except Exception as error:
        sys.exit(
            f"robust_dcp was asked for ({_FLAG} or {_VARIABLE}) and cannot be switched on: "
            f"{type(error).__name__}: {error}. Mend that, or set {_VARIABLE}=0 to save by stock code"
        )
