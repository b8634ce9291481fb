"""Switches robust_dcp on in processes that ask for it; what PyTorch calls at every ``import torch``.

Owns the entry point of group ``torch.backends`` and nothing else. It stands beside the package, not in it, and needs
the standard library only, so that a process that does not ask pays for one look at its arguments. It never imports
Megatron, and never raises: an exception here would break ``import torch`` for everybody.
"""

import os
import sys

__all__ = ["activate", "planner_asked_for"]

_FLAG = "--ckpt-planner"
_VARIABLE = "ROBUST_DCP"


def planner_asked_for(arguments: "list[str]", environment: "os._Environ[str] | dict[str, str]") -> "str | None":
    """Which planner a command line and an environment name: ``"robust_dcp"``, ``"default"``, or ``None`` for neither.

    Args:
        arguments: as ``sys.argv``; the last ``--ckpt-planner X`` or ``--ckpt-planner=X`` counts.
        environment: as ``os.environ``; ``ROBUST_DCP=1`` counts where no argument does.
    """
    planner = None
    for place, argument in enumerate(arguments):
        if argument == _FLAG:
            planner = arguments[place + 1] if place + 1 < len(arguments) else ""
        elif argument.startswith(_FLAG + "="):
            planner = argument[len(_FLAG) + 1 :]
    if planner is None and environment.get(_VARIABLE, "") not in ("", "0"):
        planner = "robust_dcp"
    if planner is None:
        return None
    return "robust_dcp" if planner == "robust_dcp" else "default"


def activate() -> None:
    """Called by ``import torch``, before it returns: wait for Megatron if robust_dcp is asked for, else do nothing."""
    try:
        # An embedded interpreter may have no sys.argv.
        planner = planner_asked_for(getattr(sys, "argv", []), os.environ)
        if planner is not None and not any(isinstance(finder, _MegatronIsComing) for finder in sys.meta_path):
            sys.meta_path.insert(0, _MegatronIsComing(planner))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _report(error)


class _MegatronIsComing:
    """A finder that finds nothing: at the first import of a module of Megatron it makes way for robust_dcp's hook.

    Until then nothing of robust_dcp is imported: torch, which it needs, is not complete when :func:`activate` runs.
    """

    def __init__(self, planner: str) -> None:
        self.planner = planner

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] not in ("megatron", "megatron_fsdp"):
            return
        try:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            from robust_dcp.megatron.installation import install

            install("robust_dcp" if self.planner == "robust_dcp" else "default")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            _report(error)


def _report(error: BaseException) -> None:
    sys.stderr.write(
        f"robust_dcp was asked for ({_FLAG} or {_VARIABLE}) but could not be switched on, so Megatron saves and loads "
        f"checkpoints by itself: {type(error).__name__}: {error}\n"
    )
