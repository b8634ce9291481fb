"""Unpickles ``.metadata``: by the interpreter of :mod:`robust_dcp.storage.records.unpickler`, or as that would, by
Python's own unpickler.

``.metadata`` is long and regular, and Python's unpickler, which is written in C, reads it five times faster (measured
with 100,000 tensors). So it goes first. It is given nothing that it could do harm with:

* A walk over the opcodes allows those that picklers write for metadata. It refuses lengths and memo indexes that the
  unpickler would believe, although no pickle of this length can have them.
* The walk also finds the dicts, so that each of them looks at a key before it is hashed.
* It gets ``torch.Size``, and DCP's dataclasses, whose code only sets attributes. They are watched: what the pickle sets
  on them is put back. For any other name it gets a function of ours that does what the table of trust says.

Whatever is not regular is left to the interpreter, which reads it or says what is wrong with it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.metadata.stored_pickle import corrupt, pickle_in, without_garbage_collection
from robust_dcp.storage.records.kinds import Budget, Builder, NotData, Pending, check_depth
from robust_dcp.storage.records.trust import Trust
from robust_dcp.storage.records.unpickler import Unpickler

_HOW_TO_ALLOW: Final = (
    "if the planner that wrote it keeps objects of that class in planner_data and you trust the file, register the "
    "class with torch.serialization.add_safe_globals([...])"
)


class _Irregular(Exception):
    """Not what writers of metadata write."""


# The walk over the opcodes.

_BARE: Final = (
    pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.EMPTY_TUPLE + pickle.EMPTY_LIST + pickle.MARK + pickle.TUPLE
    + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS
    + pickle.BUILD + pickle.REDUCE + pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.STACK_GLOBAL + pickle.MEMOIZE
    + pickle.POP + pickle.POP_MARK
)  # fmt: skip
_RUN_LENGTH: Final = 4096
"""So many opcodes are matched at a time. The regular expression engine remembers each of them until the match ends."""


@cache
def _run_of_opcodes() -> re.Pattern[bytes]:
    """Opcodes with arguments that need no look. Compiling this takes 5 ms, and most saves decode no ``.metadata``."""
    return re.compile(
        b"(?s:[%s]+|[%s].|%s..|[%s].{4}|G.{8}|c[^\\n]*\\n[^\\n]*\\n|[%s](?:%s)){0,%d}"
        % (
            re.escape(_BARE),
            re.escape(pickle.PROTO + pickle.BININT1 + pickle.BINPUT + pickle.BINGET),
            re.escape(pickle.BININT2),
            re.escape(pickle.BININT + pickle.LONG_BINGET),
            re.escape(pickle.SHORT_BINUNICODE + pickle.SHORT_BINBYTES + pickle.LONG1),
            b"|".join(re.escape(bytes([nbytes])) + b".{%d}" % nbytes for nbytes in range(256)),
            _RUN_LENGTH,
        )
    )


_COUNTED: Final = {
    **dict.fromkeys((pickle.BINUNICODE[0], pickle.BINBYTES[0]), 4),
    **dict.fromkeys((pickle.BINUNICODE8[0], pickle.BINBYTES8[0]), 8),
}


def _dicts_in(pickled: bytes) -> list[int]:
    """Where a pickle makes dicts: the places of its EMPTY_DICT opcodes.

    Raises:
        _Irregular: something would make Python's unpickler take more memory or time than a pickle of this length can
            need.
    """
    places = []
    at, nbytes, match = 0, len(pickled), _run_of_opcodes().match
    while True:
        run = match(pickled, at)
        begin, at = at, at if run is None else run.end()
        code = pickled[at] if at < nbytes else None
        if code == pickle.EMPTY_DICT[0]:
            places.append(at)
            at += 1
        elif code == pickle.STOP[0]:
            return places
        elif code in _COUNTED:
            end = at + 1 + _COUNTED[code]
            at = min(end + int.from_bytes(pickled[at + 1 : end], "little"), nbytes)
        elif code == pickle.FRAME[0]:
            at += 9
        elif code == pickle.LONG_BINPUT[0] and int.from_bytes(pickled[at + 1 : at + 5], "little") <= nbytes:
            at += 5
        elif code is None or at == begin:  # else the run was as long as one may be
            raise _Irregular


class _CheckedDict(dict[Any, Any]):
    """A dict that looks at each key before it is hashed.

    Python's unpickler would hash a tuple of tuples that all share their parts, and never come to an end.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str and not (
            type(key) is MetadataIndex and type(key.fqn) is str and type(key.offset) in (torch.Size, type(None))
        ):
            raise _Irregular
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


