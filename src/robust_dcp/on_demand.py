"""Imports what needs torch only when it is used, because importing torch takes seconds.

``robust-dcp ls`` prints its first line before torch could have been imported. So no module on its way may import torch:
the package itself, the calls to the file system, and what reads ``.metadata``. They name our exceptions as
``errors.StorageError``. The module of that name is imported when the first error is raised or looked for.

This is PEP 562, as in ``lazy_loader`` of scikit-image.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

__all__ = ["errors", "names_from"]


class _Module:
    """A module that is imported when one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from robust_dcp import errors
else:
    errors = _Module("robust_dcp.errors")


def names_from(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__``, with ``__all__``, and ``__dir__`` for a package whose names are imported when they are used.

    Args:
        package: the name of the package.
        modules: for each module the public names that it defines. No module of the package may have such a name: once
            imported, it would be found instead.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name == "__all__":
            return names()
        if name not in homes and not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")  # robust_dcp.storage, as if the package had imported it
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(importlib.import_module(package), name, found)  # so that the next use does not come here
        return found

    def names() -> list[str]:
        return sorted(homes)

    return get, names
