"""Imports what needs torch only when it is used, because importing torch takes seconds.

``robust-dcp ls`` prints its first line before torch could have been imported. So no module on its way may import torch:
the package itself, the calls to the file system, and what reads ``.metadata``. They name our exceptions as
``errors.StorageError``. The module of that name is imported when the first error is raised or looked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


class _Module:
    """A module that is imported when one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from robust_dcp import errors as errors  # noqa: PLC0414 (other modules import it from here)
else:
    errors = _Module("robust_dcp.errors")
