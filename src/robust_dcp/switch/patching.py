"""Replaces attributes of modules as soon as the modules are imported, and puts the original objects back.

Owns :class:`Patch`, one entry in the table of ``robust_dcp.installation``, and :class:`Patches`, which applies and
removes them, and what the log says of both: who saves, and what stays with stock code. It imports neither Megatron nor
torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from robust_dcp.switch.import_hook import ImportHook

logger = logging.getLogger(__name__)

_ABSENT = object()

_said: set[tuple[str, str]] = set()
_lock = threading.Lock()


def log_left_to_stock(what: str, why: str) -> None:
    """Warn that stock code does something although the job has asked for robust_dcp, once a process for each reason.

    Without the warning a user would think that robust_dcp wrote the checkpoint.

    Args:
        what: what stock code does, such as ``"saves by zarr"``.
        why: the reason, and what to do about it if anything can be done. It must not name what differs from call to
            call, such as the path of a checkpoint: then every call would be logged.
    """
    _warn_once("robust_dcp was asked for, but stock code does this: %s (%s)", what, why)


def log_without_effect(option: str, why: str) -> None:
    """Warn that an option does nothing with robust_dcp although somebody may rely on it, once a process.

    Args:
        option: what was asked for.
        why: what it means that it does nothing.
    """
    _warn_once("%s does nothing with robust_dcp: %s", option, why)


def _warn_once(line: str, what: str, why: str) -> None:
    with _lock:
        if (what, why) in _said:
            return
        _said.add((what, why))
    logger.warning(line, what, why)


def announce(line: str) -> None:
    """Write the line on rank 0: to the log, or to standard error if the program has not set up its log yet.

    The user of a job should not have to guess what code wrote its checkpoints.
    """
    dist: Any = sys.modules.get("torch.distributed")
    # A spawned process has a parent only after it has imported the program, and torch with it.
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_starting or multiprocessing.parent_process() is not None:
        return  # a worker process of a rank
    is_connected = dist is not None and dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if is_connected else int(os.environ.get("RANK") or 0)) != 0:
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", line)
    else:
        sys.stderr.write(f"{line}\n")


@dataclass(frozen=True)
class Patch:
    """One attribute to replace.

    Attributes:
        module: the full name of its module, such as ``"megatron.core.dist_checkpointing.serialization"``. If the module
            defines the attribute, it is also replaced where other modules have imported it by ``from … import …``.
        name: its name, such as ``"save"``. For an attribute of a class it has a dot:
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
    """Patches that are removed together. Each is applied when its module is imported.

    :meth:`apply` and :meth:`remove` may be called twice, and from any thread.

    Args:
        on_applied: called with each patch after it was applied.
    """

    def __init__(self, on_applied: Callable[[Patch], None] = lambda patch: None) -> None:
        self._patches: dict[str, list[Patch]] = {}
        self._on_applied = on_applied
        self._applied: list[_Applied] = []
        self._lock = threading.RLock()
        self._hook = ImportHook(self._apply_to)
        self._is_applying = False

    def apply(self, patches: Iterable[Patch]) -> None:
        """Patch the modules that are imported already now, and the others when they are imported."""
        with self._lock:
            new = [patch for patch in patches if patch not in self._patches.get(patch.module, ())]
            for patch in new:
                self._patches.setdefault(patch.module, []).append(patch)
        # This must not hold our lock: any thread may report a module, and it holds the module's import lock then.
        self._is_applying = True
        self._hook.watch({patch.module for patch in new})
        self._is_applying = False
        self._rebind_imported()

    def remove(self) -> None:
        """Put back every attribute. If somebody else has replaced one since, it stays, and a warning names it."""
        self._hook.stop()
        with self._lock:
            self._patches = {}
            applied, self._applied = self._applied, []
        with _lock:
            _said.clear()  # `install` may follow
        for each in reversed(applied):
            now = vars(each.owner).get(each.name, _ABSENT)
            if now is not each.replacement:
                why = "has been replaced by others after robust_dcp did; it is left as it is"
                logger.warning("%s.%s %s", each.patch.module, each.patch.name, why)
            elif each.before is _ABSENT:
                delattr(each.owner, each.name)
            else:
                setattr(each.owner, each.name, each.before)
        _rebind({id(each.replacement): each.before for each in applied if isinstance(each.owner, ModuleType)})

    def _apply_to(self, module: ModuleType) -> None:
        """Apply a module's patches. Never raises: stock checkpoints are better than a failed import of Megatron."""
        for patch in self._patches.get(module.__name__, ()):
            try:
                self._apply_one(patch, module)
            except Exception as error:  # noqa: PERF203
                why = f"it could not be replaced{_of_version()}: {type(error).__name__}: {error}"
                log_left_to_stock(f"{patch.module}.{patch.name}", why)
        if not self._is_applying:  # `apply` does this once for all modules that were complete before
            # Only modules that import each other in a circle can have imported its names already.
            self._rebind_imported(module.__name__.partition(".")[0])

    def _rebind_imported(self, package: str = "") -> None:
        """Replace names where modules of ``package``, or all modules, have imported them by ``from … import …``."""
        defined = [each for each in self._applied if getattr(each.before, "__module__", None) == each.patch.module]
        in_modules = [each for each in defined if isinstance(each.owner, ModuleType)]
        _rebind({id(each.before): each.replacement for each in in_modules}, package)

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
        made = patch.make(before.__func__ if wrapper is not None else current)
        replacement = wrapper(made) if wrapper is not None else made
        with self._lock:
            if any(vars(owner).get(name) is each.replacement for each in self._applied):
                return  # the module was reported twice
            if patch not in self._patches.get(patch.module, ()):
                return  # `remove` came first
            setattr(owner, name, replacement)
            self._applied.append(_Applied(patch, owner, name, before, replacement))
        self._on_applied(patch)


def _rebind(others: Mapping[int, Any], package: str = "") -> None:
    """In all modules of ``package``, or in all but our own, rebind each name of an object with one of these ids to the
    object for that id."""
    for module in list(sys.modules.values()) if others else ():
        found = str(getattr(module, "__name__", "robust_dcp")).partition(".")[0]
        if found == package or (not package and found != "robust_dcp"):
            values = vars(module).copy()
            if not others.keys().isdisjoint(map(id, values.values())):  # of most modules, a hundred thousand names
                for name, value in values.items():
                    if id(value) in others:
                        setattr(module, name, others[id(value)])


def megatron_version() -> str:
    """The version of the imported sources, which need not be an installed package; empty if there are none."""
    return str(getattr(sys.modules.get("megatron.core.package_info"), "__version__", ""))


def _of_version() -> str:
    version = megatron_version()
    return f" (megatron-core {version})" if version else ""
