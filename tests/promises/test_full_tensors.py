"""A tensor is full or it is not, and all that ask get one answer: loads, ``verify``, and checkpoints made of shards."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustLoadPlanner
from tests.cli.commands import shell

Chunks = list[tuple[tuple[int, int], tuple[int, int]]]

WHOLE = torch.arange(24.0).reshape(4, 6)
LAYOUTS: dict[str, tuple[Chunks, tuple[int, int] | None, bool]] = {
    # chunks of a tensor of [4, 6]; an element that is in none of them; whether each element is in one chunk only
    "rows": ([((0, 0), (1, 6)), ((1, 0), (3, 6))], None, True),
    "a wall of bricks": (
        [((0, 0), (2, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 2)), ((2, 0), (2, 2)), ((1, 4), (3, 2))],
        None,
        True,
    ),
    "one row twice, and all there": ([((0, 0), (3, 6)), ((2, 0), (2, 6))], None, False),
    "an overlap as large as the gap": ([((0, 0), (2, 6)), ((1, 0), (2, 6))], (3, 0), False),
    "columns, an overlap as large as the gap": ([((0, 0), (4, 3)), ((0, 2), (4, 3))], (0, 5), False),
    "a corner": ([((0, 0), (3, 6)), ((3, 0), (1, 5))], (3, 5), True),
    "the middle": ([((0, 0), (4, 2)), ((0, 4), (4, 2)), ((0, 2), (1, 2)), ((3, 2), (1, 2))], (1, 2), True),
}


def write(directory: Path, chunks: Chunks) -> None:
    """As stock writes it, with these chunks of one tensor."""
    parts = {str(n): WHOLE[r : r + h, c : c + w].clone() for n, ((r, c), (h, w)) in enumerate(chunks)}
    dcp.save(parts, checkpoint_id=directory, no_dist=True)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    first: Any = metadata.state_dict_metadata["0"]
    boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    metadata.state_dict_metadata = {"w": TensorStorageMetadata(first.properties, WHOLE.shape, boxes)}
    metadata.storage_data = {MetadataIndex("w", box.offsets, n): places[str(n)] for n, box in enumerate(boxes)}
    metadata.planner_data = {"w": ("w",)}
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(("chunks", "lost", "is_once"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_load_fills_every_element_or_says_which_are_missing(
    tmp_path: Path, chunks: Chunks, lost: tuple[int, int] | None, is_once: bool
) -> None:
    write(tmp_path, chunks)
    for planner in (None, RobustLoadPlanner(), dcp.DefaultLoadPlanner()):
        state = {"w": torch.full((4, 6), -1.0)}
        if lost is None:
            robust_dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
            assert torch.equal(state["w"], WHOLE)
        else:
            with pytest.raises(CorruptCheckpoint, match=r"no chunk of 'w' in .* holds its part \[\d, \d\]") as caught:
                robust_dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
            assert caught.value.item == "w" and torch.equal(state["w"], torch.full((4, 6), -1.0))
    ended = shell("verify", tmp_path)
    assert ended.code == (0 if lost is None and is_once else 1)
    if not is_once:
        assert "chunks that do not overlap" in str(ended.rows)
    elif lost is not None:
        assert "chunks with all 24 elements" in str(ended.rows)


@pytest.mark.parametrize(("chunks", "lost", "is_once"), LAYOUTS.values(), ids=LAYOUTS)
def test_shards_without_metadata_make_up_each_tensor_once_or_are_refused(
    tmp_path: Path, chunks: Chunks, lost: tuple[int, int] | None, is_once: bool
) -> None:
    for number, ((row, column), (height, width)) in enumerate(chunks):
        part = {"w": WHOLE[row : row + height, column : column + width].clone()}
        told = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [row, column]}})}
        save_file(part, tmp_path / f"{number}.safetensors", metadata=told)
    rows = max(offsets[0] + sizes[0] for offsets, sizes in chunks)
    columns = max(offsets[1] + sizes[1] for offsets, sizes in chunks)
    state = {"w": torch.full((rows, columns), -1.0)}
    if is_once and lost is None:
        robust_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(state["w"], WHOLE)
    else:
        with pytest.raises(CorruptCheckpoint, match=r"chunks that do not overlap|chunks with all \d+ elements"):
            robust_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
