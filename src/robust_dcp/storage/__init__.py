"""The bytes of a checkpoint: layouts, records, writer, commit, reader, and the metadata file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_dcp.storage.tuning import tune as tune


def __getattr__(name: str) -> Any:
    if name != "tune":  # the package is imported where torch is not
        raise AttributeError(f"module 'robust_dcp.storage' has no attribute {name!r}")
    return import_module("robust_dcp.storage.tuning").tune
