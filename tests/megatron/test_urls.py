"""URLs are refused wherever Megatron comes in, before a directory is made."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing

from robust_dcp.megatron import RobustLoadStrategy, RobustSaveStrategy
from robust_dcp.megatron.loading.load_strategy import load_in_parallel
from tests.megatron.torch_dist import chosen

_WRAPPER = types.SimpleNamespace(parallelization_group=None, base_strategy=RobustLoadStrategy())

WAYS_IN: dict[str, Callable[[Any], Any]] = {
    "save": lambda url: dist_checkpointing.save({}, url),
    "load": lambda url: dist_checkpointing.load({}, url),
    "common state": lambda url: dist_checkpointing.load_common_state_dict(checkpoint_dir=url),
    "save strategy": lambda url: RobustSaveStrategy().save({}, url),
    "load strategy": lambda url: RobustLoadStrategy().load({}, url),
    "tensors of a checkpoint": lambda url: RobustLoadStrategy().load_tensors_metadata(url),
    "removal": lambda url: RobustLoadStrategy().remove_sharded_tensors(url, "w"),
    "parallel load": lambda url: load_in_parallel(_WRAPPER, {}, url, 5.0),
}


@pytest.mark.parametrize("url", ["msc://profile/iter_0000001", Path("s3://bucket/iter_0000001")], ids=repr)
@pytest.mark.parametrize("way_in", WAYS_IN)
def test_a_url_is_refused_before_anything_is_made(
    way_in: str, url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with chosen(), pytest.raises(ValueError, match=r"is a URL \((msc|s3)://\), and this takes directories"):
        WAYS_IN[way_in](url)
    assert os.listdir(tmp_path) == []


def test_megatron_lm_hears_of_it_before_it_makes_the_directory_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = types.SimpleNamespace(save="s3://bucket/run")
    variables = types.ModuleType("megatron.training.global_vars")
    variables.get_args = lambda: arguments  # type: ignore[attr-defined]
    training = types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(iteration: int) -> None:
        os.makedirs(f"{arguments.save}/iter_{iteration:07d}")

    save_checkpoint.__module__ = training.__name__
    training.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    for module in (variables, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with chosen(), pytest.raises(ValueError, match="'s3://bucket/run' is a URL"):
        training.save_checkpoint(1)
    assert os.listdir(tmp_path) == []
