"""What a scenario may leave behind in its process: what is put back, and what the process has to end for."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug

import robust_dcp
from robust_dcp.structure_cache import clear_caches

__all__ = ["Leftovers"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGXFSZ)
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
_THREADS_END_WITHIN_SECONDS = 3.0
_WATCHED = ("robust_dcp", "torch.distributed.checkpoint", "megatron.core.dist_checkpointing")
_ALSO_WATCHED = frozenset({"os", "socket", "threading", "time", "shutil", "torch.distributed"})


class Leftovers:
    """Remembers what a process was like before a scenario."""

    def __init__(self) -> None:
        self._filters = list(warnings.filters)
        self._state = self._state_now()
        self._threads = self._threads_now()
        self._random = torch.get_rng_state()
        self._loggers = {logger: (logger.level, list(logger.handlers)) for logger in _loggers()}
        self._modules = _watched_modules()
        self._code = dict(_code(self._modules))
        self._containers = [(each, each.copy()) for each in _containers(self._modules)]

    def clear_away(self) -> bool:
        """Leave all groups, and forget what was saved, loaded and said. Returns whether all else is as it was."""
        robust_dcp.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_caches()
        _forget_meshes()
        torch.set_rng_state(self._random)
        for logger in _loggers():
            logger.level, logger.handlers[:] = self._loggers.get(logger, (logging.NOTSET, []))
            logger.manager._clear_cache()  # type: ignore[attr-defined]
        for container, content in self._containers:
            if container != content:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        warnings.filters[:] = self._filters  # type: ignore[index]
        gc.collect()
        code = dict(_code(self._modules))
        for thread in self._threads_now() - self._threads:
            thread.join(_THREADS_END_WITHIN_SECONDS)
            if thread.is_alive():
                return False
        same = all(code.get(name) is value for name, value in self._code.items())
        return same and self._state_now() == self._state

    @staticmethod
    def _threads_now() -> set[threading.Thread]:
        """All but the one that sends beats for all groups, and ends when there is nothing to send."""
        return {each for each in threading.enumerate() if each.name != "robust_dcp: beats"}

    @staticmethod
    def _state_now() -> tuple[Any, ...]:
        return (
            [signal.getsignal(each) for each in _SIGNALS],
            [resource.getrlimit(each) for each in _LIMITS],
            multiprocessing.active_children(),
        )


def _forget_meshes() -> None:
    """DTensor keeps how it has moved tensors over a mesh, under what looks the same in the next process group."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                if callable(forget := getattr(value, "cache_clear", None)):
                    forget()
    if callable(forget := getattr(torch.distributed.tensor.debug, "_clear_sharding_prop_cache", None)):
        forget()


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict
    ours = [logging.getLogger(name) for name in list(named) if name.startswith("robust_dcp")]
    return [logging.root, *ours]


def _watched_modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(_WATCHED) or name in _ALSO_WATCHED]


def _code(modules: list[ModuleType]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The functions and classes of modules, and the methods of these classes: what tests replace."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value):
                yield (module.__name__, name), value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    members = list(vars(value).items())
                    yield from (((module.__name__, name, each), what) for each, what in members if callable(what))


def _containers(modules: list[ModuleType]) -> Iterator[Any]:
    """The lists, dicts and sets that a module of the package keeps: listeners, warnings that come once, and so on."""
    for module in modules:
        if module.__name__.startswith("robust_dcp"):
            for name, value in vars(module).items():
                if isinstance(value, list | dict | set) and not name.startswith("__"):
                    yield value
