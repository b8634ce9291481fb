"""Hostile files that ask for more time or memory than their size can need, however large they are.

Each is loaded in a process of its own, with limits on processor time and memory.
"""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from pathlib import Path

import pytest

import robust_dcp
from robust_dcp import CorruptCheckpoint, UnsafeCheckpoint
from tests.harness.ranks import run_ranks, values

MIB = 1 << 20
CPU_SECONDS = 20

# A tuple of two tuples, each of two tuples, ... All share their parts, so a few bytes make 2**60 of them.
SHARED_TUPLES = b"N\x85\x94" + b"".join(b"h%ch%c\x86\x94" % (place, place) for place in range(60))
PADDING = b"X" + (3 * MIB).to_bytes(4, "little") + b"a" * (3 * MIB)
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}X\x03\x00\x00\x00fqn"

METADATA = {
    "a dict": b"\x80\x04]" + SHARED_TUPLES + b"}" + b"h\x3bNs" + PADDING + b"\x87.",
    "a dict that is called": b"\x80\x04]" + SHARED_TUPLES + b"c__builtin__\ndict\n)Rh\x3bNs" + PADDING + b"\x87.",
    "an ordered dict": b"\x80\x04]" + SHARED_TUPLES + b"ccollections\nOrderedDict\n)Rh\x3bNs" + PADDING + b"\x87.",
    "a set": b"\x80\x04]" + SHARED_TUPLES + b"\x8f(h\x3b\x90" + PADDING + b"\x87.",
    "a set that is called": b"\x80\x04]" + SHARED_TUPLES + b"c__builtin__\nset\n)R(h\x3b\x90" + PADDING + b"\x87.",
    "a frozenset": b"\x80\x04]" + SHARED_TUPLES + b"(h\x3b\x91" + PADDING + b"\x87.",
    "a dict of protocol 0": b"\x80\x04]" + SHARED_TUPLES + b"(h\x3bNd" + PADDING + b"\x87.",
    "an index": b"\x80\x04]" + SHARED_TUPLES + b"}" + INDEX + b"h\x3bsbNs" + PADDING + b"\x87.",
    "a deep tuple": b"\x80\x04}N" + b"\x85" * MIB + b"Ns.",
}
OBJECTS = {
    "sets": b"\x8f",
    "sets that are remembered": b"\x8f\x94",
    "sets behind marks": b"(\x8f",
    "lists": b"]",
    "dicts": b"}",
    "marks": b"(",
    "tuples in tuples": b"\x85",
    "lists in lists": b"]",
}


def archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def load(path: str) -> str:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        robust_dcp.load({"w": ""}, checkpoint_id=path)
    except (CorruptCheckpoint, UnsafeCheckpoint) as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("kind", METADATA)
def test_keys_of_metadata_are_looked_at_before_they_are_hashed(kind: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(METADATA[kind])
    assert len(METADATA[kind]) >= MIB
    (told,) = values(run_ranks(1, load, str(tmp_path)))
    assert told in ("CorruptCheckpoint", "UnsafeCheckpoint")


def load_object(path: str) -> tuple[str, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = load(path)
    return told, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_takes_a_bounded_multiple_of_its_size(kind: str, tmp_path: Path) -> None:
    robust_dcp.save({"w": "an object"}, checkpoint_id=tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    opcode = OBJECTS[kind]
    n = 4 * MIB // len(opcode)
    end = b"a" * (n - 1) if kind == "lists in lists" else b""
    record = archive(b"\x80\x04" + (b"N" if kind.startswith("tuples") else b"") + opcode * n + end + b".")
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(record)
    path.write_bytes(record)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / ".robust_dcp.index").unlink()
    ((told, nbytes),) = values(run_ranks(1, load_object, str(tmp_path)))
    assert told in ("CorruptCheckpoint", "UnsafeCheckpoint")
    assert nbytes < 512 * MIB
