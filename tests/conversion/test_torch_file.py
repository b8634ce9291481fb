"""Every byte of a file of `torch.save` that goes into a conversion is compared with its checksum."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from robust_dcp.conversion.convert import convert
from robust_dcp.conversion.source import open_source
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from tests.harness.fingerprints import differences


def state() -> dict[str, Any]:
    whole = torch.randn(40, 30)
    return {
        "whole": torch.randn(50, 20),
        "turned": whole.t(),
        "half": whole[20:],
        "tied": whole,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        "inner": (torch.ones(3), 7),
    }


def flip(path: Path, record: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = next(each for each in archive.infolist() if each.filename.endswith(record))
        data = archive.read(info)
    whole = bytearray(path.read_bytes())
    whole[whole.index(data, info.header_offset) + len(data) // 2] ^= 4
    path.write_bytes(whole)


def records_of(path: Path) -> dict[str, int]:
    """The sizes of the records that hold tensors."""
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename.split("/", 1)[1]: info.file_size for info in archive.infolist() if "/data/" in info.filename
        }


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_tensors_of_all_kinds_pass_as_they_were(form: str, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "made", form=form, buffer_nbytes=2000)  # type: ignore[arg-type]
    if form == "dcp":
        convert(tmp_path / "made", tmp_path / "back.pt", form="torch")
    found = torch.load(tmp_path / ("back.pt" if form == "dcp" else "made"))
    expected = torch.load(tmp_path / "file.pt")
    for each in (expected, found):
        each["sparse"], each["quantized"] = each["sparse"].to_dense(), each["quantized"].dequantize()
        each["complex"] = each["complex"].resolve_conj()
    assert differences(expected, found) == []


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_a_flipped_bit_in_any_record_is_found_and_the_record_named(form: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({name: value for name, value in state().items() if name != "quantized"}, path)
    original = path.read_bytes()
    records = [name for name, nbytes in records_of(path).items() if nbytes]
    assert len(records) > 4
    for record in records:
        path.write_bytes(original)
        flip(path, record)
        with pytest.raises(CorruptCheckpoint, match=record):
            convert(path, tmp_path / "made", form=form, buffer_nbytes=2000)  # type: ignore[arg-type]
        assert {each.name for each in tmp_path.iterdir()} <= {"file.pt", "made.converting"}


def test_a_file_that_was_saved_without_checksums_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(9)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    convert(path, tmp_path / "made", form="torch")
    assert torch.equal(torch.load(tmp_path / "made")["a"], torch.ones(9))


def test_a_file_of_before_torch_1_6_is_taken(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.ones(9), "n": {1: torch.zeros(2)}}, tmp_path / "file.pt", _use_new_zipfile_serialization=False
    )
    convert(tmp_path / "file.pt", tmp_path / "made", form="torch")
    assert differences(torch.load(tmp_path / "file.pt"), torch.load(tmp_path / "made")) == []


class _Own:
    pass


class _AsksForCode:
    def __reduce__(self) -> Any:
        return os.getpid, ()


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("value", "named"), [(_Own(), "test_torch_file._Own"), (_AsksForCode(), f"{os.name}.getpid")], ids=["class", "code"]
)
def test_the_class_that_a_file_may_not_ask_for_is_named(value: Any, named: str, is_zip: bool, tmp_path: Path) -> None:
    torch.save({"a": value}, tmp_path / "file", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsafeCheckpoint, match="is not plain data") as refused:
        open_source(str(tmp_path / "file"), 0)
    assert named in refused.value.message
    assert "weights_only` set to `False`" not in refused.value.message  # no advice to read it with less care


@pytest.mark.parametrize("content", [b"x\n", b"", b"PK\x03\x04 and so on", b"{}", bytes(100)])
def test_a_file_of_another_kind_is_none_of_torch_save(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"expected a file of torch\.save"):
        open_source(str(tmp_path / "file"), 0)
