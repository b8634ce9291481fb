"""Whatever tensors, blocks, threads and files meet in a save or a load: no byte is wrong, and memory is bounded.

Hypothesis draws tensors of every dtype and layout around the sizes at which records are cut, packed and aligned.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem

import robust_dcp
from robust_dcp import PlanConflict, RobustCheckpointError, RobustPlanner, RobustReader, RobustWriter, StorageError
from robust_dcp.staging import blocks
from robust_dcp.storage.writing import engine
from tests.faults.disk import LONG_TESTS, Call, FaultDisk
from tests.harness.fingerprints import differences, wrongly_loaded
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import DTYPES, pattern

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

StateDict = dict[str, Any]
MIB = 1 << 20
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(tuple(reversed(range(tensor.ndim))))


def part_of_larger(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1), tensor.reshape(-1)])[tensor.numel() :].reshape(tensor.shape)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 1]


def lazy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.dtype in (torch.complex64, torch.complex128) else tensor


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [transposed, part_of_larger, every_second, lazy]
EDGES = st.sampled_from([MIB, 256 << 10, 4096]).flatmap(lambda edge: st.integers(edge - 70, edge + 70))


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, name: str = "") -> torch.Tensor:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    if draw(st.integers(0, 5)) == 0:
        shape = [draw(EDGES) // dtype.itemsize + draw(st.integers(0, 1))]
    # Not every dtype can be stacked or concatenated.
    kinds = LAYOUTS if dtype in (torch.float32, torch.int64, torch.complex64) else [transposed]
    layout = draw(st.sampled_from([*kinds, torch.Tensor.contiguous]))
    return layout(pattern(name, shape, dtype, 1))


@st.composite
def state_dicts(draw: st.DrawFn, safetensors: bool) -> StateDict:
    """Tensors and some objects."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool] if safetensors else DTYPES
    state: StateDict = {f"t{n}": draw(tensors(dtypes, f"{n}")) for n in range(draw(st.integers(1, 14)))}
    return state | {f"o{n}": draw(st.binary(max_size=20_000)) for n in range(draw(st.integers(0, 2)))}


def blank(state: StateDict, *, strided: bool = False) -> StateDict:
    """Targets: contiguous, or each every second element of a larger tensor."""
    return {
        name: (torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 1] if strided else torch.zeros_like(value.clone()))
        if isinstance(value, torch.Tensor)
        else None
        for name, value in state.items()
    }


class Boxes(dcp.DefaultLoadPlanner):
    """Reads a box of each tensor, and, as Megatron-Core's planner does, hears of each before it gives out the next."""

    def __init__(self, boxes: dict[str, tuple[list[int], list[int]]]) -> None:
        super().__init__()
        self.boxes = boxes
        self.resolved: list[tuple[ReadItem, torch.Tensor]] = []

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, (offsets, sizes) in self.boxes.items():
            index, at = MetadataIndex(name, torch.Size([0] * len(sizes)), 0), torch.Size(offsets)
            items.append(ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size(sizes)))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert not self.resolved, "the last tensor was not committed"
        target = super().resolve_tensor(read_item)
        self.resolved.append((read_item, target))
        return torch.empty_like(target, memory_format=torch.contiguous_format)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        item, target = self.resolved.pop()
        assert item is read_item
        target.copy_(tensor)


threads = st.integers(1, 4)
buffer_bytes = st.sampled_from([8192, 100_000, 3 * MIB, 1 << 30])
read_options = st.fixed_dictionaries({"threads": threads, "buffer_bytes": buffer_bytes})
write_options = st.fixed_dictionaries(
    {"threads": threads, "buffer_bytes": buffer_bytes, "files_per_rank": st.integers(1, 3)}
)


