"""The unpickler for objects in checkpoints. It runs the opcodes of a pickle on values that are data and nothing else.

This module owns the stack and the memo, and decides which value may be put into which. What a name in the pickle stands
for, and what may be done with it, ``trust`` decides.

The readers and planners of DCP load the same pickle with Python's own unpickler. So an opcode does the same here as
there, or raises. No pickle has one meaning here and another one there. Opcodes that only Python 2 or protocols 0 and 1
write are refused: ``torch.save`` has never written them in a checkpoint of DCP.
"""

from __future__ import annotations

import _compat_pickle
import collections
import pickle
import pickletools
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from robust_dcp.storage.records import torch_kinds
from robust_dcp.storage.records.kinds import (
    NO_DATA,
    Budget,
    Malformed,
    NotAPickle,
    NotData,
    Pending,
    expect,
    name_of,
)
from robust_dcp.storage.records.trust import Trust

_REBUILD_FROM_TYPE: Final[Any] = torch._tensor._rebuild_from_type_v2


def _first_attribute(state: Any) -> str:
    """The name of an attribute that ``state`` sets, with a dot before it, for a message."""
    for part in state if type(state) is tuple else (state,):
        if type(part) is dict and part:
            return f".{next(iter(part))!s:.60}"
    return ""


# --- opcodes

_SET_UNITS: Final = 80
"""What a set counts for. It takes one byte of a pickle, and the memory of 29 elements even if it is empty."""

_DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_UINT8: Final = struct.Struct("<B")
_UINT16: Final = struct.Struct("<H")
_INT32: Final = struct.Struct("<i")
_UINT32: Final = struct.Struct("<I")
_UINT64: Final = struct.Struct("<Q")
_FLOAT64: Final = struct.Struct(">d")


