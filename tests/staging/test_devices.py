"""A save or load uses the device and the streams of its caller, in each of its threads, and no other device.

And a load hands no memory to a device that is not locked. A stand-in says what was asked of which device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

import robust_dcp
from robust_dcp import ProofReport, RobustLoadPlanner, RobustPlanner, RobustReader, RobustWriter
from robust_dcp.staging.blocks import release_blocks
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING
from robust_dcp.storage.reading.comparing import Comparison
from tests.harness.cuda import Cuda, OnDevice, Stream
from tests.harness.ranks import run_ranks, values
from tests.storage.test_boxes import Boxes, LateBoxes, cut

N = 700_001


def state(seed: int) -> dict[str, torch.Tensor]:
    """Small tensors, some of one block and some of several, and some that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    values = {f"small{n}": torch.randn(7 + n % 3, generator=generator) for n in range(40)}
    values |= {f"large{n}": torch.randn(N, generator=generator) for n in range(4)}
    values["matrix"] = torch.randn(900, 800, generator=generator)
    values["transposed"] = torch.randn(300, 200, generator=generator).t()
    values["bytes"] = torch.arange(251, dtype=torch.uint8)
    return values


def spread(values: dict[str, torch.Tensor], cuda: Cuda, devices: list[int]) -> dict[str, torch.Tensor]:
    """The tensors on these devices in turn; on the CPU if there are none."""
    if not devices:
        return dict(values)
    return {
        name: cuda.to_device(value, devices[number % len(devices)])
        for number, (name, value) in enumerate(values.items())
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))


@pytest.fixture(autouse=True)
def no_memory_of_other_tests() -> Iterator[None]:
    yield
    release_blocks()
    STAGING.release()
    SHARED_STAGING.release()


class Asks(RobustPlanner):
    """A planner of the user's: it is to find the device of the caller wherever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[tuple[str, int]] = set()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.devices.add((threading.current_thread().name, torch.cuda.current_device()))
        return super().resolve_data(write_item)


HOWS: dict[str, dict[str, Any]] = {
    "save": {},
    "full": {"staging": "full"},
    "lazy": {"staging": "lazy"},
    "without room": {"staging": "lazy", "staging_nbytes": 4 * N},
    "process": {"executor": "process"},
    "process, lazy": {"executor": "process", "staging": "lazy"},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("caller", "devices"), [(1, []), (1, [1]), (1, [0, 1]), (0, [1])], ids=str)
def test_a_save_and_a_load_use_the_device_and_streams_of_the_caller(
    devices: list[int], caller: int, how: str, tmp_path: Path
) -> None:
    with Cuda() as cuda:
        if caller:
            torch.cuda.set_device(caller)
        held = spread(state(1), cuda, devices)
        release_blocks()
        used = set(devices) | ({caller} if caller else set())
        assert cuda.contexts == used
        streams = {torch.device("cuda", each): Stream(torch.device("cuda", each)) for each in devices}
        for stream in streams.values():  # the caller computes on streams of its own
            with torch.cuda.device(stream.device):
                torch.cuda.set_stream(stream)
        of_callbacks: list[int] = []
        planner = Asks()
        options: dict[str, Any] = {"checkpoint_id": tmp_path, "planner": planner}
        options["on_commit"] = lambda: of_callbacks.append(torch.cuda.current_device())
        if how == "save":
            robust_dcp.save(held, **options)
        else:
            saving = robust_dcp.async_save(held, **options, **HOWS[how])
            saving.add_done_callback(lambda _: of_callbacks.append(torch.cuda.current_device()))
            saving.result()
        assert set(of_callbacks) == {caller}
        assert {device for _, device in planner.devices} == {caller}, planner.devices
        assert {number for number, *_ in cuda.copies} == set(devices)
        for number, _, stream in cuda.copies:
            assert streams[torch.device("cuda", number)] in stream.waited_for
        cuda.copies.clear()
        target = spread(state(2), cuda, devices)
        robust_dcp.load(target, checkpoint_id=tmp_path)
        assert all(same(target[name], value) for name, value in state(1).items())
        assert {(number, stream) for number, _, stream in cuda.copies} == {(n.index, s) for n, s in streams.items()}
        assert cuda.pageable == []
        if how == "save":
            cuda.copies.clear()
            assert robust_dcp.prove(target, checkpoint_id=tmp_path).equal
            assert {(number, stream) for number, _, stream in cuda.copies} == {(n.index, s) for n, s in streams.items()}
            for name in ("large1", "matrix", "small7"):
                target[name].view(-1)[5] += 1
            proof = robust_dcp.prove(target, checkpoint_id=tmp_path)
            found = {name: each[:2] for name, each in proof.differing.items()}
            assert found == {"large1": (1, (5,)), "matrix": (1, (0, 5)), "small7": (1, (5,))}
            assert not any(to_device for _, to_device, _ in cuda.copies)
        release_blocks()
        STAGING.release()
        SHARED_STAGING.release()
        assert cuda.contexts == used
        assert cuda.locked == {}


class Mine(OnDevice):
    """A class of the user's, which only it understands."""


