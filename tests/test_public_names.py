"""What users may import, and what an import costs them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import robust_dcp
from robust_dcp.plan.cache import PLANS

PUBLIC_NAMES = [
    "AsyncSave",
    "Channel",
    "Checkpoint",
    "CheckpointManager",
    "ConversionReport",
    "CopyOptions",
    "CopyResult",
    "CorruptCheckpoint",
    "Event",
    "ExchangeError",
    "ExchangeTimeout",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "LoadReport",
    "PlanConflict",
    "ProofReport",
    "ReadOptions",
    "RobustCheckpointError",
    "RobustLoadPlanner",
    "RobustPlanner",
    "RobustReader",
    "RobustWriter",
    "SaveReport",
    "StorageError",
    "StructureChanged",
    "StructureSignature",
    "UnsafeCheckpoint",
    "WriteOptions",
    "__version__",
    "async_save",
    "convert",
    "copy_checkpoint",
    "finish_async_saves",
    "install",
    "load",
    "on_event",
    "prove",
    "save",
    "uninstall",
]

SECOND_PARENTS = {
    "ExchangeTimeout": TimeoutError,
    "PlanConflict": ValueError,
    "StorageError": OSError,
    "CorruptCheckpoint": ValueError,
    "UnsafeCheckpoint": ValueError,
}


def modules() -> list[ModuleType]:
    """All of the package that imports without Megatron-Core."""
    names = [info.name for info in pkgutil.walk_packages(robust_dcp.__path__, "robust_dcp.")]
    wanted = [name for name in names if "megatron" not in name and not name.endswith("__main__")]
    return [robust_dcp, *map(importlib.import_module, wanted)]


def exceptions() -> list[type[BaseException]]:
    public = [getattr(robust_dcp, name) for name in PUBLIC_NAMES]
    return [each for each in public if isinstance(each, type) and issubclass(each, BaseException)]


def test_the_public_names_are_these_and_no_others() -> None:
    found: dict[str, object] = {}
    exec("from robust_dcp import *", found)
    assert sorted(found.keys() - {"__builtins__"}) == PUBLIC_NAMES == dir(robust_dcp)
    for name in PUBLIC_NAMES:
        assert getattr(robust_dcp, name) is not None


@pytest.mark.parametrize("error", exceptions(), ids=lambda error: error.__name__)
def test_every_exception_is_caught_as_stocks_and_as_pythons(error: type[BaseException]) -> None:
    assert issubclass(error, CheckpointException)
    assert issubclass(error, RuntimeError)
    assert issubclass(error, robust_dcp.RobustCheckpointError)
    assert issubclass(error, SECOND_PARENTS.get(error.__name__, Exception))


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_run(module: ModuleType) -> None:
    PLANS.clear()  # an example of a first save is the first save of its process
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_every_public_name_says_what_it_is_for() -> None:
    for name in PUBLIC_NAMES:
        value = getattr(robust_dcp, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", ["save", "load"])
def test_save_and_load_take_the_arguments_of_stock(name: str) -> None:
    import torch.distributed.checkpoint as dcp

    stock = inspect.signature(getattr(dcp, name)).parameters
    ours = inspect.signature(getattr(robust_dcp, name)).parameters
    # use_collectives (torch 2.9) says how stock's planner and writer talk to each other; ours have one way.
    for parameter in set(stock) - {"use_collectives"}:
        assert parameter in ours
        assert stock[parameter].default == ours[parameter].default, parameter


def test_importing_the_package_imports_nothing_yet_and_its_modules_are_attributes() -> None:
    program = (
        "import sys, robust_dcp\n"
        "assert 'torch' not in sys.modules\n"
        "robust_dcp.storage, robust_dcp.api.load\n"
        "assert not [name for name in sys.modules if 'megatron' in name]\n"
        "assert not sys.modules['torch'].distributed.is_initialized()\n"
        "robust_dcp.megatron\n"
        "assert not hasattr(robust_dcp, 'nothing') and not hasattr(robust_dcp, '__wrapped__')\n"
        "robust_dcp.save = print\n"
        "assert robust_dcp.prove and robust_dcp.save is print\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_an_import_that_fails_leaves_the_garbage_collector_as_it_was() -> None:
    program = (
        "import gc, sys, torch\n"
        "sys.modules['robust_dcp.plan.session'] = None\n"
        "try:\n"
        "    import robust_dcp\n"
        "except ImportError:\n"
        "    assert gc.isenabled()\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
