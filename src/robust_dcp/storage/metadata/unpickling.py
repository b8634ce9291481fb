"""Unpickles ``.metadata``: by the interpreter of :mod:`robust_dcp.storage.records.unpickler`, or as that would, by
Python's own unpickler.

``.metadata`` is long and regular, and Python's unpickler, which is written in C, reads it five times faster (measured
with 100,000 tensors). So it goes first. It is given nothing that it could do harm with:

* A walk over the opcodes allows those that picklers write for metadata. It refuses lengths and memo indexes that the
  unpickler would believe, although no pickle of this length can have them.
* The walk also finds the dicts, so that each of them looks at a key before it is hashed.
* It gets no named class or function, but what stands for one: what makes the objects of a dataclass of DCP, without its
  code, or what makes a constant or a path. Nothing can be set on these that outlives the load.

Whatever is not regular is left to the interpreter, which reads it or says what is wrong with it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
from functools import cache, partial
from types import SimpleNamespace
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from robust_dcp.collector import without_garbage_collection
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata.stored_pickle import is_cut_off, pickle_in
from robust_dcp.storage.records.kinds import Budget, NotData, check_depth
from robust_dcp.storage.records.trust import Trust
from robust_dcp.storage.records.unpickler import Unpickler

_HOW_TO_ALLOW: Final = (
    "if the planner that wrote it keeps objects of that class in planner_data and you trust the file, register the "
    "class with torch.serialization.add_safe_globals([...])"
)
_MAX_DIMENSIONS: Final = 64  # the most that torch allows


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


class _Sealed(type):
    """The class of what stands for a dataclass of DCP. ``__new__`` makes an object of that class. Nothing can be set on
    the stand-in, and it cannot be called: that would run ``__init__``."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise _Irregular

    def __call__(cls, *arguments: Any) -> Any:
        raise _Irregular


class _NativeUnpickler(pickle.Unpickler):
    """Python's unpickler, for a regular pickle."""

    def __init__(self, stream: IO[bytes], budget: Budget) -> None:
        # An object without readinto and peek makes the C unpickler read exactly what it needs. So the stream ends right
        # after the pickle, and a damaged pickle does not confuse the unpickler's own buffer.
        bare = SimpleNamespace(read=stream.read, readline=stream.readline)
        super().__init__(cast("IO[bytes]", bare), buffers=(_CheckedDict() for _ in itertools.repeat(None)))
        self._budget = budget
        self._trust = Trust()
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = self._stand_in_for(module, name)
        return self._stand_ins[module, name]

    def _stand_in_for(self, module: str, name: str) -> Any:
        value = self._trust.named(module, name)
        trusted, budget = self._trust.of(value), self._budget
        if trusted.as_native is not None:
            new = staticmethod(partial(object.__new__, trusted.as_native))
            return _Sealed(name, (), {"__slots__": (), "__new__": new})
        if not callable(value):
            return value
        if value is torch.Size:

            def size(sizes: Any) -> torch.Size:
                if type(sizes) is not tuple or len(sizes) > _MAX_DIMENSIONS:
                    raise _Irregular
                return torch.Size(sizes)

            return size
        build = trusted.call
        if build is None or not trusted.makes_constants:
            raise _Irregular

        def call(*arguments: Any) -> Any:
            if any(map(callable, arguments)):
                raise _Irregular
            return build(arguments, budget)

        return call


def natively(data: bytes) -> tuple[Any, int] | None:
    """What a regular pickle holds, and its length in bytes; ``None`` if it is not regular."""
    try:
        pickled = bytearray(data)
        for place in _dicts_in(data):
            # There Python's unpickler takes what we give: a dict that looks at keys.
            pickled[place] = pickle.NEXT_BUFFER[0]
        stream = io.BytesIO(pickled)
        value = _NativeUnpickler(stream, Budget(len(pickled))).load()
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
    try:
        with without_garbage_collection():
            value, nbytes = natively(pickled) or interpreted(pickled, file)
        if nbytes != len(pickled):
            # Neither DCP nor we write anything here. If our trailer is damaged, this is where it shows.
            raise CorruptCheckpoint.of_file(file, "nothing behind the pickle", f"{len(pickled) - nbytes} bytes")
    except CorruptCheckpoint as error:
        if not is_cut_off(len(data), data):
            raise
        found = f"{len(data)} bytes, so the file is cut off ({error.found})"
        raise CorruptCheckpoint.of_file(file, "a whole pickle and its end", found) from error
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
        raise CorruptCheckpoint.of_file(
            file, "the pickle of a Metadata", f"{type(error).__name__}: {error!s:.300}"
        ) from error
    return value, unpickler.position
