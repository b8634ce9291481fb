"""Unpickles ``.metadata`` by Python's own unpickler, restricted to classes that a caller allows.

``.metadata`` is long and regular, so an unpickler in C is worth its restrictions. A walk over the opcodes comes first:
it allows those that picklers write for metadata, and refuses lengths and memo indexes that no pickle of this length can
have, which the unpickler would believe. It also finds the dicts, so that each of them looks at a key before it is
hashed. Classes that a pickle names cannot be changed by it.
"""

from __future__ import annotations

import _compat_pickle
import enum
import importlib
import io
import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import IO, Any, Final, cast

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.metadata.stored_pickle import corrupt, pickle_in, without_garbage_collection
from robust_dcp.storage.records import kinds
from robust_dcp.storage.records.kinds import Budget

ClassName = tuple[str, str]
"""Module and qualified name, as a pickle holds them."""

_HOW_TO_ALLOW: Final = (
    "if the planner that wrote it keeps objects of that class in planner_data and you trust the file, register the "
    "class with torch.serialization.add_safe_globals([...])"
)


def all_of(module: str, names: str) -> frozenset[ClassName]:
    """The names in ``module``. They are given in one string with spaces between them."""
    return frozenset((module, name) for name in names.split())


# Containers and numbers of Python that hold data. `range` is left out, because a few bytes of it make a list of any
# length.
_PLAIN: Final = all_of(
    "builtins", "bool bytearray bytes complex dict float frozenset int list set slice str tuple"
) | all_of("collections", "Counter OrderedDict defaultdict deque")

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


