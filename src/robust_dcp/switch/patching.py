"""Replaces attributes of modules as soon as the modules are imported, and puts the original objects back.

Owns :class:`Patch`, one entry in the tables of other modules, and :class:`Patches`, which applies and removes them. It
imports neither Megatron nor torch. Called by ``install``.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from robust_dcp.switch.import_hook import ImportHook
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["Patch", "Patches"]

logger = logging.getLogger(__name__)

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One attribute to replace.

    Attributes:
        module: the full name of its module, such as ``"megatron.core.dist_checkpointing.validation"``.
        name: its name, such as ``"determine_global_metadata"``. For an attribute of a class it has a dot:
            ``"TorchDistSaveShardedStrategy.async_save"``.
        make: takes the original and returns the replacement. It is called right after the module was imported, while
            the modules that import it may still be running, so it must not import anything of Megatron. For static and
            class methods it takes and returns the plain function inside.
        optional: whether some supported versions lack this attribute. If another attribute is missing, a warning says
            so.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    optional: bool = False


@dataclass(frozen=True)
class _Applied:
    """An applied patch: attribute ``name`` of ``owner`` is now ``replacement``. ``before`` is what the ``__dict__`` of
    ``owner`` itself had, if anything."""

    patch: Patch
    owner: Any
    name: str
    before: Any
    replacement: Any


class Patches:
    """Patches that are applied and removed together. Each is applied when its module is imported.

    :meth:`apply` and :meth:`remove` may be called twice, and from any thread. Another module may have imported a
    replacement by ``from … import …``. It is recognised there: it is not replaced again, and it is put back too.

    Args:
        patches: in the order in which to apply them. Several patches of one attribute wrap each other.
        on_applied: called with each patch after it was applied.
    """

    def __init__(self, patches: Iterable[Patch], on_applied: Callable[[Patch], None] | None = None) -> None:
        self._patches: dict[str, list[Patch]] = {}
        for patch in patches:
            self._patches.setdefault(patch.module, []).append(patch)
        self._on_applied = on_applied
        self._applied: list[_Applied] = []
        self._lock = threading.RLock()
        self._hook = ImportHook(self._patches, self._apply_to)
        self._active = False

    @property
    def applied(self) -> tuple[Patch, ...]:
        """The patches that are applied so far."""
        return tuple(each.patch for each in self._applied)

    def replace_bound_names(self, *, besides: Collection[str]) -> None:
        """Also replace names that other modules have imported by ``from … import …``. :meth:`remove` puts them back.

        Args:
            besides: packages with modules that stay as they are.
        """
        _rebind({id(each.before): each.replacement for each in self._of_modules()}, besides)

    def _of_modules(self) -> list[_Applied]:
        return [each for each in self._applied if isinstance(each.owner, ModuleType)]

    def apply(self) -> None:
        """Patch the modules that are imported already now, and the others when they are imported."""
        with self._lock:
            if self._active:
                return
            self._active = True
        # This must not hold our lock: any thread may report a module, and it holds the module's import lock then.
        self._hook.start()

    def remove(self) -> None:
        """Put back every attribute. If somebody else has replaced one since, it stays, and a warning names it."""
        self._hook.stop()
        with self._lock:
            self._active = False
            applied, self._applied = self._applied, []
            for each in reversed(applied):
                _restore(each)
            _restore_bound_copies(applied)

    def _apply_to(self, module: ModuleType) -> None:
        """Apply a module's patches. Never raises: stock checkpoints are better than a failed import of Megatron."""
        for patch in self._patches.get(module.__name__, ()):
            self._apply_or_warn(patch, module)

    def _apply_or_warn(self, patch: Patch, module: ModuleType) -> None:
        try:
            self._apply_one(patch, module)
        except Exception as error:
            why = f"it could not be replaced{_of_version()}: {type(error).__name__}: {error}"
            log_left_to_stock(f"{patch.module}.{patch.name}", why)

    def _apply_one(self, patch: Patch, module: ModuleType) -> None:
        *path, name = patch.name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, _ABSENT)
        current = getattr(owner, name, _ABSENT) if owner is not _ABSENT else _ABSENT
        if current is _ABSENT:
            if not patch.optional:
                log_left_to_stock(f"{patch.module}.{patch.name}", f"{patch.module} has no {patch.name}{_of_version()}")
            return
        before = vars(owner).get(name, _ABSENT)
        wrapper = type(before) if isinstance(before, (staticmethod, classmethod)) else None
        with self._lock:
            known = self._replacement_in(owner, name, before, patch)
        if known is not None:
            # This name was imported from a patched module, so the original is what that module had before.
            before = known.before
            replacement = known.replacement if known.patch.make is patch.make else patch.make(before)
        else:
            original = before.__func__ if wrapper is not None else current
            made = patch.make(original)
            replacement = wrapper(made) if wrapper is not None else made
        with self._lock:
            taken = any(each.patch is patch and vars(owner).get(name) is each.replacement for each in self._applied)
            if taken or not self._active:
                return
            setattr(owner, name, replacement)
            # After a reload the module has new originals, so the record of the old ones must go.
            self._applied = [each for each in self._applied if each.patch is not patch]
            self._applied.append(_Applied(patch, owner, name, before, replacement))
        if self._on_applied is not None:
            self._on_applied(patch)

    def _replacement_in(self, owner: Any, name: str, value: Any, patch: Patch) -> _Applied | None:
        """The record of the replacement in this attribute, if the attribute was imported from another module."""
        for each in self._applied:
            elsewhere = each.owner is not owner or each.name != name
            if elsewhere and each.patch is not patch and each.replacement is value:
                return each
        return None


def _restore(applied: _Applied) -> None:
    now = vars(applied.owner).get(applied.name, _ABSENT)
    if now is not applied.replacement:
        logger.warning(
            "%s.%s has been replaced by others after robust_dcp did; it is left as it is",
            applied.patch.module,
            applied.patch.name,
        )
    elif applied.before is _ABSENT:
        delattr(applied.owner, applied.name)
    else:
        setattr(applied.owner, applied.name, applied.before)


def _restore_bound_copies(applied: list[_Applied]) -> None:
    """Put back the names that modules have imported by ``from … import …`` while a replacement was in place."""
    _rebind({id(each.replacement): each.before for each in applied if isinstance(each.owner, ModuleType)})


def _rebind(others: Mapping[int, Any], besides: Collection[str] = ()) -> None:
    """In all modules, rebind each name of an object with one of these ids to the object given for that id."""
    for module in list(sys.modules.values()) if others else ():
        if not isinstance(module, ModuleType):
            continue
        if str(getattr(module, "__name__", "")).partition(".")[0] in besides:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in others:
                setattr(module, name, others[id(value)])


def _of_version() -> str:
    """The text `` (megatron-core 0.16.1)``, or an empty one if Megatron is not imported."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    return f" (megatron-core {version})" if version else ""
