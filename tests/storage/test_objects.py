"""Objects in a checkpoint are loaded if they are data, and run nothing if they are not."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.records.objects import check_object, load_object

Save = Callable[[Any, io.BytesIO], object]

SAVES: dict[str, Save] = {
    "zip": torch.save,
    "protocol 4": lambda value, buffer: torch.save(value, buffer, pickle_protocol=4),
}


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Own:
    def __init__(self, value: int) -> None:
        self.value = value


def saved(value: Any, save: Save = SAVES["zip"]) -> bytes:
    buffer = io.BytesIO()
    save(value, buffer)
    return buffer.getvalue()


def load(data: bytes, **options: Any) -> Any:
    return load_object(data, file="__0_0.distcp", item="extra", **options)


def check(data: bytes) -> None:
    check_object(data, file="__0_0.distcp", item="extra")


def test_tensors_and_arrays_are_data() -> None:
    value: dict[str, Any] = {
        "t": torch.ones(3),
        "p": torch.nn.Parameter(torch.ones(2)),
        "a": np.arange(4),
        "o": np.array([1, "a", None]),
    }
    loaded = load(saved(value))
    assert torch.equal(loaded["t"], value["t"])
    assert isinstance(loaded["p"], torch.nn.Parameter)
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["o"].tolist() == [1, "a", None]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "save",
    [
        *SAVES.values(),
        lambda value, buffer: torch.save(value, buffer, _use_new_zipfile_serialization=False),
        pickle.dump,
    ],
    ids=[*SAVES.keys(), "before torch 1.6", "bare pickle"],
)
@pytest.mark.parametrize("wrapped", [lambda value: value, lambda value: {"deep": [collections.deque([value])]}])
def test_code_is_refused_and_not_run(save: Save, wrapped: Callable[[Any], Any], tmp_path: Path) -> None:
    data = saved(wrapped(Touch(tmp_path / "ran")), save)
    for function in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=r"(posix\.mkdir|before 1\.6).*add_safe_globals.*trusted=True"):
            function(data)
    assert not (tmp_path / "ran").exists()


def test_a_trusted_object_may_run_code(tmp_path: Path) -> None:
    load(saved(Touch(tmp_path / "ran")), trusted=True)
    assert (tmp_path / "ran").is_dir()


def test_a_program_is_refused() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    with pytest.raises(UnsafeCheckpoint, match="TorchScript"):
        check(buffer.getvalue())


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return buffer.getvalue()


def tar_without_magic() -> bytes:
    """As the first versions of tar wrote it. ``torch.load`` of such a file unpickles its members."""
    data = bytearray(tar())
    data[257:512] = bytes(255)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


OLD = {
    "tar": tar(),
    "tar without magic": tar_without_magic(),
    "before torch 1.6": saved(
        {"w": torch.ones(2)}, lambda v, b: torch.save(v, b, _use_new_zipfile_serialization=False)
    ),
    "text": pickle.dumps([1.5, "a"], protocol=0),
    "text that is code": b"I0x10\n0cos\nsystem\n.",  # a number as Python's unpickler reads it, and others do not
    "opcodes of Python 2": b"\x80\x02U\x01a.",
}


@pytest.mark.parametrize("data", OLD.values(), ids=OLD.keys())
def test_formats_that_dcp_never_wrote_are_refused(data: bytes) -> None:
    for function in (load, check):
        with pytest.raises(UnsafeCheckpoint, match=r"item 'extra' in __0_0\.distcp asks for .*trusted=True"):
            function(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"raw", b'{"json": 1}', bytes(range(256)), b"PK", b"RIFF", b"lr: 0.1\n", b"Some\n", pickle.dumps([1, "a"])],
)
def test_bytes_that_torch_cannot_read_are_the_planners_business(data: bytes) -> None:
    check(data)
    with pytest.raises(CorruptCheckpoint, match=r"'extra' in __0_0\.distcp"):
        load(data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_cannot_change_the_classes_that_it_names(protocol: int) -> None:
    # BUILD with a pair of states calls setattr: here on the class Namespace itself.
    state = pickle.NONE + b"}X\x08\0\0\0__init__cbuiltins\nlist\ns" + pickle.TUPLE2
    named = b"cargparse\nNamespace\n"
    attack = pickle.PROTO + bytes([protocol]) + named + state + pickle.BUILD + pickle.STOP
    before = argparse.Namespace.__init__
    with pytest.raises(UnsafeCheckpoint, match=r"Namespace\.__init__"):
        check(attack)
    assert argparse.Namespace.__init__ is before
    assert argparse.Namespace(a=1).a == 1
