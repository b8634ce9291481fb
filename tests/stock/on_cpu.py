"""Runs pytest so that PyTorch's tests of distributed checkpoints run on CPU: ``python on_cpu.py FILE``.

Their conditions on GPUs and on NCCL are taken out, and ``.cuda()`` leaves everything where it is. Their ranks are
forked instead of spawned: four ranks would import torch for ten seconds in each test. What is spawned all the same
imports the main module again, which is this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import outcomes
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


def main(arguments: list[str]) -> int:
    """Run pytest, and write down what came of each test."""
    return int(pytest.main(arguments, plugins=[outcomes]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
