"""Many small tensors are loaded in columns, with nothing lost: checks, errors, counts, and the protocol of others."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import robust_dcp
from robust_dcp import CorruptCheckpoint, PlanConflict, RobustLoadPlanner, RobustReader, RobustWriter
from robust_dcp.storage.reading.planned_items import PlannedItems

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

N = 30


def state_dict_of(fill: int | None = None) -> dict[str, Any]:
    """Tensors of several kinds, alternating as those of layers do; random, or all ``fill``."""
    generator = torch.Generator().manual_seed(1)

    def one(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (
            torch.randint(1, 100, shape, generator=generator).to(dtype)
            if fill is None
            else torch.full(shape, fill, dtype=dtype)
        )

    layers = {
        f"layers.{number}": {
            "weight": one(8, 12),
            "bias": one(8, dtype=torch.bfloat16),
            "scale": one(dtype=torch.int64),
            "parameter": torch.nn.Parameter(one(5, 3)),
            "complex": one(4, dtype=torch.complex64),
            "float8": one(6).to(torch.float8_e4m3fn),
            "transposed": one(3, 4).t(),
        }
        for number in range(N)
    }
    return {**layers, "one of its kind": one(7), "empty": one(0, 3), "step": 17 if fill is None else None}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        elif isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].detach().to(torch.complex64), value.detach().to(torch.complex64)), name
        else:
            assert found[name] == value


def save(path: Path, state_dict: dict[str, Any], **options: Any) -> list[Path]:
    """Save it; returns the data files."""
    robust_dcp.save(state_dict, storage_writer=RobustWriter(path, **options), no_dist=True)
    return [file for file in path.iterdir() if file.suffix in (".distcp", ".safetensors")]


def place_of(tensor: torch.Tensor, files: list[Path]) -> tuple[Path, int]:
    """The file that holds the data of a tensor, and where in it that begins."""
    data = tensor.numpy().tobytes()
    return next((file, file.read_bytes().index(data)) for file in files if data in file.read_bytes())


def load(path: Path, state_dict: dict[str, Any], planner: Any = None, **options: Any) -> robust_dcp.LoadReport:
    return robust_dcp.load(state_dict, storage_reader=RobustReader(path, **options), planner=planner, no_dist=True)


def numbered(n: int = 40, shape: tuple[int, ...] = (64,)) -> dict[str, torch.Tensor]:
    return {f"w{number:03}": torch.full(shape, float(number + 1)) for number in range(n)}


def zeros_like(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in state_dict.items()}


def planned(path: Path, state_dict: dict[str, Any], planner: DefaultLoadPlanner) -> tuple[RobustReader, LoadPlan]:
    reader = RobustReader(path)
    metadata = reader.read_metadata()
    planner.set_up_planner(state_dict, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    return reader, planner.create_local_plan()


def told(items: Any) -> list[str]:
    return sorted(f"{item} {item.storage_index.index} {item.dest_index.index}" for item in items)


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_tensors_of_many_kinds_come_back_and_are_counted(layout: str, tmp_path: Path) -> None:
    expected = state_dict_of()
    if layout == "safetensors":
        for layer in [value for value in expected.values() if isinstance(value, dict)]:
            del layer["complex"]
    robust_dcp.save(expected, storage_writer=RobustWriter(tmp_path, layout=layout), no_dist=True)
    found = state_dict_of(0)
    report = load(tmp_path, found, RobustLoadPlanner(allow_partial_load=True))
    assert_same(found, expected)
    n_tensors = sum(len(value) for value in expected.values() if isinstance(value, dict)) + 1
    assert report.items == n_tensors + 1  # and the object
    nbytes = sum(v.nbytes for layer in expected.values() if isinstance(layer, dict) for v in layer.values())
    assert report.nbytes == nbytes + 7 * 4
    # Objects have checksums of their own.
    assert report.unverified_nbytes == 0


def test_no_object_is_made_for_a_tensor_that_is_read_as_it_was_saved(tmp_path: Path) -> None:
    expected = numbered()
    save(tmp_path, expected)
    found, planner = zeros_like(expected), RobustLoadPlanner()
    reader, plan = planned(tmp_path, found, planner)
    reader.read_data(reader.prepare_local_plan(plan), planner).wait()
    assert_same(found, expected)
    assert isinstance(plan.items, PlannedItems)
    assert len(plan.items.whole) == len(expected) == len(plan.items)
    assert "_all" not in vars(plan.items)


def test_whoever_looks_at_the_plan_sees_what_stock_plans(tmp_path: Path) -> None:
    save(tmp_path, numbered())
    found, planner = zeros_like(numbered()), RobustLoadPlanner()
    _, plan = planned(tmp_path, found, planner)
    stock = create_default_local_load_plan(found, dcp.FileSystemReader(tmp_path).read_metadata(), strict=True)
    assert told(plan.items) == told(stock.items)
    assert list(plan.items) == plan.items == plan.items[:]
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert type(copied.items) is list
        assert told(copied.items) == told(stock.items)


def test_stocks_reader_reads_by_our_plan(tmp_path: Path) -> None:
    expected = numbered()
    save(tmp_path, expected)
    found = zeros_like(expected)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), planner=RobustLoadPlanner(), no_dist=True)
    assert_same(found, expected)


class Resolving(RobustLoadPlanner):
    """Hands out targets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.given.setdefault(read_item.dest_index.fqn, torch.zeros(read_item.lengths))


