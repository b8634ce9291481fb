"""Whatever the sizes of tensors, few pieces of them are in memory, without any help of the garbage collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp.conversion.convert import convert
from robust_dcp.storage.pieces import Piece, PieceReader, batches_of

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    state = {"large": torch.rand(24, MIB // 4), **{f"w{number}": torch.rand(300, 1000) for number in range(9)}}
    robust_dcp.save(state, checkpoint_id=tmp_path / "source")
    gc.collect()
    gc.disable()
    yield tmp_path / "source"
    gc.enable()


def test_a_reader_keeps_nothing_that_it_has_handed_over(source: Path) -> None:
    reader = PieceReader(source, buffer_nbytes=MIB)
    for batch in batches_of(reader.tensors.values(), 4 * MIB):
        kept = [weakref.ref(value) for value in reader.read(batch)]
        assert [reference() for reference in kept if reference() is not None] == []


@pytest.mark.parametrize(
    ("form", "layout"), [("dcp", "torch"), ("dcp", "safetensors"), ("safetensors", ""), ("torch", "")]
)
def test_few_pieces_are_in_memory_at_a_time(
    form: str, layout: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most_nbytes = 0
    read, lock = PieceReader.read, threading.Lock()

    def watched(self: PieceReader, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        nonlocal most_nbytes
        values = read(self, pieces)
        with lock:
            alive.extend(map(weakref.ref, values))
            most_nbytes = max(most_nbytes, sum(value.nbytes for each in alive if (value := each()) is not None))
        return values

    monkeypatch.setattr(PieceReader, "read", watched)
    convert(
        *(source, tmp_path / "made"),
        form=form,  # type: ignore[arg-type]
        layout=layout or "torch",
        buffer_nbytes=4 * MIB,
    )
    assert len(alive) > 20
    # Two threads write, each with half of the buffer, while as much is read.
    assert most_nbytes <= 6 * MIB
