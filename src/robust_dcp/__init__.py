"""Saves and loads PyTorch distributed checkpoints: validated plans, exchanges that end, durable commits.

Importing torch takes seconds, and ``robust-dcp ls`` prints its first line before that. So this module imports nothing
that needs torch before it is used, and neither does a module on the way of that command: the calls to the file system,
and what reads ``.metadata``. These import ``errors`` from here.
"""

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
"""It is part of every plan's signature."""


class _Errors:
    """The module ``errors``, until it is imported: when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("robust_dcp.errors"), name)


if TYPE_CHECKING:
    from robust_dcp import errors as errors
    from robust_dcp.installation import install as install
    from robust_dcp.installation import uninstall as uninstall
    from robust_dcp.public import *  # noqa: F403
    from robust_dcp.public_later import *  # noqa: F403
else:
    errors = _Errors()

_SWITCH = ("install", "uninstall")
"""The public names that need no torch, which need not be imported yet when ``install`` is called."""


_PUBLIC = ("public", "public_later")


def _names_of(module: str) -> dict[str, Any]:
    """The public names in a module. It is imported when one is first used (PEP 562), and they are attributes then."""
    # The collector would look through all of torch meanwhile, again and again.
    is_new = f"robust_dcp.{module}" not in sys.modules
    with import_module("robust_dcp.collector").without_garbage_collection():
        found = import_module(f"robust_dcp.{module}")
        if is_new and not gc.get_freeze_count():  # which counts them one by one
            # All of it stays, and goes to the oldest generation: the collector would look through it right after this.
            gc.freeze()
            gc.unfreeze()
    names = {name: value for name, value in vars(found).items() if name[0] != "_"}
    for name, value in names.items():
        globals().setdefault(name, value)  # somebody may have set it anew
    return names


def __dir__() -> list[str]:
    return sorted(["__version__", *_SWITCH, *chain.from_iterable(map(_names_of, _PUBLIC))])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _SWITCH:
        return getattr(import_module("robust_dcp.installation"), name)
    if not name.startswith("_"):
        if find_spec(f"robust_dcp.{name}"):
            return import_module(f"robust_dcp.{name}")  # robust_dcp.storage, as if the package had imported it
        for names in map(_names_of, _PUBLIC):
            if name in names:
                return names[name]
    raise AttributeError(f"module 'robust_dcp' has no attribute {name!r}")


if not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", True):
    # torch was imported before, and is not importing us itself (entry point ``torch.backends``). So this is no command
    # that has to be quick, and what a save needs is imported now, not while training waits for the first one.
    _names_of("public")
