"""What a name in a pickle may do is said in one place, whoever has registered it, and wherever the pickle lies."""

from __future__ import annotations

import enum
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import types
import zipfile
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustReader, UnsafeCheckpoint
from tests.storage.forged import Call, made, tries_with

_TEXT = b"X\x01\0\0\0\x07"
"""How the text is pickled by protocol 2."""


def with_opcodes(value: Any, opcodes: bytes) -> bytes:
    """The pickle of ``value``, in which the opcodes make what a text of the one letter 07 was."""
    pickled = pickle.dumps(value, protocol=2)
    assert pickled.count(_TEXT) == 1
    # What is remembered behind it has the same numbers, for the opcodes remember nothing.
    return pickled.replace(_TEXT, opcodes)


def archive_of(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def stock_checkpoint(directory: str) -> str:
    dcp.save({"x": 1, "w": torch.ones(3)}, checkpoint_id=directory, no_dist=True)
    return directory


def into_object(directory: str, opcodes: bytes) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    data = archive_of(with_opcodes({"deep": ["\x07"]}, opcodes))
    for index, info in metadata.storage_data.items():
        if index.fqn == "x":
            info.relative_path, info.offset, info.length = "forged.distcp", 0, len(data)
    (Path(directory) / "forged.distcp").write_bytes(data)
    (Path(directory) / ".metadata").write_bytes(pickle.dumps(metadata))


def into_planner_data(directory: str, opcodes: bytes) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    metadata.planner_data = {"w": ("w",), "x": "\x07"}
    (Path(directory) / ".metadata").write_bytes(with_opcodes(metadata, opcodes))


def into_plans_of_megatron(directory: str, opcodes: bytes) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    vars(metadata)["all_local_plans"] = [{"a": ["\x07"]}]
    (Path(directory) / ".metadata").write_bytes(with_opcodes(metadata, opcodes))


def into_common_state(directory: str, opcodes: bytes) -> None:
    """Of a checkpoint of Megatron's that stock has saved."""
    (Path(directory) / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (Path(directory) / "common.pt").write_bytes(archive_of(with_opcodes({"deep": ["\x07"]}, opcodes)))


def load(directory: str) -> Any:
    wanted = {"x": None, "w": torch.zeros(3)}
    robust_dcp.load(wanted, checkpoint_id=directory, no_dist=True)
    return wanted["x"]


def load_over(directory: str) -> None:
    """A save looks at what it replaces."""
    robust_dcp.save({"w": torch.ones(2)}, checkpoint_id=directory, no_dist=True)


PLACES: dict[str, tuple[Callable[[str, bytes], None], Callable[[str], Any]]] = {
    "object": (into_object, load),
    "object, stock's planner": (
        into_object,
        lambda path: robust_dcp.load(
            {"x": None, "w": torch.zeros(3)}, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True
        ),
    ),
    "planner_data": (into_planner_data, load),
    "planner_data, read": (into_planner_data, lambda path: RobustReader(path).read_metadata()),
    "planner_data, saved over": (into_planner_data, load_over),
    "plans of Megatron": (into_plans_of_megatron, load),
}


def surroundings(classes: list[Any]) -> dict[str, Any]:
    """What a pickle may not change: the named classes, modules, threads, open files and sockets, process groups."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {
        "classes": {str(kind): dict(vars(kind)) for kind in classes},
        "modules": set(sys.modules),
        "threads": {thread.name for thread in threading.enumerate()},
        "files": {os.readlink(file) for file in files if os.path.lexists(file)},
        "process groups": torch.distributed.is_initialized(),
    }


def code_of(value: Any) -> set[types.CodeType]:
    """The code of a function, or of a class and its members, where it is defined."""
    members = (getattr(member, "__func__", member) for member in (value, *getattr(value, "__dict__", {}).values()))
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    return {function.__code__ for function in functions if function.__module__ == value.__module__}


def try_all(root: str) -> None:
    """Try everything with each name that torch registers. Prints what has changed or was called."""
    registered = torch.serialization.get_safe_globals()
    assert len(registered) >= 8 and all(value.__module__.startswith("torch.") for value in registered)
    classes = [value for value in registered if isinstance(value, type)]
    code = set().union(*map(code_of, registered))
    called: set[str] = set()

    def note_calls(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in code:
            called.add(frame.f_code.co_name)

    def attempt(number: int, name: str, opcodes: bytes, place: str) -> bool:
        write, read = PLACES[place]
        directory = stock_checkpoint(f"{root}/{number}")
        write(directory, opcodes)
        before = surroundings(classes)
        sys.setprofile(note_calls)
        try:
            read(directory)
            is_refused = False
        except RobustCheckpointError:
            is_refused = True
        finally:
            sys.setprofile(None)
        now = surroundings(classes)
        for what in before:
            if now[what] != before[what]:
                print(f"{name} as {place}: {what} have changed")
        if called:
            print(f"{name} as {place} has called {sorted(called)}")
            called.clear()
        return is_refused

    for number, place in enumerate(PLACES):  # imports what it needs
        assert not attempt(number, "nothing", b"N", place)
    trials = [
        (f"{how} {value.__qualname__}", opcodes)
        for value in registered
        for how, opcodes in tries_with(value.__module__, value.__qualname__).items()
    ]
    n_refused = 0
    for number, (name, opcodes) in enumerate(trials):
        for place in list(PLACES) if os.environ.get("LONG_TESTS") else [list(PLACES)[number % len(PLACES)]]:
            n_refused += attempt(100 + number, name, opcodes, place)
    assert n_refused > len(trials) // 2
    print(f"{len(trials)} were tried")


def test_what_torch_registers_itself_gives_a_pickle_nothing_wherever_it_lies(tmp_path: Path) -> None:
    program = f"import torch, torch.distributed.tensor\nfrom {__name__} import try_all\ntry_all({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"\d+ were tried\n", done.stdout)


class OfTheUser:
    """Has code that runs when an object is made and when it gets its state."""

    def __init__(self, value: int = 0) -> None:
        self.how = f"called with {value}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.how = f"given {state}"


TRIES = {
    "called": (Call(OfTheUser, 3), "called with 3"),
    "made and filled": (made(OfTheUser, state={"a": 1}), "given {'a': 1}"),
}


@pytest.mark.parametrize(("value", "how"), TRIES.values(), ids=TRIES)
@pytest.mark.parametrize("place", ["object", "planner_data, read"])
def test_what_the_user_registers_is_called_and_built(tmp_path: Path, place: str, value: Any, how: str) -> None:
    pickled = pickle.dumps(value, protocol=2).removeprefix(b"\x80\x02").removesuffix(b".")
    write, read = PLACES[place]
    write(stock_checkpoint(str(tmp_path)), re.sub(rb"q.", b"", pickled) if b"h" not in pickled else pickled)
    with pytest.raises(UnsafeCheckpoint, match="OfTheUser"):
        read(str(tmp_path))
    with torch.serialization.safe_globals([OfTheUser]):
        result = read(str(tmp_path))
    found = result["deep"][0] if place == "object" else result.planner_data["x"]
    assert type(found) is OfTheUser and found.how == how


def test_a_class_that_torch_registers_can_be_registered_with_its_name(tmp_path: Path) -> None:
    name = f"{DeviceMesh.__module__}.{DeviceMesh.__qualname__}"
    into_object(stock_checkpoint(str(tmp_path)), tries_with(*name.rsplit(".", 1))["NEWOBJ"])
    with (
        torch.serialization.safe_globals([DeviceMesh]),
        pytest.raises(UnsafeCheckpoint, match=r"registered with its name"),
    ):
        load(str(tmp_path))
    with torch.serialization.safe_globals([(DeviceMesh, name)]):
        assert type(load(str(tmp_path))["deep"][0]) is DeviceMesh


def test_placements_are_data(tmp_path: Path) -> None:
    placements = [Shard(1), Replicate(), Partial("avg"), _StridedShard(0, split_factor=2)]
    robust_dcp.save({"x": {"set": (placements,)}}, checkpoint_id=tmp_path, no_dist=True)
    wanted: dict[str, Any] = {"x": {"set": None}}
    robust_dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert wanted["x"]["set"] == (placements,)


class Mode(enum.Enum):
    """Its code would run if a pickle could give a member a state, or items."""

    SAFE = 1
    UNSAFE = 2

    def __setstate__(self, state: Any) -> None:
        raise SystemExit("code of the program has run")

    def extend(self, items: Any) -> None:
        raise SystemExit("code of the program has run")


class Removed(namedtuple("Removed", "path")):
    """A named tuple that does something when it is freed."""

    __slots__ = ()

    def __del__(self) -> None:
        raise SystemExit("code of the program has run")


def _named(kind: Any) -> bytes:
    return b"c" + f"{kind.__module__}\n{kind.__qualname__}\n".encode()


def _frozensets(depth: int) -> bytes:
    """A dict with two keys that are equal, of which each level holds the next one twice."""
    chain = b"K\x01"
    for _ in range(depth):  # frozenset([(last, last)])
        chain = b"cbuiltins\nfrozenset\n](" + chain + b"2\x86e\x85R"
    return b"}(" + chain + b"N" + chain + b"Nu"


_MEMBER = _named(Mode) + b"K\x01\x85R"
_MANY = 200_000
HARMFUL: dict[str, bytes] = {
    "the state of a member": _MEMBER + b"}X\x07\0\0\0_value_K\x02sb",
    "slots of a member": _MEMBER + b"N}X\x07\0\0\0_value_K\x02s\x86b",
    "items for a member": _MEMBER + b"(K\x01e",
    "deques in deques": b"ccollections\ndeque\n)R" * _MANY + b"a" * (_MANY - 1),
    "a size of a range": b"ctorch\nSize\ncbuiltins\nrange\nJ\x00\xa3\xe1\x11\x85R\x85R",
    "an index of a range": (
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nX\x01\0\0\0wcbuiltins\nrange\nJ\x00\xa3\xe1\x11\x85R\x86R"
    ),
    "sizes of a long list": b"](" + b"K\x01" * 100_000 + b"eq\xff0(" + b"ctorch\nSize\nh\xff\x85R" * 2_000 + b"t",
    "frozensets that are compared for ever": _frozensets(60),
    "a named tuple that does something when it is freed": _named(Removed) + b"X\x01\0\0\0a\x85\x81",
}


@pytest.mark.parametrize("opcodes", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("place", ["object", "planner_data, read", "common state"])
def test_what_would_run_code_or_never_end_is_refused_at_once(tmp_path: Path, place: str, opcodes: bytes) -> None:
    if place == "common state":
        pytest.importorskip("megatron.core")
        from robust_dcp.megatron.load import load_common_state_dict

        write, read = into_common_state, partial(load_common_state_dict, None)
    else:
        write, read = PLACES[place]
    write(stock_checkpoint(str(tmp_path)), opcodes)
    with pytest.raises((UnsafeCheckpoint, CorruptCheckpoint)):
        read(str(tmp_path))
    assert [(mode.name, mode.value) for mode in Mode] == [("SAFE", 1), ("UNSAFE", 2)]