@settings(max_examples=40 if LONG_TESTS else 28, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.data(),
    st.sampled_from(["torch", "torch", "safetensors", "stock's planner", "stock"]),
    st.booleans(),
    write_options,
    read_options,
)
def test_any_mix_of_tensors_is_saved_and_loaded_with_any_options_by_either_side(
    data: st.DataObject, by: str, is_on_disk: bool, writing: dict[str, Any], reading: dict[str, Any]
) -> None:
    """On a disk with direct I/O, and in memory without."""
    state = data.draw(state_dicts(safetensors=by == "safetensors"))
    writing, reading = ({**options, "direct": None if is_on_disk else False} for options in (writing, reading))
    with TemporaryDirectory(dir=None if is_on_disk else MEMORY) as directory:
        # The second save repeats the plan, and its objects have other sizes.
        for step, path in enumerate((f"{directory}/1", f"{directory}/2")):
            state |= {name: value * (1 + step) for name, value in state.items() if name.startswith("o")}
            if by.startswith("stock"):
                writer: Any = RobustWriter(path, **writing) if "planner" in by else None
                dcp.save(dict(state), checkpoint_id=path, storage_writer=writer, no_dist=True)
            else:
                writer = RobustWriter(path, layout=by, **writing)
                saved = robust_dcp.save(dict(state), storage_writer=writer, no_dist=True)
                assert saved.peak_buffer_nbytes <= writing["buffer_bytes"]
            for strided in (False, True):
                found = blank(state, strided=strided)
                loaded = robust_dcp.load(found, storage_reader=RobustReader(path, **reading), no_dist=True)
                assert differences(state, found) == []
                assert loaded.peak_buffer_nbytes <= max(reading["buffer_bytes"], 2 * MIB)
            if by != "safetensors":
                found = blank(state)
                dcp.load(found, checkpoint_id=path, no_dist=True)
                assert differences(state, found) == []
        boxes = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                offsets = [data.draw(st.integers(0, size)) for size in value.shape]
                sizes = [data.draw(st.integers(0, size - at)) for size, at in zip(value.shape, offsets, strict=True)]
                boxes[name] = offsets, sizes
        found, expected = blank(state), blank(state)
        for name, (offsets, sizes) in boxes.items():
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            expected[name][box] = state[name][box]
        robust_dcp.load(found, storage_reader=RobustReader(path, **reading), planner=Boxes(boxes), no_dist=True)
        assert differences(expected, found) == []


