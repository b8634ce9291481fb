"""What every layout promises: whatever is saved comes back, checked, from as few bytes and in as little memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustPlanner, RobustReader, RobustWriter
from robust_dcp.plan.cache import PLANS
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts import LAYOUTS, layout_named
from robust_dcp.storage.metadata.metadata_file import referenced_files
from robust_dcp.storage.records.block_sums import SUM_NBYTES
from tests.harness.fingerprints import differences
from tests.storage.checkpoints import load, read_box
from tests.storage.test_torch_zip import DTYPES, tensor_of

StateDict = dict[str, Any]

NAMES = [layout.name for layout in LAYOUTS]
each_layout = pytest.mark.parametrize("layout", NAMES)


class CountingDisk(PosixDisk):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.read_nbytes = 0
        self._lock = threading.Lock()

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        found = super().pread_into(file, buffer, offset)
        with self._lock:
            self.read_nbytes += found
        return found


def save(directory: Path, state_dict: StateDict, layout: str, **options: Any) -> robust_dcp.SaveReport:
    return robust_dcp.save(state_dict, storage_writer=RobustWriter(directory, layout=layout, **options))


def blank(value: Any) -> Any:
    """The same structure with other values."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    if isinstance(value, torch.Tensor):
        return tensor_of(value.dtype, tuple(value.shape), 12345)
    return "blank"


def loaded(directory: Path, state_dict: StateDict, **options: Any) -> StateDict:
    target = blank(state_dict)
    robust_dcp.load(target, storage_reader=RobustReader(directory, **options))
    return target


