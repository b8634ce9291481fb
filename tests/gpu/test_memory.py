"""A save is whole where the host does not lock memory, or the device has none left. It is only slower, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp.staging.blocks import NOT_PINNED, Block, release_blocks
from robust_dcp.staging.staging_buffers import STAGING
from tests.gpu.device import DEVICE, needs_cuda, save, synchronize

pytestmark = pytest.mark.gpu


def state(value: float) -> dict[str, torch.Tensor]:
    large = {f"large{n}": torch.full((3 << 20,), value + n, device=DEVICE) for n in range(4)}
    return large | {f"small{n}": torch.full((16,), value + n, device=DEVICE) for n in range(200)}


def check_loads(path: Path, value: float) -> None:
    target = state(0.0)
    robust_dcp.load(target, checkpoint_id=path)
    synchronize()
    assert all(torch.equal(target[key], tensor) for key, tensor in state(value).items())


@pytest.fixture
def locks_no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was locked for earlier saves is given back. From here on every request is refused."""
    release_blocks()
    STAGING.release()
    monkeypatch.setattr(Block, "pin", lambda self, device: setattr(self, "pin_was_refused", True))
    yield
    release_blocks()
    STAGING.release()


@pytest.mark.usefixtures("locks_no_memory")
@pytest.mark.parametrize("how", ["save", "full"])
def test_a_save_is_whole_and_says_so_where_no_memory_can_be_locked(tmp_path: Path, how: str) -> None:
    report = save(state(2.0), tmp_path, how)
    check_loads(tmp_path, 2.0)
    if DEVICE.type == "cuda":
        assert NOT_PINNED in report.how


@needs_cuda
def test_a_refusal_of_the_driver_is_not_raised_by_the_next_kernel() -> None:
    block = Block(1 << 20)
    # The driver refuses to lock memory a part of which is locked already.
    assert int(torch.cuda.cudart().cudaHostRegister(block.address, 4096, 0)) == 0
    try:
        block.pin(DEVICE)
        assert block.pinned_by is None
        assert float(torch.ones(4, device=DEVICE).add_(1.0).sum()) == 8.0
    finally:
        torch.cuda.cudart().cudaHostUnregister(block.address)


@needs_cuda
def test_a_save_needs_no_memory_of_a_device_that_is_full(tmp_path: Path) -> None:
    kept = state(3.0)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(DEVICE) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 << 20, device=DEVICE)
        robust_dcp.save(kept, checkpoint_id=tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check_loads(tmp_path, 3.0)