def _dicts_in(pickled: bytes, file: str) -> list[int]:
    """Where a pickle makes dicts: the places of its EMPTY_DICT opcodes.

    Raises:
        CorruptCheckpoint: something would make Python's unpickler take more memory or time than a pickle of this length
            can need.
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
        elif code is None:
            raise _no_pickle(file, f"one of {nbytes} bytes that ends early, or announces more bytes than there are")
        elif at == begin:  # else the run was as long as one may be
            raise _no_pickle(file, f"opcode {code:#x} at byte {at} of {nbytes}, which no writer of metadata puts there")


def _no_pickle(file: str, found: str) -> Exception:
    return corrupt(file, "the pickle of a Metadata", found)


class _CheckedDict(dict[Any, Any]):
    """A dict that looks at each key before it is hashed.

    Python's unpickler would hash a tuple of tuples that all share their parts, and never come to an end.
    """

    __slots__ = ("_budget",)

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            for part in _parts(key):
                if type(part) is not str:
                    self._budget.check_key(part, len(self))
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


def _parts(key: Any) -> Iterable[Any]:
    """What the hash of a key may be made of: the attributes of an object, or else the key itself."""
    kind: Any = type(key)
    slots = _slots_of(kind)
    held = getattr(key, "__dict__", None)
    if not slots and not isinstance(held, dict):
        return (key,)
    return [*(held or {}).values(), *(getattr(key, name, None) for name in slots)]


@lru_cache(maxsize=64)
def _slots_of(kind: type) -> tuple[str, ...]:
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))


def _plain_dicts(value: Any, depth: int = 4) -> Any:
    """``value`` with ordinary dicts in place of those that have checked their keys."""
    if not isinstance(value, _CheckedDict):
        return value
    return {key: _plain_dicts(each, depth - 1) if depth else each for key, each in value.items()}


class _Bounded:
    """Stands for a plain class. It builds its objects as ``records`` does: from exact types and within the budget."""

    def __init__(self, kind: Any, budget: Budget) -> None:
        self.kind = kind
        self._budget = budget

    def __call__(self, *arguments: Any) -> Any:
        given = tuple(argument.kind if isinstance(argument, _Bounded) else argument for argument in arguments)
        found = kinds.BUILT_BY_CALL[self.kind](tuple(map(_plain_dicts, given)), self._budget)
        if not isinstance(found, dict):
            return found
        checked = _CheckedDict(self._budget)  # more items may follow
        checked.update(found)
        return checked


class _Unpickler(pickle.Unpickler):
    """Unpickles what names only classes that are allowed; ``unpickled`` has the arguments."""

    def __init__(
        self,
        stream: IO[bytes],
        file: str,
        budget: Budget,
        allowed: frozenset[ClassName],
        stand_ins: Mapping[ClassName, Any],
        registered: Mapping[str, Any],
        other: Callable[[str, str], Any],
    ) -> None:
        # An object without readinto and peek makes the C unpickler read exactly what it needs. So the stream ends right
        # after the pickle, and a damaged pickle does not confuse the unpickler's own buffer.
        bare = SimpleNamespace(read=stream.read, readline=stream.readline)
        dicts = (_CheckedDict(budget) for _ in itertools.repeat(None))
        super().__init__(cast("IO[bytes]", bare), buffers=dicts)
        self._file = file
        self._budget = budget
        self._allowed = allowed
        self._stand_ins = stand_ins
        self._registered = registered
        self._other = other
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _compat_pickle.NAME_MAPPING:  # pickles of protocol 2 use Python 2's names
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        key, path = (module, name), f"{module}.{name}"
        if key in _PLAIN:
            return _Bounded(_imported(module, name), self._budget)
        found: Any = self._stand_ins.get(key)
        if found is None and key in self._allowed:
            found = _imported(module, name)
        if found is None and path in self._registered:
            found = self._registered[path]
        elif found is None:
            found = self._other(module, name)
            if found is None:
                raise UnsafeCheckpoint(
                    f"{self._file} asks for {path}, which is not known to be plain data, and is refused; "
                    f"{_HOW_TO_ALLOW}",
                    file=self._file,
                    what=path,
                )
        if path not in self._registered:
            self._watch(found)
        if isinstance(found, enum.EnumMeta):  # its own code would hash and print the value
            return partial(lambda kind, *arguments: kinds.member_of(kind, arguments), found)
        return found

    def _watch(self, found: Any) -> None:
        """Remember the attributes of an object that a pickle could write to."""
        members: list[Any] = list(found) if isinstance(found, enum.EnumMeta) else []
        if isinstance(found, FunctionType) or (isinstance(found, type) and found.__flags__ & _HEAP_TYPE):
            for each in (found, *members):
                self._before.setdefault(id(each), (each, dict(vars(each))))

    def put_back(self) -> None:
        """Give the named classes their attributes back.

        Raises:
            UnsafeCheckpoint: some had been changed.
        """
        names = sorted(name for found, before in self._before.values() for name in _restored(found, before))
        if names:
            raise UnsafeCheckpoint(
                f"{self._file} sets attributes of the classes that it names ({', '.join(names)}), which no writer of "
                "checkpoints does; it was made to change this program, and is refused",
                file=self._file,
                what=names[0],
            )


def unpickled(
    data: bytes,
    file: str,
    *,
    allowed: frozenset[ClassName],
    stand_ins: Mapping[ClassName, Any],
    registered: Mapping[str, Any],
    other: Callable[[str, str], Any],
) -> Any:
    """Unpickle a ``.metadata``.

    Args:
        data: the whole file.
        file: its path, for errors.
        allowed: names of classes and functions that may be imported and called, besides Python's plain ones.
        stand_ins: what to use in place of a named class. Such a class is not imported.
        registered: classes and functions that the user trusts, by their full names.
        other: what any other name stands for; ``None`` if it is refused.

    Raises:
        CorruptCheckpoint: the checksum does not match, or this is not a pickle, or something follows it.
        UnsafeCheckpoint: the pickle names classes that do not belong into metadata, or changes them. With the BUILD
            opcode it could replace a method for the rest of the process.
    """
    pickled = bytearray(pickle_in(data, file))
    for place in _dicts_in(bytes(pickled), file):
        pickled[place] = pickle.NEXT_BUFFER[0]  # there Python's unpickler takes what we give: a dict that looks at keys
    stream = io.BytesIO(pickled)
    unpickler = _Unpickler(stream, file, Budget(len(pickled)), allowed, stand_ins, registered, other)
    try:
        with without_garbage_collection():
            try:
                found = unpickler.load()
            finally:
                unpickler.put_back()
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # broken pickles raise all kinds of errors
        raise _no_pickle(file, f"{type(error).__name__}: {error!s:.300}") from error
    if stream.tell() != len(pickled):
        # Neither DCP nor we write anything here. If our trailer is damaged, this is where it shows.
        raise corrupt(file, "nothing behind the pickle", f"{len(pickled) - stream.tell()} bytes")
    kind: Any = type(found)
    for name in (*getattr(found, "__dict__", ()), *_slots_of(kind)):
        if isinstance(value := getattr(found, name, None), _CheckedDict):
            setattr(found, name, _plain_dicts(value))
    return found


# Python adds these to a class when a thread first pickles an object of it or asks for its annotations.
_INTERPRETER_CACHES: Final = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__"})
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of such a class can be set
_ABSENT: Final = object()


def _restored(found: Any, before: Mapping[str, Any]) -> list[str]:
    """Give ``found`` its old attributes back. Returns the names of those that had been changed."""
    now = dict(vars(found))
    changed = {
        name
        for name in before.keys() | now.keys()
        if before.get(name, _ABSENT) is not now.get(name, _ABSENT) and name not in _INTERPRETER_CACHES
    }
    # Use the methods of type or object: a metaclass, such as that of enums, may forbid setting these attributes.
    level: Any = type if isinstance(found, type) else object
    for name in changed:
        if name in before:
            level.__setattr__(found, name, before[name])
        else:
            level.__delattr__(found, name)
    label = getattr(found, "__qualname__", None) or str(found)
    return [f"{label}.{name}" for name in changed]


def _imported(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
