"""Saves and loads Megatron-Core's distributed checkpoints by robust_dcp.

Owns the public names of this package. Each is loaded when it is first used, so importing the package imports nothing
of Megatron. :func:`install` takes over Megatron's own calls. The strategies are for code that passes a strategy itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_dcp.megatron.installation import install, uninstall
    from robust_dcp.megatron.loading.load_strategy import RobustLoadStrategy
    from robust_dcp.megatron.saving.planner import MegatronPlanner
    from robust_dcp.megatron.saving.save_strategy import RobustSaveStrategy

__all__ = ["MegatronPlanner", "RobustLoadStrategy", "RobustSaveStrategy", "install", "uninstall"]

_HOMES = {
    "MegatronPlanner": "saving.planner",
    "RobustLoadStrategy": "loading.load_strategy",
    "RobustSaveStrategy": "saving.save_strategy",
    "install": "installation",
    "uninstall": "installation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
