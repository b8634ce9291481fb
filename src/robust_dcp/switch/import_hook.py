"""Calls back when a module has been imported, so that a patch can wait for its module.

Owns one finder in ``sys.meta_path``. The finder looks modules up through the other finders, and calls back after the
module's code has run. It imports nothing itself and knows nothing of Megatron.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], object]


class ImportHook(MetaPathFinder):
    """Calls ``on_import(module)`` each time one of the watched modules has been imported or reloaded.

    A watched module may be importing when the hook starts. For example, Megatron imports torch, and torch loads us.
    Such a module is reported too, when it is complete.

    Args:
        on_import: called while Python holds the module's import lock. It must not raise.
    """

    def __init__(self, on_import: OnImport) -> None:
        self._names: frozenset[str] = frozenset()
        self._on_import = on_import
        self._looking_up = threading.local()

    def watch(self, names: Collection[str]) -> None:
        """Watch these modules too, by their full names. Modules that are complete already are reported now."""
        self._names |= frozenset(names)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in sorted(names):
            module = sys.modules.get(name)
            if module is None:
                continue
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._wait_for(module)  # this or another thread is importing it
            else:
                self._on_import(module)

    def stop(self) -> None:
        """Take the finder out. Modules that are imported later are not reported."""
        self._names = frozenset()
        while self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For a watched module the spec of the other finders, with a loader that calls back. Else ``None``."""
        if fullname not in self._names or fullname in self._under_way():
            return None
        self._under_way().add(fullname)  # finders that ask importlib.util.find_spec come back to this one
        try:
            spec = self._spec_of_others(fullname, path, target)
        finally:
            self._under_way().discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _NotifyingLoader(spec.loader, self._on_import)
        return spec

    def _under_way(self) -> set[str]:
        names: set[str] | None = getattr(self._looking_up, "names", None)
        if names is None:
            names = self._looking_up.names = set()
        return names

    def _spec_of_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _wait_for(self, module: ModuleType) -> None:
        spec = module.__spec__
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
        if isinstance(spec, _WatchedSpec):
            waiting: list[Callable[[], object]] = vars(spec).setdefault(_WHEN_COMPLETE, [])
            waiting.append(lambda: self in sys.meta_path and self._on_import(module))


_WHEN_COMPLETE = "robust_dcp_when_complete"


class _WatchedSpec(ModuleSpec):
    """The spec of a module that is being imported. It notices when the import ends.

    The import system then clears ``_initializing``. There is no other sign, because the loader was asked before we
    came. If the import failed, the module is no longer in ``sys.modules``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            waiting = vars(self).pop(_WHEN_COMPLETE)
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if getattr(sys.modules.get(self.name), "__spec__", None) is self:
                for when_complete in waiting:
                    when_complete()


class _NotifyingLoader(Loader):
    """Wraps the loader of another finder. Module and spec show the original loader, so nobody sees a difference."""

    def __init__(self, loader: Any, on_import: OnImport) -> None:
        self._loader = loader
        self._on_import = on_import

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create: Callable[[ModuleSpec], ModuleType | None] = self._loader.create_module
        return create(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._on_import(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
