"""Saves and loads PyTorch distributed checkpoints: validated plans, exchanges that end, durable commits."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from robust_dcp.version import __version__ as __version__

if TYPE_CHECKING:
    from robust_dcp.public import *  # noqa: F403


def _public() -> dict[str, Any]:
    """The public names. They are imported when one is first used, since torch takes seconds, and ``robust-dcp ls``
    needs none (PEP 562). From then on they are attributes."""
    names = {name: value for name, value in vars(import_module("robust_dcp.public")).items() if name[0] != "_"}
    globals().update(names)
    return names


def __dir__() -> list[str]:
    return sorted(["__version__", *_public()])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in ("install", "uninstall"):  # torch need not be imported yet when they are called
        return getattr(import_module("robust_dcp.installation"), name)
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