def _plain_dicts(value: Any, depth: int = 4) -> Any:
    """``value`` with ordinary dicts in place of those that have checked their keys."""
    if not isinstance(value, _CheckedDict):
        return value
    return {key: _plain_dicts(each, depth - 1) if depth else each for key, each in value.items()}


def _caller(build: Builder, budget: Budget) -> Callable[..., Any]:
    """What stands for a name that may be called, and does what the table of trust says."""

    def call(*arguments: Any) -> Any:
        if any(map(callable, arguments)):
            raise _Irregular
        value = build(tuple(map(_plain_dicts, arguments)), budget)
        if isinstance(value, (Pending, dict)):  # its state or its items come later
            raise _Irregular
        return value

    return call


class _NativeUnpickler(pickle.Unpickler):
    """Python's unpickler, for a regular pickle."""

    def __init__(self, stream: IO[bytes], budget: Budget) -> None:
        # An object without readinto and peek makes the C unpickler read exactly what it needs. So the stream ends right
        # after the pickle, and a damaged pickle does not confuse the unpickler's own buffer.
        bare = SimpleNamespace(read=stream.read, readline=stream.readline)
        super().__init__(cast("IO[bytes]", bare), buffers=(_CheckedDict() for _ in itertools.repeat(None)))
        self._budget = budget
        self._trust = Trust()
        self._watched: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        value = self._trust.named(module, name)
        trusted = self._trust.of(value)
        if trusted.as_native is not None:
            if trusted.as_native.__flags__ & _HEAP_TYPE:
                self._watched.setdefault(trusted.as_native, _attributes(trusted.as_native))
            return trusted.as_native
        if trusted.call is not None and not trusted.is_registered:  # the interpreter knows what registered code may do
            return _caller(trusted.call, self._budget)
        if callable(value):
            raise _Irregular
        return value

    def put_back(self) -> None:
        """Give the classes their attributes back, and raise :class:`_Irregular` if any had been changed."""
        is_changed = False
        for kind, before in self._watched.items():
            now = _attributes(kind)
            for name in before.keys() | now.keys():
                if name not in before:  # or a cache of Python's own (__slotnames__), which it makes anew
                    type.__delattr__(kind, name)
                elif before[name] is not now.get(name, _ABSENT):
                    type.__setattr__(kind, name, before[name])
                else:
                    continue
                is_changed = True
        if is_changed:
            raise _Irregular


def _attributes(kind: type) -> dict[str, Any]:
    """All that can be set on a class."""
    return {**vars(kind), **{name: getattr(kind, name) for name in ("__name__", "__qualname__", "__bases__")}}


_ABSENT: Final = object()
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of such a class can be set


def natively(data: bytes) -> tuple[Any, int] | None:
    """What a regular pickle holds, and its length in bytes; ``None`` if it is not regular."""
    try:
        pickled = bytearray(data)
        for place in _dicts_in(data):
            # There Python's unpickler takes what we give: a dict that looks at keys.
            pickled[place] = pickle.NEXT_BUFFER[0]
        stream = io.BytesIO(pickled)
        unpickler = _NativeUnpickler(stream, Budget(len(pickled)))
        try:
            value = unpickler.load()
        finally:
            unpickler.put_back()
        for name, held in vars(value).items():
            setattr(value, name, _plain_dicts(held))
    except Exception:  # broken pickles raise all kinds of errors
        return None
    return value, stream.tell()


def unpickled(data: bytes, file: str) -> Any:
    """Unpickle a ``.metadata``.

    Args:
        data: the whole file.
        file: its path, for errors.

    Raises:
        CorruptCheckpoint: the checksum does not match, or this is not a pickle, or something follows it.
        UnsafeCheckpoint: the pickle needs what is not known to be data, and what the user has not registered.
    """
    pickled = pickle_in(data, file)
    with without_garbage_collection():
        value, nbytes = natively(pickled) or interpreted(pickled, file)
    if nbytes != len(pickled):
        # Neither DCP nor we write anything here. If our trailer is damaged, this is where it shows.
        raise corrupt(file, "nothing behind the pickle", f"{len(pickled) - nbytes} bytes")
    return value


def interpreted(data: bytes, file: str) -> tuple[Any, int]:
    """What a pickle holds, and its length in bytes. Raises the same as :func:`unpickled`."""
    unpickler = Unpickler(data)
    try:
        value = unpickler.load()
        check_depth(value)
    except NotData as error:
        raise UnsafeCheckpoint(
            f"{file} asks for {error}, and is refused; {_HOW_TO_ALLOW}", file=file, what=error.what
        ) from error
    except Exception as error:  # broken pickles raise all kinds of errors
        raise corrupt(file, "the pickle of a Metadata", f"{type(error).__name__}: {error!s:.300}") from error
    return value, unpickler.position
