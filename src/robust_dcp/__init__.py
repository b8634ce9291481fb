"""Saves and loads PyTorch distributed checkpoints: validated plans, exchanges that end, durable commits."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from robust_dcp.version import __version__ as __version__

if TYPE_CHECKING:
    from robust_dcp.installation import install as install
    from robust_dcp.installation import uninstall as uninstall
    from robust_dcp.manager.manager import CheckpointManager as CheckpointManager
    from robust_dcp.manager.series import Checkpoint as Checkpoint
    from robust_dcp.manager.series import KeepBest as KeepBest
    from robust_dcp.manager.series import KeepEvery as KeepEvery
    from robust_dcp.manager.series import KeepLast as KeepLast
    from robust_dcp.manager.series import KeepPolicy as KeepPolicy
    from robust_dcp.public import *  # noqa: F403

_ROOMS = {
    **dict.fromkeys(("install", "uninstall"), "installation"),
    **dict.fromkeys(("Checkpoint", "KeepBest", "KeepEvery", "KeepLast", "KeepPolicy"), "manager.series"),
    "CheckpointManager": "manager.manager",
}
"""The other public names, and the module of each, which is imported when the name is used."""


def _public() -> dict[str, Any]:
    """The names of ``public``. They are imported when one is first used, since torch takes seconds, and ``robust-dcp
    ls`` needs none (PEP 562). From then on they are attributes."""
    names = {name: value for name, value in vars(import_module("robust_dcp.public")).items() if name[0] != "_"}
    globals().update(names)
    return names


def __dir__() -> list[str]:
    return sorted(["__version__", *_ROOMS, *_public()])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _ROOMS:  # torch need not be imported yet when `install` is called
        return getattr(import_module(f"robust_dcp.{_ROOMS[name]}"), name)
    if not name.startswith("_"):
        if find_spec(f"robust_dcp.{name}"):
            return import_module(f"robust_dcp.{name}")  # robust_dcp.storage, as if the package had imported it
        if name in (names := _public()):
            return names[name]
    raise AttributeError(f"module 'robust_dcp' has no attribute {name!r}")


if not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", True):
    # torch was imported before, and is not importing us itself (entry point ``torch.backends``). So this is no command
    # that has to be quick, and what a save needs is imported now, not while training waits for the first one.
    _public()
