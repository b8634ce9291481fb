"""Valid checkpoints to be damaged. Each says how to load it and compare it with what was saved.

Owns their contents: tensors of several sizes, objects, both layouts, and Megatron's files.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import robust_dcp
from robust_dcp.plan.cache import LOADED, PLANS
from robust_dcp.storage.writer import RobustWriter
from tests.harness.fingerprints import differences

__all__ = ["SAMPLES", "Sample", "WrongData", "load_megatron", "make_samples"]


class WrongData(Exception):
    """The loaded values are not those that were saved."""


def objects() -> dict[str, Any]:
    """Objects of the kinds that training loops save. ``tests/storage`` has all kinds."""
    return {
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, size=torch.Size([1, 2])),
        "counts": collections.Counter(a=1),
        "rng": random.Random(1).getstate(),
        "numpy": {"state": np.arange(20.0), "scalar": np.float32(3), "text": np.array(["a", "bc"])},
        "nested": {"tensor": torch.arange(6.0).reshape(2, 3), "list": list(range(300)), "more": [{"x": (1, (2,))}] * 3},
    }


def state_dict() -> dict[str, Any]:
    """The state dict of every sample."""
    return {
        "model": {
            "large": torch.arange(400_000, dtype=torch.float32),
            "small": torch.arange(12.0).reshape(3, 4),
            "scalar": torch.tensor(3.0),
            "bf16": torch.arange(600).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        # These are not dicts or lists, because DCP makes an item for each value of those.
        "objects": {name: argparse.Namespace(value=value) for name, value in objects().items()},
    }


class Sample(NamedTuple):
    """A valid checkpoint: how it is saved into a directory, and how it is loaded from there. ``load`` raises
    :class:`WrongData` if the values are not those that were saved."""

    name: str
    save: Callable[[str], None]
    load: Callable[[str], None]


def _blank() -> dict[str, Any]:
    wanted = copy.deepcopy(state_dict())
    for tensor in wanted["model"].values():
        tensor.zero_()
    wanted["objects"] = dict.fromkeys(wanted["objects"])
    return wanted


def _compare(expected: Any, found: Any) -> None:
    if wrong := differences(expected, found):
        raise WrongData(f"what was loaded is not what was saved: {wrong}")


def _load(path: str) -> None:
    wanted = _blank()
    robust_dcp.load(wanted, checkpoint_id=path, no_dist=True)
    _compare(state_dict(), wanted)


def _save(path: str, layout: str = "torch") -> None:
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(path, layout=layout), no_dist=True)


def _load_and_save_again(path: str) -> None:
    """Load, and save once more. A damaged plan beside a checkpoint must not make the next save wrong."""
    _load(path)
    PLANS.clear()
    LOADED.put(path, None, len(path))
    robust_dcp.save(state_dict(), checkpoint_id=f"{path}.again", no_dist=True)
    try:
        _load(f"{path}.again")
    finally:
        shutil.rmtree(f"{path}.again")


def _save_megatron(path: str) -> None:
    os.makedirs(path)
    with open(os.path.join(path, "metadata.json"), "w") as file:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1}, file)
    torch.save(objects(), os.path.join(path, "common.pt"))


def load_megatron(path: str) -> Any:
    """The common state of Megatron's checkpoints, as robust_dcp reads it."""
    from robust_dcp.megatron.load import load_common_state_dict

    return load_common_state_dict(None, path)


def _load_megatron(path: str) -> None:
    _compare(objects(), load_megatron(path))


SAMPLES = (
    Sample("torch layout", _save, _load),
    Sample("safetensors layout", partial(_save, layout="safetensors"), _load),
    Sample("kept plan", _save, _load_and_save_again),
    Sample("Megatron", _save_megatron, _load_megatron),
)


def make_samples(root: str) -> None:
    """Save each sample under ``root``."""
    for sample in SAMPLES:
        sample.save(os.path.join(root, sample.name))