MIX: StateDict = {
    "large": torch.arange(MIB // 4 + 5),
    "small": torch.arange(3.0),
    "transposed": torch.rand(700, 900).t(),
    "rows": torch.rand(5_000, 40).t(),  # a small block has a part of one, perhaps a whole one, and a part of another
    "not aligned": torch.arange(3 * MIB, dtype=torch.uint8)[1:],
    "object": b"an object",
}


def check_mix(path: Path) -> None:
    assert wrongly_loaded(MIX, path, no_dist=True) == []


def test_thousands_of_small_tensors_go_out_and_in_by_a_few_calls(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((256,), float(n)) for n in range(10_000)}
    with FaultDisk(tmp_path) as disk:
        robust_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
        found = blank(state)
        robust_dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert differences(state, found) == []
    # Of each of two files: two blocks, the two checksums of the record that is cut between them, and the footer.
    for operation, most in (("write", 10), ("read", 20)):
        assert len([name for name in disk.names(operation) if name.endswith(".distcp")]) <= most


def test_a_slice_reads_little_more_than_its_own_bytes(tmp_path: Path) -> None:
    value = torch.rand(1000, 1000)
    robust_dcp.save({"w": value}, checkpoint_id=tmp_path, no_dist=True)
    found = {"w": torch.zeros(1000, 1000)}
    with FaultDisk(tmp_path) as disk:
        robust_dcp.load(found, checkpoint_id=tmp_path, planner=Boxes({"w": ([500, 0], [10, 1000])}), no_dist=True)
    assert torch.equal(found["w"][500:510], value[500:510]) and not found["w"][510:].any()
    # It is verified in blocks of 256 KiB.
    assert 40_000 <= sum(call.nbytes for call in disk.calls if call.path.endswith(".distcp")) < 600_000


@pytest.mark.parametrize("ranks", ["8", "1000", "eight"])
def test_defaults_fit_the_machine_and_the_ranks_on_it(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    saved = robust_dcp.save(dict(MIX), checkpoint_id=tmp_path, no_dist=True)
    assert 0 < saved.peak_buffer_nbytes <= 1 << 30
    check_mix(tmp_path)


class RefusesDirect:
    """Refuses direct reads and writes from some number on, as file systems do that take O_DIRECT and cannot do it."""

    def __init__(self, number: int) -> None:
        self.left, self.n_refused = number, 0

    def __call__(self, call: Call) -> None:
        if call.is_direct:
            self.left -= 1
            if self.left < 0:
                self.n_refused += 1
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), call.path)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_where_direct_io_is_refused_on_the_way_the_page_cache_is_used_and_the_report_says_so(
    number: int, tmp_path: Path
) -> None:
    options: Any = {"files_per_rank": 1, "threads": 2, "buffer_bytes": 256 << 10}
    with FaultDisk(tmp_path) as disk:
        robust_dcp.save(dict(MIX), storage_writer=RobustWriter(tmp_path / "direct", **options), no_dist=True)
    if not any(call.is_direct for call in disk.calls):
        pytest.skip("no file here can be written by direct I/O")
    for path, refusal in ((tmp_path / "direct", RefusesDirect(0)), (tmp_path / "buffered", RefusesDirect(number))):
        with FaultDisk(tmp_path, on={"read|write": refusal}):
            if path.name == "buffered":
                saved = robust_dcp.save(dict(MIX), storage_writer=RobustWriter(path, **options), no_dist=True)
                assert any(how.startswith("buffered: a direct write was refused") for how in saved.how)
            check_mix(path)
        assert refusal.n_refused
    insisting = RobustWriter(tmp_path / "insisted", direct=True)
    with FaultDisk(tmp_path, on={"write": RefusesDirect(min(number, 1))}), pytest.raises(StorageError, match="EINVAL"):
        robust_dcp.save(dict(MIX), storage_writer=insisting, no_dist=True)
    assert not (tmp_path / "insisted").exists()


class _RunAhead(blocks.BlockLease):
    """Copies that go on by themselves, as those of a device do: in threads."""

    def can_run_ahead(self, data: Any) -> bool:
        return True

    def begin(self, data: Any, begin: int, end: int, block: Any, at: int) -> Callable[[], None]:
        thread = threading.Thread(target=data.copy, args=(begin, end, block, at))
        thread.start()
        return thread.join


@pytest.mark.parametrize("options", [{"threads": 1, "buffer_bytes": 80_000}, {"threads": 3}], ids=str)
def test_copies_that_run_while_earlier_blocks_are_written(
    options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BlockLease", _RunAhead)
    monkeypatch.setattr(blocks, "host_address", lambda tensor: None)
    robust_dcp.save(dict(MIX), storage_writer=RobustWriter(tmp_path, **options), no_dist=True)
    check_mix(tmp_path)


class Gives(RobustPlanner):
    """Gives something else for the item of a name, or raises it."""

    def __init__(self, name: str, given: Any) -> None:
        super().__init__()
        self.name, self.given = name, given

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn != self.name:
            return super().resolve_data(write_item)
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


@pytest.mark.parametrize("name", MIX)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (KeyError("gone"), "KeyError: 'gone'"),
        (torch.zeros(1, 1, dtype=torch.int16), r"gave torch.int16 \[1, 1\] for|Tensor"),
        (io.BytesIO(b"bytes"), "gave BytesIO for the tensor"),
    ],
    ids=["raises", "another tensor", "bytes"],
)
def test_an_item_that_the_planner_does_not_give_as_planned_is_named_and_no_file_is_left(
    name: str, given: Any, words: str, tmp_path: Path
) -> None:
    if name == "object" and not isinstance(given, KeyError):
        return
    writer = RobustWriter(tmp_path / "c", buffer_bytes=100_000)
    with pytest.raises(RobustCheckpointError, match=words) as caught:
        robust_dcp.save(dict(MIX), storage_writer=writer, planner=Gives(name, given), no_dist=True)
    assert f"'{name}'" in str(caught.value) or f"item {name}" in str(caught.value)
    assert isinstance(given, KeyError) or (isinstance(caught.value, PlanConflict) and caught.value.key == name)
    assert not (tmp_path / "c").exists()


