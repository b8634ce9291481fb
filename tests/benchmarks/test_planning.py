"""The coordinator of virtual ranks writes what stock's coordinator writes of the same ranks, on every kind of save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from benchmarks.simulation.mailbox import COORDINATOR
from benchmarks.simulation.others import SaveName
from benchmarks.simulation.ours import OurCoordinator, SimulatedSave
from benchmarks.simulation.payloads import Payloads, prepare
from benchmarks.simulation.stock import StockCoordinator, forget_plans
from benchmarks.virtual_ranks import FILES_PER_RANK, KINDS
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.tree import Tree
from robust_dcp.plan.cache import PLANS
from robust_dcp.plan.rank_plan import place_items
from robust_dcp.storage.files.paths import parse_data_file_name

_SAVES: tuple[SaveName, ...] = ("first", "repeated", "patch")


class Saved:
    """All saves by both coordinators of the same ranks, one after the other."""

    def __init__(self, payloads: Payloads) -> None:
        self.payloads = payloads
        self.coordinator = OurCoordinator(payloads)
        self.ours: dict[SaveName, SimulatedSave] = {}
        self.our_metadata: dict[SaveName, Metadata] = {}
        self.stock_metadata: dict[SaveName, Metadata] = {}
        self.stock: dict[SaveName, SimulatedSave] = {}
        stock = StockCoordinator(payloads, caching=True)
        for name in _SAVES:
            ours, stocks = payloads.directory / f"ours-{name}", payloads.directory / f"stock-{name}"
            ours.mkdir()
            stocks.mkdir()
            self.ours[name] = self.coordinator.save(name, str(ours))
            self.our_metadata[name] = FileSystemReader(ours).read_metadata()
            self.stock[name] = stock.save(name, str(stocks))
            self.stock_metadata[name] = FileSystemReader(stocks).read_metadata()


@pytest.fixture(scope="module", params=[*((kind, 8, 60) for kind in KINDS), ("dense", 64, 24)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    kind, ranks, items = request.param
    yield Saved(prepare(tmp_path_factory.mktemp("planning") / "ranks", kind, ranks, items, processes=1))
    PLANS.clear()
    forget_plans()


@pytest.mark.parametrize("name", _SAVES)
def test_stock_reads_the_metadata_that_stock_would_have_written(saved: Saved, name: SaveName) -> None:
    ours, stock = saved.our_metadata[name], saved.stock_metadata[name]

    assert _in_any_order(ours) == _in_any_order(stock)
    assert ours.planner_data == stock.planner_data
    assert (ours.storage_data or {}).keys() == (stock.storage_data or {}).keys()
    assert ours.version == stock.version


@pytest.mark.parametrize("name", _SAVES)
def test_every_chunk_is_written_once(saved: Saved, name: SaveName) -> None:
    metadata = saved.our_metadata[name]
    chunks = [
        MetadataIndex(fqn, chunk.offsets)
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    objects = [
        MetadataIndex(fqn)
        for fqn, entry in metadata.state_dict_metadata.items()
        if not isinstance(entry, TensorStorageMetadata)
    ]

    assert len(chunks) == len(set(chunks))
    assert {*chunks, *objects} == set(metadata.storage_data or {})
    assert saved.ours[name].n_written == saved.stock[name].n_written == len(chunks) + len(objects)
    in_file = defaultdict(list)
    for info in (metadata.storage_data or {}).values():
        in_file[info.relative_path].append((info.offset, info.offset + info.length))
    for spans in in_file.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_each_rank_finds_its_items_where_the_metadata_says(saved: Saved) -> None:
    plan = saved.coordinator.plan.coordinator if saved.coordinator.plan else None
    assert plan is not None
    stored = dict(saved.our_metadata["patch"].storage_data or {})
    for rank in range(1, saved.payloads.ranks):
        table, kept = plan.tables[rank], saved.coordinator.others.kept[rank]
        placements = place_items(table, kept, files=FILES_PER_RANK)
        for place, item in enumerate(kept.tolist()):
            _, offsets, _ = table.dims_of(item)
            fqn, is_object = table.names[table.name_ids[item]], int(placements.offset[place]) < 0
            info = stored.pop(MetadataIndex(fqn, None if is_object else offsets))
            name = parse_data_file_name(info.relative_path)
            assert name is not None and (name.rank, name.number) == (rank, int(placements.file[place]))
            if not is_object:
                assert (info.offset, info.length) == (int(placements.offset[place]), int(placements.nbytes[place]))
    left = {parse_data_file_name(info.relative_path) for info in stored.values()}
    assert {name.rank for name in left if name is not None} == {COORDINATOR}


def test_a_repeated_save_reuses_the_plan_and_hears_frames_of_its_neighbours_and_a_row_of_each_rank(
    saved: Saved,
) -> None:
    first, repeated = saved.our_metadata["first"], saved.our_metadata["repeated"]

    assert saved.ours["repeated"].outcome == "reused"
    n_exchanges = 3  # agree, write, commit
    n_children = len(Tree(COORDINATOR, saved.payloads.ranks).children)
    n_others = saved.payloads.ranks - 1
    # Besides frames there are the rows of the report: they pass through about log2 of all ranks.
    rows = saved.ours["repeated"].sent_nbytes - n_exchanges * FRAME_NBYTES * n_others
    assert 28 * n_others <= rows <= 150 * n_others + 64 * n_others * n_children
    arrived = saved.ours["repeated"].arrived_nbytes - n_exchanges * FRAME_NBYTES * n_children
    assert 28 * n_others <= arrived <= 150 * n_children + 64 * n_others
    assert saved.ours["repeated"].returned_nbytes == 0
    assert replace(first, storage_meta=None) == replace(repeated, storage_meta=None)


def test_a_patch_hears_of_the_rank_that_changed_and_adds_its_tensor(saved: Saved) -> None:
    first, patch = saved.our_metadata["first"], saved.our_metadata["patch"]

    assert saved.ours["patch"].outcome == "patched"
    assert saved.ours["patch"].sent_nbytes < saved.ours["first"].sent_nbytes
    assert patch.state_dict_metadata.keys() - first.state_dict_metadata.keys() == {"added.weight"}
    assert (patch.storage_data or {}).keys() >= (first.storage_data or {}).keys()


def test_what_ranks_say_is_merged_on_the_way_up(saved: Saved) -> None:
    first = saved.ours["first"]

    assert first.arrived_nbytes < first.sent_nbytes / (7 if saved.payloads.ranks == 64 else 1.5)
    assert first.merging_seconds > 0


def _in_any_order(metadata: Metadata) -> dict[str, Any]:
    """What is saved, the chunks of each tensor sorted."""
    return {
        fqn: replace(entry, chunks=sorted(entry.chunks, key=lambda chunk: (*chunk.offsets, *chunk.sizes)))
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
