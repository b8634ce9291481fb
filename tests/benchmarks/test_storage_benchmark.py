"""The storage benchmark runs, its JSON has what it promises, and it refuses to measure what loads wrongly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks import storage
from benchmarks.drive import measurement, probe
from benchmarks.drive.contenders import (
    OURS,
    READERS,
    STOCK,
    STOCK_DEFAULT,
    STOCK_READER,
    WRITERS,
    Reader,
    Writer,
    why_not,
)
from benchmarks.drive.figures import RATIOS, Case, rows_of
from benchmarks.drive.measurement import Figures
from benchmarks.drive.shapes import FSDP2, SHAPES, leaves, nbytes_of, ranks_of, state_dict_of
from robust_dcp.testing.ranks import run_ranks, values

_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30

_KEYS = {
    "shape",
    "what",
    "who",
    "checkpoint",
    "items",
    "nbytes",
    *RATIOS,
    "gib_per_second",
    "seconds",
    "cpu_seconds_per_gib",
    "peak_nbytes",
    "rounds_seconds",
}


def test_a_run_measures_saves_and_loads_of_ours_and_stocks_beside_the_drive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    who = f"{OURS},{STOCK_DEFAULT.partition(', ')[2]}"

    storage.main(
        ["--path", str(drive), "--gib", "0.002", "--rounds", "1", "--shapes", "moe", "--who", who, "--name", "a drive"]
        + ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.svg")]
    )

    assert list(drive.iterdir()) == []
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found.keys() == {"machine", "rows", "not_run", "notes"}
    assert found["machine"]["drive"] == "a drive"
    rows = found["rows"]
    assert all(row.keys() == _KEYS and len(row["rounds_seconds"]) == 1 for row in rows)
    assert all(row[key] > 0 for row in rows for key in ("seconds", "nbytes", "items", *RATIOS))
    cases = {(row["what"], row["who"], row["checkpoint"]) for row in rows}
    assert {(what, each.name, "") for what in ("save", "load") for each in probe.PROBES} <= cases
    assert {("save", who, "") for who in (OURS, STOCK_DEFAULT)} <= cases
    assert {("load", reader, writer) for reader in (OURS, STOCK_READER) for writer in (OURS, STOCK_DEFAULT)} <= cases
    assert {row["who"] for row in rows if row["what"] == "save"} | found["not_run"].keys() >= {
        name for name in WRITERS if name.startswith(OURS)
    }
    assert (tmp_path / "figures.svg").read_text().count("<svg") == 1
    titles = capsys.readouterr().out.splitlines()[0]
    assert titles.index("x raw probe") < titles.index("x stock") < titles.index("GiB/s") < titles.index("CPU-s/GiB")


def test_ranks_of_fsdp2_are_measured_together_and_without_those_who_save_alone(tmp_path: Path) -> None:
    who = f"{OURS},{STOCK_DEFAULT.partition(', ')[2]},HuggingFaceStorageWriter"
    names = [name for name in WRITERS if any(part in name for part in who.split(","))]

    found = storage.run(str(tmp_path), [FSDP2], 64 * _KIB, 1, names)

    rows = {(row["what"], row["who"], row["checkpoint"]): row for row in found["rows"]}
    assert {("save", who) for who in names if "HuggingFace" not in who} == {
        (what, who) for what, who, _ in rows if what == "save" and "probe" not in who
    }
    loads = {("load", reader, writer) for reader in (OURS, STOCK_READER) for writer in (OURS, STOCK_DEFAULT)}
    assert loads <= rows.keys()
    assert not any("HuggingFace" in reader for _, reader, _ in rows)
    ours = rows["save", OURS, ""]
    assert nbytes_of(FSDP2, 64 * _KIB) < ours["nbytes"] < 1.01 * nbytes_of(FSDP2, 64 * _KIB)  # and Adam's steps


def test_saves_are_measured_without_loads_where_that_is_asked_for(tmp_path: Path) -> None:
    found = storage.run(str(tmp_path), ["moe"], 64 * _KIB, 1, [OURS], loads=False)

    assert {(row["what"], row["who"]) for row in found["rows"]} == {
        ("save", name) for name in (OURS, *(each.name for each in probe.PROBES))
    }


def test_ratios_are_of_medians_within_the_run() -> None:
    def figures(*seconds: float) -> list[Figures]:
        return [Figures(_GIB, 7, each, 2 * each, round(each * 10)) for each in seconds]

    rows = rows_of(
        {
            Case("large", "save", probe.PROBES[0].name): figures(1.0, 9.0, 1.0),
            Case("large", "save", probe.PROBES[1].name): figures(0.5, 0.5, 0.5),
            Case("large", "save", OURS): figures(2.0, 1.0, 1.0),
            Case("large", "save", STOCK[0]): figures(8.0, 8.0, 8.0),
            Case("large", "save", STOCK[2]): figures(4.0, 4.0, 4.0),
            Case("large", "load", OURS, OURS): figures(1.0, 1.0, 1.0),
            Case("large", "load", STOCK_READER, OURS): figures(2.0, 2.0, 2.0),
            Case("large", "load", STOCK_READER, STOCK_DEFAULT): figures(3.0, 3.0, 3.0),
            Case("small", "save", OURS): figures(1.0),
        }
    )

    ours, load, alone = rows[2], rows[5], rows[8]
    assert [ours[key] for key in RATIOS] == [0.5, 8.0, 4.0]
    assert (ours["seconds"], ours["gib_per_second"], ours["cpu_seconds_per_gib"]) == (1.0, 1.0, 2.0)
    assert (ours["peak_nbytes"], ours["items"], ours["rounds_seconds"]) == (20, 7, [2.0, 1.0, 1.0])
    assert [load[key] for key in RATIOS] == [None, 3.0, 3.0]
    assert [alone[key] for key in RATIOS] == [None, None, None]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nbytes", [64 * _KIB, 3 * _GIB])
def test_shapes_have_about_the_bytes_that_were_asked_for(shape: str, nbytes: int) -> None:
    specs = SHAPES[shape](nbytes)

    found = sum(spec.nbytes for spec in specs)
    if shape == "small":
        assert (len(specs), found) == (min(20_000, nbytes // (16 * _KIB)), len(specs) * 16 * _KIB)
    elif nbytes > _GIB:
        assert math.isclose(found, nbytes, rel_tol=0.15)
    assert len({spec.name for spec in specs}) == len(specs)


def _fsdp2_state(nbytes: int) -> tuple[dict[tuple[str, ...], bytes], set[str]]:
    state_dict = state_dict_of(FSDP2, nbytes)
    assert {type(value) for value in state_dict["model"].values()} == {DTensor}
    found = leaves(state_dict)
    # A view of a larger buffer, memory of its own that the allocator took from its heap, and what it mapped.
    kinds = set()
    for tensor in found.values():
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        kinds.add("view" if is_part else "mapped" if tensor.data_ptr() % 4096 == 64 else "heap")
    return {path: bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for path, tensor in found.items()}, kinds


def test_fsdp2_is_what_real_ranks_hold_the_same_each_time_and_about_the_bytes_that_were_asked_for() -> None:
    asked = 24 * _MIB
    first, again = (values(run_ranks(ranks_of(FSDP2), _fsdp2_state, asked)) for _ in range(2))

    assert [state for state, _ in first] == [state for state, _ in again]
    assert all(kinds >= {"view", "heap"} for _, kinds in first)
    ranks = [state for state, _ in first]
    in_fp8 = {path[1]: len(data) for path, data in ranks[0].items() if path[0] == "fp8"}
    assert in_fp8 and all(len(ranks[0]["model", name]) == 4 * nbytes for name, nbytes in in_fp8.items())
    first_rows, last_rows = (len(state["model", "embed_tokens.weight"]) for state in ranks)
    assert first_rows > last_rows  # the last rank's shard is padded
    total = sum(len(data) for state in ranks for path, data in state.items() if path[-1] != "step")
    assert total == nbytes_of(FSDP2, asked)
    for asked in (64 * _MIB, _GIB, 4 * _GIB):
        assert math.isclose(nbytes_of(FSDP2, asked), asked, rel_tol=0.15)


def test_a_state_dict_is_the_same_bytes_each_time() -> None:
    first, again = state_dict_of("moe", 256 * _KIB), state_dict_of("moe", 256 * _KIB)

    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), again[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("chosen", probe.PROBES, ids=lambda chosen: chosen.name)
def test_the_probe_reads_what_it_wrote(tmp_path: Path, chosen: probe.Probe) -> None:
    source, target = probe.source_of(9 * _MIB + 5), probe.source_of(9 * _MIB + 5)
    target[:] = bytes(len(target))

    probe.write(str(tmp_path / "files"), source, chosen)
    probe.read(str(tmp_path / "files"), target, chosen)

    assert target[:] == source[:]
    assert len(source) == 9 * _MIB + 4096


def test_a_load_of_something_else_is_no_measurement(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    measurement.save(STOCK_DEFAULT, "small", 64 * _KIB, path)
    (data_file,) = Path(path).glob("*.distcp")
    content = bytearray(data_file.read_bytes())
    content[len(content) // 8] ^= 1  # in the payload of the first of four records
    data_file.write_bytes(content)

    with pytest.raises(ValueError, match=r"loaded 1 of 4 tensors wrongly"):
        measurement.load(STOCK_READER, "small", 64 * _KIB, path)


def test_memory_and_cpu_time_of_a_save_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state_dict: dict[str, torch.Tensor], path: str) -> None:
        Path(path).mkdir()
        if len(state_dict) > 1:
            bytearray(b"x" * (48 * _MIB))

    monkeypatch.setitem(WRITERS, "hungry", Writer(save))

    figures = measurement.save("hungry", "small", 64 * _KIB, str(tmp_path / "checkpoint"))

    assert 48 * _MIB <= figures.peak_nbytes <= 128 * _MIB
    assert (figures.items, figures.nbytes) == (4, 64 * _KIB)


def _raises(error: BaseException) -> Callable[..., None]:
    def save(*args: object) -> None:
        raise error

    return save


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'fast'", name="fast"), "fast is not installed"),
        (TypeError("unexpected keyword argument"), "TypeError: unexpected keyword argument"),
    ],
)
def test_who_does_not_run_here_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    monkeypatch.setitem(WRITERS, "other", Writer(_raises(error)))

    monkeypatch.setitem(READERS, "failing", Reader(_raises(error)))
    monkeypatch.setitem(WRITERS, "readable by one", replace(WRITERS[STOCK_DEFAULT], readers=(STOCK_READER, "failing")))

    assert why_not("other", str(tmp_path)) == {"other": why}
    assert why_not("readable by one", str(tmp_path)) == {"failing < readable by one": why}
    assert why_not(STOCK_DEFAULT, str(tmp_path)) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_drive_without_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="choose less with --gib"):
        storage.run(str(tmp_path), ["large"], 1 << 60, 1)
