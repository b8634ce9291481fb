"""Switches robust_dcp on in processes that ask for it. PyTorch calls this module at every ``import torch``.

Owns only the entry point of group ``torch.backends``. The module is outside of the package and needs the standard
library only. So a process that does not use robust_dcp only pays for a look at its arguments. The module never imports
Megatron. It never raises either, because an exception here would break ``import torch`` for everybody.
"""

import os
import sys

TYPE_CHECKING = False  # the import of typing would take longer than everything done here
if TYPE_CHECKING:
    from typing import Any

__all__ = ["activate", "planner_asked_for"]

_FLAG = "--ckpt-planner"
_VARIABLE = "ROBUST_DCP"
_DCP = "torch.distributed.checkpoint"


def planner_asked_for(arguments: "list[str]", environment: "os._Environ[str] | dict[str, str]") -> "str | None":
    """The planner that the command line or the environment names: ``"robust_dcp"``, ``"default"``, or ``None``.

    Args:
        arguments: the value of ``sys.argv``. The last ``--ckpt-planner X`` or ``--ckpt-planner=X`` counts.
        environment: the value of ``os.environ``. ``ROBUST_DCP=1`` counts if there is no such argument.
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
    """Watch for the modules that robust_dcp takes over, if the user asked for it. ``import torch`` calls this.

    ``ROBUST_DCP=1`` is for ``torch.distributed.checkpoint`` and Megatron. ``--ckpt-planner`` is for Megatron only.
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
    """A finder that waits for the first import of a module to take over. Then robust_dcp's own hook replaces it.

    Until then nothing of robust_dcp is imported. It needs torch, and torch is not complete when :func:`activate` runs.

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
                # robust_dcp imports this module itself, so the module has to be complete first.
                return self._spec_that_installs(path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            _report(error)
        return None

    def install(self) -> None:
        """Switch robust_dcp on, once."""
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
    """Wraps the loader of a module, and installs robust_dcp after the module's code has run."""

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