class Unpickler:
    """Runs one pickle.

    Args:
        data: begins with the pickle. More may follow it.
        persistent_load: returns the storage for a persistent id.

    Attributes:
        position: how many of the bytes have been read.
    """

    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any] | None = None) -> None:
        self._data = data
        self.position = 0
        self._budget = Budget(len(data))
        self._trust = Trust()
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._protocol = 0
        self._n_pending = 0

    def load(self) -> Any:
        """The value that the pickle holds.

        Raises:
            NotData: it needs something that is not known to be data.
            NotAPickle: these bytes are no pickle, or end within one.
            Malformed, and nearly anything else: no writer makes such a pickle.
        """
        data, nbytes = self._data, len(self._data)
        while self.position < nbytes:
            code = data[self.position]
            self.position += 1
            value_of = _VALUES.get(code)
            if value_of is not None:
                self._stack.append(value_of(self))
            elif code in _STEPS:
                _STEPS[code](self)
            elif code == pickle.STOP[0]:
                expect(
                    not self._marked and len(self._stack) == 1 and not self._n_pending,
                    "the pickle ends with values that were never completed",
                )
                return self._stack[0]
            else:
                self._refuse(code)
        raise NotAPickle("the pickle ends before its last opcode")

    def _refuse(self, code: int) -> None:
        """Raise :class:`NotAPickle` if Python's unpickler would stop here, too."""
        opcode = _OPCODES.get(code)
        if opcode is not None:
            needs_mark = pickletools.markobject in opcode.stack_before
            has_values = bool(self._marked) if needs_mark else len(self._stack) >= len(opcode.stack_before)
            is_text = opcode.arg is not None and opcode.arg.n == pickletools.UP_TO_NEWLINE
            has_text = self._data.find(b"\n", self.position) >= 0 if is_text else True
            is_quoted = opcode.name != "STRING" or self._data[self.position : self.position + 1] in (b"'", b'"')
            if has_values and has_text and is_quoted:
                raise NotData(f"opcode {opcode.name}", "which no writer of checkpoints uses")
        raise NotAPickle(f"byte {self.position - 1} is not an opcode of a pickle that holds data")

    # The bytes of the pickle. Before anything is taken, every length is compared with the bytes that are left.

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        end = self.position + nbytes
        if nbytes < 0 or end > len(self._data):
            raise NotAPickle(f"an opcode asks for {nbytes} bytes where {len(self._data) - self.position} are left")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, form: struct.Struct) -> Any:
        """The next number, in this format."""
        at, end = self.position, self.position + form.size
        if end > len(self._data):
            raise NotAPickle("the pickle ends within an opcode")
        self.position = end
        return form.unpack_from(self._data, at)[0]

    def counted(self, form: struct.Struct) -> bytes:
        """The next bytes, whose number comes first, in this format."""
        return self.take(self.number(form))

    def text(self, form: struct.Struct) -> str:
        """The next text, whose number of bytes comes first."""
        return str(self.counted(form), "utf-8", "surrogatepass")

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise NotAPickle("a line of text in the pickle has no end")
        line = self._data[self.position : end]
        self.position = end + 1
        return line.decode()

    def _proto(self) -> None:
        self._protocol = self.number(_UINT8)
        expect(self._protocol <= pickle.HIGHEST_PROTOCOL, f"protocol {self._protocol} of pickles is not known")

    def _frame(self) -> None:
        nbytes, left = self.number(_UINT64), len(self._data) - self.position
        expect(nbytes <= left, f"a frame of {nbytes} bytes begins where {left} are left")

    # The stack, and its containers.

    def _last(self, n: int) -> list[Any]:
        if len(self._stack) < n:
            raise NotAPickle("an opcode needs more values than there are")
        return self._stack[-n:]

    def _pop(self, n: int) -> list[Any]:
        items = self._last(n)
        del self._stack[-n:]
        return items

    def _push_mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        if not self._marked:
            raise NotAPickle("an opcode needs a mark where there is none")
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _tuple_to_mark(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple_of(self, n: int) -> None:
        self._stack[-n:] = [tuple(self._last(n))]

    def _empty_set(self) -> None:
        self._budget.spend(_SET_UNITS)
        self._stack.append(set())

    def _frozen_set(self) -> None:
        items = self._pop_mark()
        for item in items:
            self._budget.check_key(item, len(items))
        self._stack.append(frozenset(items))

    def _add_items(self) -> None:
        items = self._pop_mark()
        (target,) = self._last(1)
        expect(type(target) is set, f"it adds to a {type(target).__name__} as if that were a set")
        for item in items:
            self._budget.check_key(item, len(target))
            target.add(item)

    def _append(self, items: list[Any]) -> None:
        (target,) = self._last(1)
        kind = type(target)
        if kind is not list:
            if kind is not collections.deque and not self._trust.of(kind).is_registered:
                raise NotData(name_of(kind), "to which a pickle of data appends nothing")
            self._budget.hold(items)
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        (target,) = self._last(1)
        kind = type(target)
        if kind not in _DICTS and not self._trust.of(kind).is_registered:
            raise NotData(name_of(kind), "into which a pickle of data puts no items")
        expect(len(items) % 2 == 0, "a dict gets a key without a value")
        if kind is collections.defaultdict:
            self._budget.hold(items)
        values = iter(items)
        for key in values:
            self._budget.check_key(key, len(target))
            target[key] = next(values)

    def _drop(self, values: list[Any]) -> None:
        for value in values:
            expect(type(value) is not Pending, "a value is dropped before it is complete")

    # The memo, which remembers values by number.

    def _remember(self, place: int) -> None:
        if place > len(self._data):
            raise Malformed(f"it remembers a value as number {place}, in {len(self._data)} bytes")
        if not self._stack:
            raise NotAPickle("an opcode needs more values than there are")
        value = self._memo[place] = self._stack[-1]
        if type(value) is Pending:
            value.places.append(place)

    def _recall(self, place: int) -> Any:
        if place not in self._memo:
            raise NotAPickle(f"it names a value {place} that it has not remembered")
        value = self._memo[place]
        expect(type(value) is not Pending, "a value is part of itself before it is complete")
        return value

    # Names, and the values that are built by them.

    def _global(self) -> Any:
        module, name = self._line(), self._line()
        if self._protocol < 3:  # translate Python 2's names, as Python itself does
            if (module, name) in _compat_pickle.NAME_MAPPING:
                module, name = _compat_pickle.NAME_MAPPING[module, name]
            else:
                module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        return self._trust.named(module, name)

    def _stack_global(self) -> Any:
        module, name = self._pop(2)
        expect(type(name) is str and type(module) is str, "a name in the pickle is not a text")
        return self._trust.named(module, name)

    def _called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The result of ``function(*arguments)``.

        Raises:
            NotData: the function does not make data.
            Malformed: the function makes data, but not from such arguments.
        """
        trusted = self._trust.of(function)
        if trusted.call is not None:
            return trusted.call(arguments, self._budget)
        if function is _REBUILD_FROM_TYPE:
            return self._tensor_of_type(arguments)
        raise NotData(name_of(function), NO_DATA)

    def _tensor_of_type(self, arguments: tuple[Any, ...]) -> Any:
        valid = len(arguments) == 4 and type(arguments[2]) is tuple
        expect(valid, "the pickle makes a tensor with attributes from other arguments than torch.save writes")
        function, kind, of, state = arguments
        tensor = self._called(function, of)
        if self._trust.of(kind).is_registered:
            return _REBUILD_FROM_TYPE(lambda: tensor, kind, (), state)
        return torch_kinds.rebuilt_with_attributes(tensor, kind, state)

    def _new(self, kind: type, arguments: tuple[Any, ...]) -> Any:
        """An object of ``kind`` without its state. Raises the same as :meth:`_called`."""
        new = self._trust.of(kind).new
        if new is None:
            raise NotData(name_of(kind), NO_DATA)
        return new(arguments, self._budget)

    def _set_state(self, target: Any, state: Any) -> None:
        """Give ``target`` the state that its pickle gives. Raises the same as :meth:`_called`."""
        fill = self._trust.of(type(target)).fill
        if fill is not None:
            fill(target, state)
        elif callable(target):
            raise NotData(f"{name_of(target)}{_first_attribute(state)}", "an attribute of a class or function itself")
        else:
            raise NotData(name_of(type(target)), "whose state is set by code of its own")

    def _reduce(self) -> Any:
        function, arguments = self._pop(2)
        expect(type(arguments) is tuple, "the arguments of a call are not a tuple")
        return self._begun(self._called(function, arguments))

    def _new_object(self) -> Any:
        kind, arguments = self._pop(2)
        valid = type(arguments) is tuple and isinstance(kind, type)
        expect(valid, "the pickle makes an object without a class, or its arguments are not a tuple")
        return self._begun(self._new(kind, arguments))

    def _begun(self, value: Any) -> Any:
        self._n_pending += type(value) is Pending
        return value

    def _build(self) -> None:
        target, state = self._last(2)
        self._stack.pop()
        if type(target) is not Pending:
            self._set_state(target, state)
            return
        self._n_pending -= 1
        value = self._stack[-1] = target.complete(state, self._budget)
        for place in target.places:
            if self._memo.get(place) is target:
                self._memo[place] = value

    def _persistent(self) -> Any:
        if self._persistent_load is None:
            raise Malformed("it names a storage, but there are no storages")
        return self._persistent_load(*self._pop(1))


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_OPCODES: Final = {opcode.code.encode("latin-1")[0]: opcode for opcode in pickletools.opcodes}

_OF_VALUES: Final[dict[bytes, Callable[[Unpickler], Any]]] = {
    pickle.NONE: lambda _: None,
    pickle.NEWTRUE: lambda _: True,
    pickle.NEWFALSE: lambda _: False,
    pickle.EMPTY_TUPLE: lambda _: (),
    pickle.EMPTY_LIST: lambda _: [],
    pickle.EMPTY_DICT: lambda _: {},
    pickle.BININT1: lambda of: of.number(_UINT8),
    pickle.BININT2: lambda of: of.number(_UINT16),
    pickle.BININT: lambda of: of.number(_INT32),
    pickle.LONG1: lambda of: _long(of.counted(_UINT8)),
    pickle.LONG4: lambda of: _long(of.counted(_INT32)),
    pickle.BINFLOAT: lambda of: of.number(_FLOAT64),
    pickle.SHORT_BINUNICODE: lambda of: of.text(_UINT8),
    pickle.BINUNICODE: lambda of: of.text(_UINT32),
    pickle.BINUNICODE8: lambda of: of.text(_UINT64),
    pickle.SHORT_BINBYTES: lambda of: of.counted(_UINT8),
    pickle.BINBYTES: lambda of: of.counted(_UINT32),
    pickle.BINBYTES8: lambda of: of.counted(_UINT64),
    pickle.BYTEARRAY8: lambda of: bytearray(of.counted(_UINT64)),
    pickle.BINGET: lambda of: of._recall(of.number(_UINT8)),
    pickle.LONG_BINGET: lambda of: of._recall(of.number(_UINT32)),
    pickle.GLOBAL: Unpickler._global,
}
_VALUES: Final = {code[0]: value_of for code, value_of in _OF_VALUES.items()}
"""The opcodes that push a value and take none."""


def _pushes(value_of: Callable[[Unpickler], Any]) -> Callable[[Unpickler], None]:
    return lambda of: of._stack.append(value_of(of))


_OF_STEPS: Final[dict[bytes, Callable[[Unpickler], None]]] = {
    pickle.PROTO: Unpickler._proto,
    pickle.FRAME: Unpickler._frame,
    pickle.BINPUT: lambda of: of._remember(of.number(_UINT8)),
    pickle.LONG_BINPUT: lambda of: of._remember(of.number(_UINT32)),
    pickle.MEMOIZE: lambda of: of._remember(len(of._memo)),
    pickle.MARK: Unpickler._push_mark,
    pickle.TUPLE: Unpickler._tuple_to_mark,
    pickle.TUPLE1: partial(Unpickler._tuple_of, n=1),
    pickle.TUPLE2: partial(Unpickler._tuple_of, n=2),
    pickle.TUPLE3: partial(Unpickler._tuple_of, n=3),
    pickle.APPEND: lambda of: of._append(of._pop(1)),
    pickle.APPENDS: lambda of: of._append(of._pop_mark()),
    pickle.SETITEM: lambda of: of._set(of._pop(2)),
    pickle.SETITEMS: lambda of: of._set(of._pop_mark()),
    pickle.EMPTY_SET: Unpickler._empty_set,
    pickle.FROZENSET: Unpickler._frozen_set,
    pickle.ADDITEMS: Unpickler._add_items,
    # If there is nothing after the last mark, Python's unpickler drops the mark.
    pickle.POP: lambda of: of._drop([of._stack.pop()] if of._stack else of._pop_mark()),
    pickle.POP_MARK: lambda of: of._drop(of._pop_mark()),
    pickle.STACK_GLOBAL: _pushes(Unpickler._stack_global),
    pickle.REDUCE: _pushes(Unpickler._reduce),
    pickle.NEWOBJ: _pushes(Unpickler._new_object),
    pickle.BUILD: Unpickler._build,
    pickle.BINPERSID: _pushes(Unpickler._persistent),
}
_STEPS: Final = {code[0]: step for code, step in _OF_STEPS.items()}
"""The other opcodes that picklers of Python 3 write from protocol 2 on."""
