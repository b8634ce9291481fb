"""Calls back when a module has been imported, so that a patch can wait for its module.

Owns one finder in ``sys.meta_path``. The finder looks modules up through the other finders, and watches the specs that
they give. It imports nothing itself and knows nothing of Megatron.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], object]


class ImportHook(MetaPathFinder):
    """Calls ``on_import(module)`` each time one of the watched modules has been imported.

    A watched module may be importing when the hook starts. For example, Megatron imports torch, and torch loads us.
    Such a module is reported too, when it is complete.

    Args:
        on_import: called while Python holds the module's import lock. It must not raise.
    """

    def __init__(self, on_import: OnImport) -> None:
        self._names: frozenset[str] = frozenset()
        self._on_import = on_import
        self._under_way: set[tuple[int, str]] = set()

    def watch(self, names: Collection[str]) -> None:
        """Watch these modules too, by their full names. Modules that are complete already are reported now."""
        self._names |= frozenset(names)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in sorted(names):
            module = sys.modules.get(name)
            if module is None:
                continue
            spec = getattr(module, "__spec__", None)
            if getattr(spec, "_initializing", False):
                self._wait_for(spec)  # this or another thread is importing it
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
        """For a watched module the spec of the other finders, which is watched from now on. Else ``None``."""
        of_thread = (threading.get_ident(), fullname)
        if fullname not in self._names or of_thread in self._under_way:
            return None
        self._under_way.add(of_thread)  # finders that ask importlib.util.find_spec come back to this one
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None
                if finder is not self and find_spec is not None:
                    spec = find_spec(fullname, path, target)
                if spec is not None:
                    self._wait_for(spec)
                    return spec
        finally:
            self._under_way.discard(of_thread)
        return None

    def _wait_for(self, spec: ModuleSpec | None) -> None:
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
        if isinstance(spec, _WatchedSpec):
            waiting: list[OnImport] = vars(spec).setdefault(_WHEN_COMPLETE, [])
            waiting.append(lambda module: self in sys.meta_path and self._on_import(module))


_WHEN_COMPLETE = "robust_dcp_when_complete"


class _WatchedSpec(ModuleSpec):
    """The spec of a module that is being imported. It notices when the import ends.

    The import system sets ``_initializing`` before it runs the code of the module, and clears it at the end. A module
    that was being imported before we came gives no other sign, because its loader was asked already. If the import
    failed, the module is no longer in ``sys.modules``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            waiting = vars(self).pop(_WHEN_COMPLETE)
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            module = sys.modules.get(self.name)
            if module is not None and module.__spec__ is self:
                for when_complete in waiting:
                    when_complete(module)
