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
    "MegatronPlanner": "megatron.shards.MegatronPlanner",
    "RobustLoadStrategy": "megatron.load.RobustLoadStrategy",
    "RobustSaveStrategy": "megatron.save.RobustSaveStrategy",
    "install": "installation.install_for_megatron",
    "uninstall": "installation.uninstall",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].rpartition(".")
    return getattr(import_module(f"robust_dcp.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
