"""What a save holds, and what a load fills, is in step with the work that the device was given before and after."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import robust_dcp
from tests.gpu.device import DEVICE, needs_cuda, save, synchronize

pytestmark = pytest.mark.gpu

N = 1 << 20


def loaded(path: Path, like: torch.Tensor) -> torch.Tensor:
    target = torch.zeros_like(like)
    robust_dcp.load({"w": target}, checkpoint_id=path)
    synchronize()
    return target


def busy() -> None:
    """Keep the device at work for a good while, without waiting for it."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(400_000_000)


@pytest.mark.parametrize("how", ["save", "full", "lazy"])
def test_a_kernel_that_still_runs_when_save_is_called_comes_first(tmp_path: Path, how: str) -> None:
    weight = torch.zeros(N, device=DEVICE)
    busy()
    weight.fill_(7.0)
    save({"w": weight}, tmp_path, how)
    assert torch.equal(loaded(tmp_path, weight), torch.full_like(weight, 7.0))


@pytest.mark.parametrize("staging", ["full", "lazy"])
def test_training_may_overwrite_tensors_as_soon_as_they_are_staged(tmp_path: Path, staging: str) -> None:
    tensors = {f"w{n}": torch.full((N,), float(n), device=DEVICE) for n in range(16)}
    for step in range(3):
        held = [float(tensor[0]) for tensor in tensors.values()]
        path = tmp_path / str(step)
        saving = robust_dcp.async_save(dict(tensors), checkpoint_id=path, staging=staging)
        saving.wait_staged()
        for tensor in tensors.values():
            tensor.add_(1.0)
        saving.result(timeout=60)
        target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        robust_dcp.load(target, checkpoint_id=path)
        for value, tensor in zip(held, target.values(), strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, value))


def test_memory_that_is_freed_and_taken_again_right_after_the_call_is_not_what_is_saved(tmp_path: Path) -> None:
    weight = torch.full((N,), 3.0, device=DEVICE)
    saving = robust_dcp.async_save({"w": weight}, checkpoint_id=tmp_path)
    del weight
    others = [torch.full((N,), -1.0, device=DEVICE) for _ in range(4)]
    saving.result(timeout=60)
    assert torch.equal(loaded(tmp_path, others[0]), torch.full((N,), 3.0, device=DEVICE))


def test_what_the_device_did_before_a_load_comes_before_what_is_loaded(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.full((N,), 5.0, device=DEVICE)}, checkpoint_id=tmp_path)
    target = torch.zeros(N, device=DEVICE)
    busy()
    target.fill_(-1.0)
    robust_dcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target.cpu(), torch.full((N,), 5.0))


@pytest.mark.parametrize("cut", ["transposed", "every second", "a slice"])
def test_tensors_that_are_not_contiguous_are_saved_and_loaded_in_place(tmp_path: Path, cut: str) -> None:
    def view(base: torch.Tensor) -> torch.Tensor:
        return {"transposed": base.t(), "every second": base[:, ::2], "a slice": base[3:400, 5:]}[cut]

    base = torch.randn(1000, 700, device=DEVICE)
    robust_dcp.save({"w": view(base)}, checkpoint_id=tmp_path)
    target = torch.zeros_like(base)
    robust_dcp.load({"w": view(target)}, checkpoint_id=tmp_path)
    assert torch.equal(view(target), view(base))


def test_another_dtype_is_converted_on_the_way_to_the_device(tmp_path: Path) -> None:
    saved = torch.randn(5000, device=DEVICE)
    robust_dcp.save({"w": saved}, checkpoint_id=tmp_path)
    target = torch.zeros(5000, device=DEVICE, dtype=torch.bfloat16)
    planner = robust_dcp.RobustLoadPlanner(on_dtype_mismatch="cast")
    robust_dcp.load({"w": target}, checkpoint_id=tmp_path, planner=planner)
    assert torch.equal(target, saved.to(torch.bfloat16))


@pytest.fixture
def no_synchronizing_calls() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.usefixtures("no_synchronizing_calls")
@pytest.mark.parametrize("how", ["save", "full"])
def test_a_save_makes_no_call_that_waits_for_the_default_stream(tmp_path: Path, how: str) -> None:
    state = {f"w{n}": torch.full((N + n,), float(n), device=DEVICE) for n in range(8)}
    state |= {f"small{n}": torch.full((16,), float(n), device=DEVICE) for n in range(100)}
    save(state, tmp_path, how)


@needs_cuda
def test_cuda_graphs_captured_before_and_after_a_save_replay(tmp_path: Path) -> None:
    weight, result = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_(weight * 2)
        return graph

    before = capture()
    before.replay()
    robust_dcp.async_save({"w": weight, "result": result}, checkpoint_id=tmp_path / "1").result(timeout=60)
    weight.fill_(3.0)
    before.replay()
    assert float(result[0]) == 6.0
    after = capture()
    robust_dcp.save({"w": weight, "result": result}, checkpoint_id=tmp_path / "2")
    weight.fill_(4.0)
    after.replay()
    assert float(result[0]) == 8.0
    assert float(loaded(tmp_path / "2", weight)[0]) == 3.0


@needs_cuda
def test_expandable_segments_are_saved_and_loaded(tmp_path: Path) -> None:
    script = """
        import sys, torch, robust_dcp
        from tests.gpu.device import DEVICE, save
        state = {f"w{n}": torch.full((1 << 20,), float(n), device=DEVICE) for n in range(8)}
        save(state, sys.argv[1], "full")
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        robust_dcp.load(target, checkpoint_id=sys.argv[1])
        assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    """
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