# --- large in every direction -----------------------------------------------------------------------------------------


NBYTES = (4 << 30) + (200 << 20) + 7
MARKS = {0: 1, 1: 2, (1 << 31) - 1: 3, 1 << 31: 4, (1 << 32) - 1: 5, 1 << 32: 6, NBYTES - 1: 7}


def save_and_load_a_large_tensor(directory: str) -> dict[int, int]:
    # Memory that was never written to: the save reads one page of zeros again and again, and the load takes it.
    large = torch.from_numpy(np.zeros(NBYTES, dtype=np.uint8))
    small = torch.arange(3)
    for place, mark in MARKS.items():
        large[place] = mark
    robust_dcp.save({"large": large, "small": small}, checkpoint_id=directory)
    large[list(MARKS)] = 0
    reader = RobustReader(directory, buffer_bytes=64 << 20)
    report = robust_dcp.load({"large": large, "small": small.zero_()}, storage_reader=reader)
    for name in os.listdir(directory):
        os.unlink(f"{directory}/{name}")
    assert report.peak_buffer_nbytes <= 64 << 20
    assert small.tolist() == [0, 1, 2] and int(torch.count_nonzero(large)) == len(MARKS)
    return {place: int(large[place]) for place in MARKS}


@pytest.mark.slow
def test_a_tensor_of_more_than_4_gib_is_saved_and_loaded(tmp_path: Path) -> None:
    """That stock reads such a record is a test of records."""
    job = run_ranks(1, save_and_load_a_large_tensor, str(tmp_path / "c"), init=False)
    assert values(job) == [MARKS]


def test_a_hundred_thousand_items_are_saved_and_loaded(tmp_path: Path) -> None:
    numbers = torch.arange(300_000, dtype=torch.int32)
    state_dict = {f"layer.{n}.weight": numbers[3 * n : 3 * n + 3] for n in range(100_000)}
    report = robust_dcp.save(state_dict, checkpoint_id=tmp_path, no_dist=True)
    assert report.items == 100_000
    found = torch.zeros_like(numbers)
    targets = {f"layer.{n}.weight": found[3 * n : 3 * n + 3] for n in range(100_000)}
    loaded = robust_dcp.load(targets, storage_reader=RobustReader(tmp_path, buffer_bytes=64 << 20), no_dist=True)
    assert torch.equal(found, numbers)
    assert loaded.items == 100_000
    assert loaded.peak_buffer_nbytes <= 64 << 20


@pytest.mark.parametrize(("by", "direct"), [("ours", None), ("ours", False), ("stock", None)])
def test_an_item_larger_than_all_buffers_is_loaded_within_them(tmp_path: Path, by: str, direct: bool | None) -> None:
    value = torch.rand((64 << 20) // 4 + 5, generator=torch.Generator().manual_seed(1))
    save = robust_dcp.save if by == "ours" else dcp.save
    others = {f"{n}": value[: 196_000 if n < 6 else 20_000].clone() for n in range(60)}
    save({"large": value, "small": value[:3].clone(), **others}, checkpoint_id=tmp_path, no_dist=True)
    target = {"large": torch.zeros_like(value), "small": torch.zeros(3)}
    reader = RobustReader(tmp_path, buffer_bytes=4 << 20, direct=direct)
    report = robust_dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["large"], value) and torch.equal(target["small"], value[:3])
    assert report.peak_buffer_nbytes <= 4 << 20
    found = blank(others, strided=True)  # no read goes straight into these
    reader = RobustReader(tmp_path, buffer_bytes=3 << 20, threads=2, direct=direct)
    report = robust_dcp.load(found, storage_reader=reader, no_dist=True)
    assert differences(others, found) == [] and report.peak_buffer_nbytes <= 3 << 20