@pytest.mark.parametrize("by", ["torch", "safetensors", "stock"])
def test_a_load_hands_no_memory_to_a_device_that_is_not_locked(by: Any, tmp_path: Path) -> None:
    saved = state(1)
    if by == "stock":
        dcp.save({**saved, "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    else:
        robust_dcp.save({**saved, "step": 7}, storage_writer=RobustWriter(tmp_path, layout=by))
    boxes = {"large0": cut((5, N - 1)), "matrix": cut((0, 900), (300, 500)), "small3": cut((1, 4))}
    with Cuda(1) as cuda:

        def loaded(values: dict[str, torch.Tensor], planner: Any = None, **options: Any) -> dict[str, torch.Tensor]:
            target = {name: cuda.to_device(torch.zeros_like(value), 0) for name, value in values.items()}
            if options.pop("of_class", False):
                target = {name: value.as_subclass(Mine) for name, value in target.items()}
            robust_dcp.load({**target, "step": 0}, storage_reader=RobustReader(tmp_path, **options), planner=planner)
            assert cuda.copies and cuda.pageable == []
            cuda.copies.clear()
            return target

        def prove(target: dict[str, torch.Tensor], **options: Any) -> ProofReport:
            before = {name: value.clone() for name, value in target.items()}
            proof = robust_dcp.prove({**target, "step": 7}, storage_reader=RobustReader(tmp_path, **options))
            assert cuda.copies and not any(to_device for _, to_device, _ in cuda.copies)
            assert all(same(target[name], value) for name, value in before.items())
            cuda.copies.clear()
            return proof

        for options in ({}, {"verify_checksums": False}, {"threads": 1, "buffer_bytes": 1 << 20}, {"of_class": True}):
            target = loaded(saved, **options)
            assert all(same(target[name], value) for name, value in saved.items())
            if "of_class" not in options:
                assert prove(target, **options).equal
                target["transposed"][7, 9] += 1
                target["large3"][N - 1] += 1
                found = {name: each[:2] for name, each in prove(target, **options).differing.items()}
                assert found == {"transposed": (1, (7, 9)), "large3": (1, (N - 1,))}
        halves = {name: value.to(torch.bfloat16) for name, value in saved.items() if name != "bytes"}
        target = loaded(halves, RobustLoadPlanner(on_dtype_mismatch="cast"), buffer_bytes=1 << 20)
        assert all(same(target[name], value) for name, value in halves.items())
        for kind in (Boxes, LateBoxes):  # as DCP's planner, and as Megatron-Core's
            cuts = {name: saved[name][box] for name, box in boxes.items()}
            target = loaded(cuts, kind(boxes))
            assert all(same(target[name], value) for name, value in cuts.items())
        for changed in ({}, {"large0": (1, (6,)), "matrix": (1, (1, 300)), "small3": (1, (2,))}):
            planner, reader = Boxes(boxes), RobustReader(tmp_path)
            planner.comparison = comparison = Comparison()
            for name in changed:
                target[name].view(-1)[200 if name == "matrix" else 1] += 1
            planner.set_up_planner(dict(target), metadata := reader.read_metadata(), True)
            reader.set_up_storage_reader(metadata, True)
            reader.read_data(planner.create_local_plan(), planner).wait()
            assert comparison.differing == changed
            assert not any(to_device for _, to_device, _ in cuda.copies)


def load_replicas(path: str) -> list[str]:
    saved = state(1)
    with Cuda(1) as cuda:
        target = {name: cuda.to_device(torch.zeros_like(value), 0) for name, value in saved.items()}
        report = robust_dcp.load(target, storage_reader=RobustReader(path, share_reads=True))
        problems = [name for name, value in saved.items() if not same(target[name], value)]
        return problems + cuda.pageable + ["nothing is shared"] * (not report.shared_nbytes)


def test_what_other_ranks_have_read_gets_to_a_device_by_locked_memory(tmp_path: Path) -> None:
    robust_dcp.save(state(1), checkpoint_id=tmp_path)
    assert values(run_ranks(2, load_replicas, str(tmp_path))) == [[], []]
