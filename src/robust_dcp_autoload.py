"""Switches robust_dcp on in processes that ask for it; what PyTorch calls at every ``import torch``.

Owns the entry point of group ``torch.backends`` and nothing else. It stands beside the package, not in it, and needs
the standard library only, so that a process that does not ask pays for one look at its arguments. It never imports
Megatron, and never raises: an exception here would break ``import torch`` for everybody.
"""

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from typing import Any

__all__ = ["activate", "planner_asked_for"]

_FLAG = "--ckpt-planner"
_VARIABLE = "ROBUST_DCP"
_DCP = "torch.distributed.checkpoint"


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
    """Called by ``import torch``, before it returns: wait for what robust_dcp is to take over, if it is asked for.

    ``ROBUST_DCP=1`` is for ``torch.distributed.checkpoint`` and for Megatron, ``--ckpt-planner`` for Megatron alone.
    """
    try:
        # An embedded interpreter may have no sys.argv.
        planner = planner_asked_for(getattr(sys, "argv", []), os.environ)
        is_for_all = planner == "robust_dcp" and os.environ.get(_VARIABLE, "") not in ("", "0")
        if planner is not None and not any(isinstance(finder, _ModuleIsComing) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ModuleIsComing(planner, is_for_all))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _report(error)


class _ModuleIsComing:
    """A finder that waits for the first import of a module that is taken over, and makes way for robust_dcp's hook.

    Until then nothing of robust_dcp is imported: torch, which it needs, is not complete when :func:`activate` runs.

    Args:
        planner: ``"robust_dcp"`` or ``"default"``.
        is_for_all: whether ``torch.distributed.checkpoint`` is taken over too.
    """

    def __init__(self, planner: str, is_for_all: bool) -> None:
        self.planner = planner
        self.is_for_all = is_for_all

    def find_spec(self, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        try:
            if fullname.partition(".")[0] in ("megatron", "megatron_fsdp"):
                self.install()
            elif fullname == _DCP and self.is_for_all:
                # robust_dcp imports this very module: it has to be complete first.
                return self._spec_that_installs(path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            _report(error)
        return None

    def install(self) -> None:
        """Let robust_dcp take over what it was asked for, once."""
        if self not in sys.meta_path:
            return
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        from importlib import import_module

        if self.is_for_all:
            import_module("robust_dcp.installation").install()
        else:
            import_module("robust_dcp.megatron.installation").install(self.planner)

    def _spec_that_installs(self, path: "Any") -> "Any":
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(_DCP, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _InstallingLoader:
    """The loader of a module, with robust_dcp installed once the module's code has run."""

    def __init__(self, loader: "Any", waiting: _ModuleIsComing) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: "Any") -> "Any":
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # nobody sees a difference
        self._loader.exec_module(module)
        try:
            self._waiting.install()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            _report(error)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _report(error: BaseException) -> None:
    sys.stderr.write(
        f"robust_dcp was asked for ({_FLAG} or {_VARIABLE}) but could not be switched on, so stock code saves and "
        f"loads checkpoints: {type(error).__name__}: {error}\n"
    )