def all_kinds() -> StateDict:
    """Every dtype in several shapes, sizes on both sides of each threshold, objects, names that need escaping."""
    tensors = {
        f"{dtype}/{list(shape)}": tensor_of(dtype, shape, seed)
        for seed, dtype in enumerate(DTYPES)
        for shape in [(), (0, 3), (1,), (5, 3), (3, 0, 2), (64, 64)]
    }
    sizes = [4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 4096, 3 << 20]
    tensors |= {f"bytes.{nbytes}": tensor_of(torch.uint8, (nbytes,), nbytes) for nbytes in sizes}
    tensors |= {f"floats.{nbytes}": tensor_of(torch.float32, (nbytes // 4,), nbytes) for nbytes in sizes}
    names = ['quo"te', "back\\slash", "new\nline", "nul\0", "täglich", "日本", "🙂", "", "__metadata__", "a b", "\x7f"]
    tensors |= {name: tensor_of(torch.int32, (n + 1,), n) for n, name in enumerate(names)}
    return {**tensors, "step": 17, "config": [1.5, "x", {"y": None}], "transposed": torch.rand(70, 9).t()}


@each_layout
@pytest.mark.parametrize("buffer_bytes", [8192, 64 << 20])
def test_empty_tensors_may_lie_where_others_do(tmp_path: Path, layout: str, buffer_bytes: int) -> None:
    state_dict = {f"{n}": torch.full((n % 3 * 1000,), n, dtype=torch.int16) for n in range(30)}
    save(tmp_path, state_dict, layout, buffer_bytes=buffer_bytes, files_per_rank=1)
    loaded = {name: torch.zeros_like(value) for name, value in state_dict.items()}
    robust_dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state_dict.items())


@each_layout
@pytest.mark.parametrize("options", [{}, {"direct": False}, {"threads": 1, "files_per_rank": 5}])
def test_whatever_is_saved_comes_back(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    state_dict = all_kinds()
    report = save(tmp_path, state_dict, layout, **options)
    assert differences(state_dict, loaded(tmp_path, state_dict)) == []
    assert sorted(report.files) == sorted(referenced_files(report.metadata))
    assert set(report.files) <= set(os.listdir(tmp_path))


@each_layout
def test_stock_load_with_our_reader_gets_the_same(tmp_path: Path, layout: str) -> None:
    state_dict = all_kinds()
    writer = RobustWriter(tmp_path, layout=layout)
    dcp.save(state_dict, storage_writer=writer, planner=RobustPlanner(), no_dist=True)
    assert differences(state_dict, load(tmp_path, blank(state_dict))) == []


@settings(max_examples=8)
@given(st.data())
def test_saves_of_any_tensors_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    numels = st.lists(st.one_of(st.integers(0, 3000), st.integers((1 << 20) - 2, (1 << 20) + 2)), max_size=12)
    state_dict = {
        f"w{n}": tensor_of(data.draw(st.sampled_from(DTYPES)), (numel,), n) for n, numel in enumerate(data.draw(numels))
    }
    options = data.draw(st.fixed_dictionaries({"files_per_rank": st.integers(1, 4), "buffer_bytes": st.just(1 << 18)}))
    for layout in NAMES:
        directory = tmp_path_factory.mktemp(layout)
        save(directory, state_dict, layout, **options)
        assert differences(state_dict, loaded(directory, state_dict)) == []


@each_layout
def test_a_repeated_save_uses_the_plan_and_brings_the_new_values(tmp_path: Path, layout: str) -> None:
    PLANS.clear()
    for step in range(3):
        state_dict = {f"w{n}": torch.full((n, 100), float(step)) for n in range(200)} | {"step": step, "x": "y" * step}
        report = save(tmp_path / str(step), state_dict, layout)
        assert report.plan == ("reused" if step else "built")
        assert differences(state_dict, loaded(tmp_path / str(step), state_dict)) == []


def test_a_plan_for_one_layout_is_not_used_for_another(tmp_path: Path) -> None:
    PLANS.clear()
    state_dict = {"w": torch.rand(100), "step": 1}
    plans = [save(tmp_path / f"{n}", state_dict, name).plan for n, name in enumerate([*NAMES, *NAMES])]
    assert "reused" not in plans[: len(NAMES)]
    assert plans[len(NAMES) :] == ["reused"] * len(NAMES)


@each_layout
def test_a_resumed_job_finds_the_plan_beside_the_checkpoint(tmp_path: Path, layout: str) -> None:
    state_dict = {f"w{n}": torch.rand(n + 1) for n in range(9)} | {
        "step": 1,
        "c": torch.rand(3, dtype=torch.complex128),
    }
    save(tmp_path / "1", state_dict, layout)
    loaded(tmp_path / "1", state_dict)
    PLANS.clear()
    report = save(tmp_path / "2", state_dict, layout)
    assert report.plan == "reused"
    assert differences(state_dict, loaded(tmp_path / "2", state_dict)) == []


@each_layout
@pytest.mark.parametrize("numel", [10, 100_000, 1_000_000])
def test_a_flipped_bit_is_found(tmp_path: Path, layout: str, numel: int) -> None:
    state_dict = {"w": torch.rand(numel), **{f"v{n}": torch.rand(7) for n in range(3)}}
    report = save(tmp_path, state_dict, layout, files_per_rank=1)
    info = next(info for index, info in report.metadata.storage_data.items() if index.fqn == "w")
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    at = data.index(state_dict["w"].numpy().tobytes()) + 4 * (numel // 2)
    data[at] ^= 16
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="CRC-32") as caught:
        loaded(tmp_path, state_dict)
    assert str(caught.value.item).startswith("w")
    found = loaded(tmp_path, state_dict, verify_checksums=False)
    assert [difference[:4] for difference in differences(state_dict, found)] == ["/'w'"]


@each_layout
def test_a_shortened_file_is_found(tmp_path: Path, layout: str) -> None:
    state_dict = {f"w{n}": torch.rand(1000) for n in range(9)}
    report = save(tmp_path, state_dict, layout, files_per_rank=1)
    path = tmp_path / report.files[0]
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(CorruptCheckpoint) as caught:
        loaded(tmp_path, state_dict)
    assert caught.value.file == str(path)


@each_layout
def test_a_missing_file_is_named(tmp_path: Path, layout: str) -> None:
    report = save(tmp_path, {"w": torch.rand(9)}, layout)
    (tmp_path / report.files[0]).unlink()
    with pytest.raises(CorruptCheckpoint, match="missing") as caught:
        loaded(tmp_path, {"w": torch.rand(9)})
    assert str(caught.value.item).startswith("w")


@each_layout
def test_a_slice_reads_a_slice(tmp_path: Path, layout: str) -> None:
    tensor = torch.rand(1000, 1000)
    save(tmp_path, {"w": tensor, "other": torch.rand(1 << 20)}, layout, direct=False)
    target = torch.zeros(10, 1000)
    disk = CountingDisk()
    read_box(tmp_path, target, [500, 0], [10, 1000], inner=disk)
    assert torch.equal(target, tensor[500:510])
    metadata_nbytes = (tmp_path / ".metadata").stat().st_size
    assert disk.read_nbytes - metadata_nbytes <= SUM_NBYTES + 12_000  # one block, to verify it
    target = torch.zeros(7, 3)
    read_box(tmp_path, target, [990, 4], [7, 3])
    assert torch.equal(target, tensor[990:997, 4:7])


@each_layout
def test_memory_stays_within_the_buffers(tmp_path: Path, layout: str) -> None:
    state_dict = {"large": torch.rand(3000, 1000).t(), **{f"w{n}": torch.rand(5000) for n in range(100)}}
    for direct in (None, False):
        directory = tmp_path / str(direct)
        report = save(directory, state_dict, layout, buffer_bytes=1 << 20, direct=direct)
        assert 0 < report.peak_buffer_nbytes <= 1 << 20
        assert differences(state_dict, loaded(directory, state_dict)) == []


@each_layout
def test_striped_files_are_found_through_links_and_removed_with_them(tmp_path: Path, layout: str) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    state_dict = {f"w{n}": torch.rand(1000) for n in range(8)} | {"step": 3}
    directory = tmp_path / "checkpoint"
    report = save(directory, state_dict, layout, stripe_paths=stripes, files_per_rank=3)
    assert all((directory / name).is_symlink() for name in report.files)
    assert differences(state_dict, loaded(directory, state_dict)) == []
    save(directory, state_dict, "torch")  # replaces it, links and targets included
    assert not [name for _, _, names in os.walk(tmp_path / "a") for name in names]
    assert not [name for _, _, names in os.walk(tmp_path / "b") for name in names]
    assert not [name for name in os.listdir(directory) if name.endswith(".safetensors")]


@each_layout
def test_a_layout_says_what_it_is(layout: str) -> None:
    found = layout_named(layout)
    assert found.version.startswith(f"{layout}-")
    assert RobustWriter("unused", layout=layout).plan_options["layout"] == layout


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout must be one of 'torch', 'safetensors', got 'zarr'"):
        RobustWriter("unused", layout="zarr")