class Committing(RobustLoadPlanner):
    """Notes what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[str] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)


def test_a_planner_with_methods_of_its_own_gets_each_item(tmp_path: Path) -> None:
    expected = numbered()
    save(tmp_path, expected)
    found, resolving = zeros_like(expected), Resolving()
    load(tmp_path, found, resolving)
    assert_same(found, zeros_like(expected))
    assert_same(resolving.given, expected)

    committing = Committing()
    load(tmp_path, found, committing)
    assert_same(found, expected)
    assert sorted(committing.committed) == sorted(expected)

    patched = RobustLoadPlanner()
    seen: list[str] = []
    patched.transform_tensor = lambda item, tensor: (seen.append(item.dest_index.fqn), tensor)[1]  # type: ignore[method-assign]
    load(tmp_path, found, patched)
    assert sorted(seen) == sorted(expected)


def test_a_plan_that_is_carried_out_with_another_planner_fills_that_ones_tensors(tmp_path: Path) -> None:
    expected = numbered()
    save(tmp_path, expected)
    mine, others = zeros_like(expected), zeros_like(expected)
    reader, plan = planned(tmp_path, mine, RobustLoadPlanner())
    other = RobustLoadPlanner()
    other.set_up_planner(others, reader.read_metadata(), True)
    reader.read_data(plan, other).wait()
    assert_same(others, expected)
    assert_same(mine, zeros_like(expected))


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_a_flipped_bit_names_file_key_and_bytes(layout: str, tmp_path: Path) -> None:
    expected = numbered()
    files = save(tmp_path, expected, layout=layout)
    for number in (0, 17, 39):
        file, at = place_of(expected[f"w{number:03}"], files)
        original = file.read_bytes()
        file.write_bytes(original[: at + 100] + bytes([original[at + 100] ^ 16]) + original[at + 101 :])
        with pytest.raises(CorruptCheckpoint, match=rf"'w{number:03}.*expected CRC-32 .* found") as caught:
            load(tmp_path, zeros_like(expected))
        assert caught.value.file == str(file)
        assert f"bytes {at} to {at + 256} of the file" in str(caught.value)
        found = zeros_like(expected)
        report = load(tmp_path, found, verify_checksums=False)
        assert report.unverified_nbytes == report.nbytes
        assert not torch.equal(found[f"w{number:03}"], expected[f"w{number:03}"])
        file.write_bytes(original)


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_any_flipped_bit_among_small_tensors_is_found_or_does_no_harm(layout: str, tmp_path: Path) -> None:
    expected = numbered(8, (3,))
    file, _ = place_of(expected["w003"], save(tmp_path, expected, layout=layout))
    original = file.read_bytes()
    for position in range(0, len(original), 11):
        data = bytearray(original)
        data[position] ^= 1 << position % 8
        file.write_bytes(data)
        found = zeros_like(expected)
        try:
            load(tmp_path, found)
        except CorruptCheckpoint:
            continue
        assert_same(found, expected)


def test_a_file_that_ends_too_early_is_named_with_the_item(tmp_path: Path) -> None:
    expected = numbered()
    file, at = place_of(expected["w020"], save(tmp_path, expected))
    os.truncate(file, at + 8)
    with pytest.raises(CorruptCheckpoint) as caught:
        load(tmp_path, zeros_like(expected))
    assert caught.value.file == str(file)
    with pytest.raises(CorruptCheckpoint, match=r"'w0.*is damaged") as caught:
        load(tmp_path, zeros_like(expected), verify_checksums=False)  # which does not ask for the mark at its end
    assert caught.value.item is not None


def test_what_does_not_fit_is_named_among_all_that_does(tmp_path: Path) -> None:
    save(tmp_path, numbered())
    target: dict[str, Any] = zeros_like(numbered())
    target |= {"w003": torch.zeros(64, dtype=torch.float64), "w004": torch.zeros(65), "new": torch.zeros(1)}
    with pytest.raises(PlanConflict) as caught:
        load(tmp_path, target)
    text = str(caught.value)
    assert "3 problem(s)" in text
    assert "Missing key in checkpoint: 'new'" in text
    assert "'w003' is torch.float64 here and torch.float32 in the checkpoint" in text
    assert "Size mismatch between saved [64] and current [65] for 'w004'" in text
    assert not any(value.any() for value in target.values())


def test_other_dtypes_missing_keys_and_few_of_many_names(tmp_path: Path) -> None:
    expected = numbered(200)
    save(tmp_path, expected)
    target = {name: torch.zeros(64, dtype=torch.float64) for name in list(expected)[::50]}
    report = load(tmp_path, target, RobustLoadPlanner(on_dtype_mismatch="cast"))
    assert all(torch.equal(value, expected[name].double()) for name, value in target.items())
    few = {name: torch.zeros(64) for name in [*list(expected)[5:100:9], "new"]}
    report = load(tmp_path, few, RobustLoadPlanner(allow_partial_load=True))
    assert all(torch.equal(value, expected[name]) for name, value in few.items() if name != "new")
    assert report.missing_keys == ("new",)
    assert report.items == len(few) - 1
    assert set(report.unread_keys) == expected.keys() - few.keys()


def test_names_of_any_language_are_found(tmp_path: Path) -> None:
    expected = {f"层.{number}.ω": torch.full((4,), float(number)) for number in range(20)}
    save(tmp_path, {**expected, "plain": torch.ones(1)})
    found = zeros_like(expected)
    load(tmp_path, found)
    assert_same(found, expected)


def test_targets_that_take_no_bytes_are_filled_as_well(tmp_path: Path) -> None:
    expected = numbered(8, (6, 4))
    save(tmp_path, expected)
    wide = torch.zeros(8, 6, 8)
    target: dict[str, Any] = {name: wide[number, :, ::2] for number, name in enumerate(expected)}
    load(tmp_path, target)
    assert_same(target, expected)
    assert not wide[:, :, 1::2].any()

    with torch.inference_mode():
        inference = zeros_like(expected)
    load(tmp_path, inference)
    assert_same(inference, expected)

    shared = torch.zeros(6, 4)
    load(tmp_path, dict.fromkeys(expected, shared))
    assert any(torch.equal(shared, value) for value in expected.values())


def test_a_plan_is_in_the_order_of_the_state_dict(tmp_path: Path) -> None:
    """Ranks that read the same recognise that by their plans."""
    expected = numbered()
    save(tmp_path, expected)
    target: dict[str, Any] = zeros_like(expected)
    asked = ["w030", "w002", "w017", "w009", "w021", "w004"]
    for name in asked:  # of another dtype, so that columns do not find them
        target[name] = torch.zeros(64, dtype=torch.float64)
    order = [name for name in target if name not in asked] + [name for name in target if name in asked]
    _, plan = planned(tmp_path, target, RobustLoadPlanner(on_dtype_mismatch="cast"))
    assert [item.dest_index.fqn for item in plan.items] == order
