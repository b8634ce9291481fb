"""Replaces attributes of Megatron's modules, as soon as they are imported, and puts the very same objects back.

Owns :class:`Patch`, which the tables of the other modules consist of, and :class:`Patches`, which applies and removes
them. Imports neither Megatron nor torch. Called by ``install``.
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
from robust_dcp.switch.stock_paths import say_stays_stock

__all__ = ["Patch", "Patches"]

logger = logging.getLogger(__name__)

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One attribute that is taken over.

    Attributes:
        module: full name of the module that holds it, ``"megatron.core.dist_checkpointing.validation"``.
        name: ``"determine_global_metadata"``, or dotted for an attribute of a class:
            ``"TorchDistSaveShardedStrategy.async_save"``.
        make: original to replacement. Called when the module has just been imported, while others that it is imported
            by still run: it imports nothing of Megatron. Static and class methods arrive, and are wanted back, as the
            plain functions beneath.
        optional: absent in some of the versions that are supported. Where another one is absent, a warning names it.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    optional: bool = False


@dataclass(frozen=True)
class _Applied:
    """Attribute ``name`` of ``owner`` is ``replacement`` now; ``before`` is what its own ``__dict__`` held, if any."""

    patch: Patch
    owner: Any
    name: str
    before: Any
    replacement: Any


class Patches:
    """Patches that are applied together, each when its module is imported, and removed together.

    Both are idempotent and may be called from any thread. A replacement that another module has bound to a name of its
    own by ``from … import …`` is known as such: it is not replaced again, and it is put back as well.

    Args:
        patches: in the order in which they are to be applied; several of one attribute wrap each other.
        on_applied: called with each after it has been applied.
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
        """What has been replaced so far."""
        return tuple(each.patch for each in self._applied)

    def replace_bound_names(self, *, besides: Collection[str]) -> None:
        """Replace what other modules have bound by ``from … import …`` as well; :meth:`remove` puts it back.

        Args:
            besides: packages whose modules are left as they are.
        """
        _rebind({id(each.before): each.replacement for each in self._of_modules()}, besides)

    def _of_modules(self) -> list[_Applied]:
        return [each for each in self._applied if isinstance(each.owner, ModuleType)]

    def apply(self) -> None:
        """Replace what is imported already, and the rest when it comes."""
        with self._lock:
            if self._active:
                return
            self._active = True
        # Not under the lock: modules report themselves with their import lock held, from whichever thread.
        self._hook.start()

    def remove(self) -> None:
        """Put back every attribute; one that somebody else has replaced since keeps that replacement, and is named."""
        self._hook.stop()
        with self._lock:
            self._active = False
            applied, self._applied = self._applied, []
            for each in reversed(applied):
                _restore(each)
            _restore_bound_copies(applied)

    def _apply_to(self, module: ModuleType) -> None:
        """Never raises: an import of Megatron that fails because of us would be worse than stock checkpoints."""
        for patch in self._patches.get(module.__name__, ()):
            self._apply_or_warn(patch, module)

    def _apply_or_warn(self, patch: Patch, module: ModuleType) -> None:
        try:
            self._apply_one(patch, module)
        except Exception as error:
            why = f"it could not be replaced{_of_version()}: {type(error).__name__}: {error}"
            say_stays_stock(f"{patch.module}.{patch.name}", why)

    def _apply_one(self, patch: Patch, module: ModuleType) -> None:
        *path, name = patch.name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, _ABSENT)
        current = getattr(owner, name, _ABSENT) if owner is not _ABSENT else _ABSENT
        if current is _ABSENT:
            if not patch.optional:
                say_stays_stock(f"{patch.module}.{patch.name}", f"{patch.module} has no {patch.name}{_of_version()}")
            return
        before = vars(owner).get(name, _ABSENT)
        wrapper = type(before) if isinstance(before, (staticmethod, classmethod)) else None
        with self._lock:
            known = self._replacement_in(owner, name, before, patch)
        if known is not None:
            # Bound from a module that has been patched: the original is what that one held before.
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
            # After a reload the module holds new originals: what is known of the old ones is void.
            self._applied = [each for each in self._applied if each.patch is not patch]
            self._applied.append(_Applied(patch, owner, name, before, replacement))
        if self._on_applied is not None:
            self._on_applied(patch)

    def _replacement_in(self, owner: Any, name: str, value: Any, patch: Patch) -> _Applied | None:
        """The record of the replacement that this attribute holds by way of an import from another module."""
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
    """Names in any module that were bound, by ``from … import …``, to a replacement while it was in place."""
    _rebind({id(each.replacement): each.before for each in applied if isinstance(each.owner, ModuleType)})


def _rebind(others: Mapping[int, Any], besides: Collection[str] = ()) -> None:
    """Let names in modules stand for others of the objects with these ids."""
    for module in list(sys.modules.values()) if others else ():
        if not isinstance(module, ModuleType):
            continue
        if str(getattr(module, "__name__", "")).partition(".")[0] in besides:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in others:
                setattr(module, name, others[id(value)])


def _of_version() -> str:
    """`` (megatron-core 0.16.1)``, if it is imported."""
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    return f" (megatron-core {version})" if version else ""
