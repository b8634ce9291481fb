"""Saves and loads Megatron-Core's distributed checkpoints by robust_dcp.

Owns the public names of this package. Each is loaded when it is first used, so importing the package imports nothing
of Megatron. :func:`install` takes over Megatron's own calls. The strategies are for code that passes a strategy itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_dcp.installation import install_for_megatron as install
    from robust_dcp.installation import uninstall
    from robust_dcp.megatron.load import RobustLoadStrategy
    from robust_dcp.megatron.save import RobustSaveStrategy
    from robust_dcp.megatron.shards import MegatronPlanner

__all__ = ["MegatronPlanner", "RobustLoadStrategy", "RobustSaveStrategy", "install", "uninstall"]

_HOMES = {
    "MegatronPlanner": ("robust_dcp.megatron.shards", "MegatronPlanner"),
    "RobustLoadStrategy": ("robust_dcp.megatron.load", "RobustLoadStrategy"),
    "RobustSaveStrategy": ("robust_dcp.megatron.save", "RobustSaveStrategy"),
    "install": ("robust_dcp.installation", "install_for_megatron"),
    "uninstall": ("robust_dcp.installation", "uninstall"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
