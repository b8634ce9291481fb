"""What stays stock is said once: one warning for each kind of path."""

from __future__ import annotations

import argparse
import io
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core")

from robust_dcp.megatron import choice
from robust_dcp.megatron.formats import dcp_patches
from robust_dcp.megatron.loading import load_patches
from robust_dcp.megatron.saving import save_patches
from robust_dcp.switch.patching import Patch, Patches
from robust_dcp.switch.stock_paths import forget_said, log_left_to_stock
from tests.megatron.stock import stock_strategy


@pytest.fixture(autouse=True)
def _asked_for_and_nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ROBUST_DCP", "1")
    forget_said()
    yield
    forget_said()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was said so far; every message has to be a warning, and said once."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            assert record.levelno == logging.WARNING

    handler = Keep()
    logger = logging.getLogger("robust_dcp.switch.stock_paths")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def _made(patches: tuple[Patch, ...], name: str, original: Any) -> Any:
    """The replacement that a table makes of ``original``."""
    return next(patch for patch in patches if patch.name == name).make(original)


def test_a_path_is_said_once_and_another_for_itself(said: list[str]) -> None:
    for what in ("saves by zarr", "saves by zarr", "saves by Own", "saves by zarr"):
        log_left_to_stock(what, "why")
    assert said == [
        f"robust_dcp was asked for, but stock code does this: saves by {who} (why)" for who in ("zarr", "Own")
    ]


def _checkpointing(ckpt_format: str, **more: Any) -> types.ModuleType:
    module = types.ModuleType("megatron.training.global_vars")
    arguments = argparse.Namespace(ckpt_format=ckpt_format, use_dist_ckpt=ckpt_format != "torch", **more)
    module.get_args = lambda: arguments  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("ckpt_format", ["torch", "zarr"])
def test_formats_that_are_not_ours(ckpt_format: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", _checkpointing(ckpt_format))
    save_checkpoint = _made(save_patches.PATCHES, "save_checkpoint", lambda iteration: iteration)
    assert [save_checkpoint(iteration) for iteration in (1, 2)] == [1, 2]
    assert len(said) == 1 and f"--ckpt-format {ckpt_format}" in said[0]


def test_local_checkpoints(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _checkpointing("torch_dist", non_persistent_ckpt_type="local")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", arguments)

    def save_by_megatron(iteration: int, non_persistent_ckpt: bool = False) -> int:
        return iteration

    save_checkpoint = _made(save_patches.PATCHES, "save_checkpoint", save_by_megatron)
    assert [save_checkpoint(iteration, non_persistent_ckpt=True) for iteration in (1, 2)] == [1, 2]
    assert len(said) == 1 and "--non-persistent-ckpt-type local" in said[0]


def test_local_checkpoints_of_a_framework_with_arguments_of_its_own(said: list[str]) -> None:
    name = "MCoreTensorAwareStateDict.from_state_dict"
    from_state_dict = _made(save_patches.PATCHES, name, lambda cls, state_dict: state_dict)
    assert [from_state_dict(object, {"a": n})["a"] for n in (1, 2)] == [1, 2]
    assert len(said) == 1 and "local non-persistent checkpoints" in said[0]


def test_a_strategy_that_saves_in_its_own_way(said: list[str], tmp_path: Path) -> None:
    class Own(type(stock_strategy())):  # type: ignore[misc]
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            raise AssertionError("not called by this test")

    def save_by_megatron(
        sharded_state_dict: Any,
        checkpoint_dir: str,
        sharded_strategy: Any = None,
        validate_access_integrity: bool = True,
        async_sharded_save: bool = False,
        preprocess_common_before_consistancy_check: Any = None,
    ) -> str:
        return "stock"

    save = _made(save_patches.PATCHES, "save", save_by_megatron)
    assert [save({}, str(tmp_path), strategy) for strategy in (Own("torch_dist", 1), Own("torch_dist", 1))] == [
        "stock",
        "stock",
    ]
    assert save({}, str(tmp_path), ("zarr", 1)) == "stock"
    assert len(said) == 2 and "saves by Own" in said[0] and "saves by zarr" in said[1]


def test_a_parallel_load_by_a_strategy_that_loads_in_its_own_way(said: list[str]) -> None:
    load = _made(load_patches.PATCHES, "FullyParallelLoadStrategyWrapper.load", lambda self, state_dict, path: path)
    wrapper = types.SimpleNamespace(base_strategy=io.BytesIO())
    assert [load(wrapper, {}, n) for n in (1, 2)] == [1, 2]
    assert len(said) == 1 and "loads by BytesIO" in said[0]


def test_calls_of_dcp_by_other_modules_and_calls_that_ask_for_more(said: list[str], tmp_path: Path) -> None:
    patches = Patches(patch for patch in dcp_patches.PATCHES if patch.module == "torch.distributed.checkpoint")
    patches.apply()
    try:
        for step in ("1", "2"):
            dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / step, no_dist=True)
        megatron: dict[str, Any] = {"__name__": dcp_patches.CALLERS[0], "dcp": dcp, "path": tmp_path}
        call = "dcp.save({'weight': 1}, checkpoint_id=path / name, planner=dcp.DefaultSavePlanner(), no_dist=True)"
        for name in ("3", "4"):
            exec(call, {**megatron, "name": name})  # in the name of a module of Megatron's
    finally:
        patches.remove()
    assert len(said) == 2
    assert f"torch.distributed.checkpoint.save by {__name__}" in said[0]
    assert "with a planner, writer or group of their own" in said[1]


def test_the_multi_storage_client(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import msc_utils

    monkeypatch.setattr(msc_utils.MultiStorageClientFeature, "is_enabled", lambda: True)
    assert [choice.is_chosen(), choice.is_chosen()] == [False, False]
    assert len(said) == 1 and "--enable-msc" in said[0]


def test_an_attribute_that_this_version_lacks(said: list[str]) -> None:
    for _ in range(2):
        patches = Patches([Patch(__name__, "gone", lambda original: original)])
        patches.apply()
        patches.remove()
    assert len(said) == 1 and f"{__name__} has no gone" in said[0]


def test_nothing_is_said_to_who_did_not_ask(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP", "0")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", _checkpointing("zarr"))
    assert _made(save_patches.PATCHES, "save_checkpoint", lambda iteration: iteration)(1) == 1
    plan = _made(dcp_patches.PATCHES, "save_state_dict_async_plan", lambda state_dict, writer: writer)
    assert plan({}, 1) == 1
    assert said == []
