"""Runs pytest so that PyTorch's tests of distributed checkpoints run on CPU: ``python -m tests.stock.on_cpu FILE``.

Their conditions on GPUs and on NCCL are taken out, and ``.cuda()`` leaves everything where it is. Their ranks are
forked instead of spawned: four ranks would import torch for ten seconds in each test. What is spawned all the same
imports the main module again, which is this one.

What came of each test is written into the file that ``STOCK_OUTCOMES`` names. Each save and each load of robust_dcp
that ends well, on whatever rank, is a line in the file that ``STOCK_CALLS`` names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import checkpoint_utils as _checkpoint_utils  # noqa: F401  they import it

__all__ = ["main"]


def _always(*_args: Any, **_options: Any) -> Callable[[Any], Any]:
    """In the place of a decorator that skips a test on a machine without GPUs."""
    return lambda test: test


def _where_it_is(value: Any, *_args: Any, **_options: Any) -> Any:
    return value


# These are replaced before other modules of PyTorch's tests import them by their names.
for _name in (
    "skip_if_lt_x_gpu",
    "nccl_skip_if_lt_x_gpu",
    "requires_nccl",
    "requires_nccl_version",
    "requires_accelerator_dist_backend",
):
    if hasattr(common_distributed, _name):
        setattr(common_distributed, _name, _always)


def _fork_ranks(case: Any) -> None:
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


common_distributed.MultiProcessTestCase._spawn_processes = _fork_ranks
_make_fsdp = FullyShardedDataParallel.__init__


def _make_fsdp_on_cpu(self: Any, *args: Any, **options: Any) -> None:
    options["device_id"] = torch.device("cpu")  # FSDP1 looks for an accelerator unless it is told
    _make_fsdp(self, *args, **options)


FullyShardedDataParallel.__init__ = _make_fsdp_on_cpu  # type: ignore[method-assign]
torch.Tensor.cuda = _where_it_is  # type: ignore[method-assign, assignment]
nn.Module.cuda = _where_it_is  # type: ignore[method-assign, assignment]
torch.cuda.set_device = _where_it_is

from torch.testing._internal.distributed._shard import sharded_tensor  # noqa: E402

_with_comms = sharded_tensor.with_comms
sharded_tensor.with_comms = lambda func=None, init_rpc=True, backend="gloo": _with_comms(func, init_rpc, "gloo")


def _append(variable: str, line: str) -> None:
    with open(os.environ[variable], "a") as file:
        file.write(f"{line}\n")


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


if os.environ.get("ROBUST_DCP") == "1":
    import robust_dcp

    def _count(event: robust_dcp.Event) -> None:
        if event.name == "ended":
            _append("STOCK_CALLS", json.dumps([_current_test(), event.kind]))

    robust_dcp.on_event(_count)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what came of a test. What fails while it is set up or torn down has failed."""
    if report.when == "call" or report.outcome != "passed":
        _append("STOCK_OUTCOMES", json.dumps([report.nodeid, report.outcome, str(report.longrepr or "")[-3000:]]))


def main(arguments: list[str]) -> int:
    """Run pytest, with this module as a plugin."""
    return int(pytest.main(arguments, plugins=[sys.modules[__name__]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
