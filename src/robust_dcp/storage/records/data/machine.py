"""The unpickler for objects in checkpoints. It runs the opcodes of a pickle on values that are data and nothing else.

This module owns the stack and the memo, and decides which value may be put into which. ``literals`` reads numbers and
text. ``names`` knows what a name in the pickle stands for, and how it is built. ``archives`` calls this module.

The readers and planners of DCP load the same pickle with Python's own unpickler. So an opcode does the same here as
there, or raises. No pickle has one meaning here and another one there.
"""

from __future__ import annotations

import _compat_pickle
import collections
import pickle
from collections.abc import Callable
from typing import Any, Final, Protocol

from robust_dcp.storage.records.data.limits import Budget, Malformed, NotData, check_key, text_of
from robust_dcp.storage.records.data.literals import LITERALS, UINT32, UINT64, Cursor, int_of
from robust_dcp.storage.records.data.pending import Pending

__all__ = ["Machine", "Naming", "PersistentLoad"]

PersistentLoad = Callable[[Any], Any]


class Naming(Protocol):
    """What the names in a pickle stand for: :class:`~robust_dcp.storage.records.data.names.Names`."""

    def find(self, module: str, name: str) -> Any: ...
    def is_registered(self, kind: Any) -> bool: ...
    def called(self, function: Any, arguments: tuple[Any, ...], budget: Budget) -> Any: ...
    def new(self, kind: type, arguments: tuple[Any, ...], budget: Budget) -> Any: ...
    def with_state(self, target: Any, state: Any, budget: Budget) -> Any: ...


_SET_UNITS: Final = 80
"""What a set counts for. It takes one byte of a pickle, and the memory of 29 elements even if it is empty."""

_DICTS: Final = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


class Machine:
    """Runs one pickle.

    Args:
        data: holds the pickle. More may follow it.
        start: where the pickle begins.
        names: what names stand for.
        persistent_load: returns the storage for a persistent id.
        encoding: the encoding of strings that Python 2 pickled.
    """

    def __init__(
        self,
        data: bytes,
        start: int,
        names: Naming,
        persistent_load: PersistentLoad | None = None,
        encoding: str = "utf-8",
    ) -> None:
        self._cursor = Cursor(data, start, encoding)
        self._names = names
        self._persistent_load = persistent_load
        self._budget = Budget(len(data) - start)
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._protocol = 0
        self._n_pending = 0

    def make_checks(self) -> None:
        """Check what can be checked only now that all storages are filled. Comes after :meth:`run`.

        Raises:
            RuntimeError: the indices of a sparse tensor do not fit it.
        """
        self._budget.make_checks()

    def run(self) -> Any:
        """The value that the pickle holds.

        Raises:
            NotData: it needs something that is not known to be data.
            Malformed, and nearly anything else: no writer makes such a pickle.
        """
        cursor = self._cursor
        data, nbytes = cursor.data, cursor.nbytes
        while True:
            if cursor.at >= nbytes:
                raise Malformed("the pickle ends before its last opcode")
            code = data[cursor.at]
            cursor.at += 1
            read = LITERALS.get(code)
            if read is not None:
                self._stack.append(read(cursor))
            elif code == _STOP:
                break
            else:
                self._run_opcode(code)
        if self._marked or len(self._stack) != 1 or self._n_pending:
            raise Malformed("the pickle ends with values that were never completed")
        return self._stack[0]

    @property
    def at(self) -> int:
        """Where the pickle ended, once :meth:`run` has returned."""
        return self._cursor.at

    def _run_opcode(self, code: int) -> None:
        run = _DISPATCH.get(code)
        if run is None:
            raise Malformed(f"byte {self._cursor.at - 1} is not an opcode of a pickle that holds data")
        run(self)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        if not self._marked:
            raise Malformed("an opcode needs a mark where there is none")
        self._stack = self._marked.pop()
        return items

    # Containers.

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        self._tuple_of(2)

    def _tuple3(self) -> None:
        self._tuple_of(3)

    def _tuple_of(self, n: int) -> None:
        if len(self._stack) < n:
            raise Malformed("a tuple needs more values than there are")
        self._stack[-n:] = [tuple(self._stack[-n:])]

    def _list(self) -> None:
        items = self._pop_mark()
        self._push(items)

    def _dict(self) -> None:
        items = self._pop_mark()
        self._push({})
        self._set(items)

    def _frozen_set(self) -> None:
        items = self._pop_mark()
        for item in items:
            check_key(item, self._budget, len(items))
        self._push(frozenset(items))

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        kind = type(target)
        if kind in (list, collections.deque) or self._names.is_registered(kind):
            target.extend(items)
        else:
            raise NotData(_name(kind), "to which a pickle of data appends nothing")

    def _empty_set(self) -> None:
        self._budget.spend(_SET_UNITS)
        self._push(set())

    def _add_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise Malformed(f"it adds to a {type(target).__name__} as if that were a set")
        for item in items:
            check_key(item, self._budget, len(target))
            target.add(item)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        kind = type(target)
        if kind not in _DICTS and not self._names.is_registered(kind):
            raise NotData(_name(kind), "into which a pickle of data puts no items")
        if len(items) % 2:
            raise Malformed("a dict gets a key without a value")
        values = iter(items)
        for key in values:
            check_key(key, self._budget, len(target))
            value = next(values)
            if kind is collections.defaultdict and type(value) is kind:
                self._budget.nest()
            target[key] = value

    # The memo, which remembers values by number.

    def _remember(self, place: int) -> None:
        if not 0 <= place <= self._cursor.nbytes:
            raise Malformed(f"it remembers a value as number {place}, in a pickle of {self._cursor.nbytes} bytes")
        value = self._stack[-1]
        self._memo[place] = value
        if type(value) is Pending:
            value.places.append(place)

    def _recall(self, place: int) -> None:
        value = self._memo[place]
        if type(value) is Pending:
            raise Malformed("a value is part of itself before it is complete")
        self._stack.append(value)

    def _put1(self) -> None:
        self._remember(self._cursor.take(1)[0])

    def _put4(self) -> None:
        self._remember(self._cursor.number(UINT32))

    def _put_text(self) -> None:
        self._remember(int_of(self._cursor.line()))

    def _memoize(self) -> None:
        self._remember(len(self._memo))

    def _get1(self) -> None:
        self._recall(self._cursor.take(1)[0])

    def _get4(self) -> None:
        self._recall(self._cursor.number(UINT32))

    def _get_text(self) -> None:
        self._recall(int_of(self._cursor.line()))

    def _pop(self) -> None:
        # If there is nothing after the last mark, Python's unpickler drops the mark.
        if self._stack:
            self._drop(self._stack.pop())
        else:
            self._pop_mark()

    def _pop_to_mark(self) -> None:
        for value in self._pop_mark():
            self._drop(value)

    def _drop(self, value: Any) -> None:
        if type(value) is Pending:
            raise Malformed("a value is dropped before it is complete")

    # Names, and the values that are built by them.

    def _proto(self) -> None:
        self._protocol = self._cursor.take(1)[0]
        if self._protocol > pickle.HIGHEST_PROTOCOL:
            raise Malformed(f"protocol {self._protocol} of pickles is not known")

    def _frame(self) -> None:
        nbytes = self._cursor.number(UINT64)
        if nbytes > self._cursor.nbytes - self._cursor.at:
            raise Malformed(f"a frame of {nbytes} bytes begins where {self._cursor.nbytes - self._cursor.at} are left")

    def _global(self) -> None:
        module, name = self._cursor.line().decode(), self._cursor.line().decode()
        if self._protocol < 3:  # translate Python 2's names, as Python itself does
            if (module, name) in _compat_pickle.NAME_MAPPING:
                module, name = _compat_pickle.NAME_MAPPING[module, name]
            else:
                module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        self._push(self._names.find(module, name))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Malformed("a name in the pickle is not a text")
        self._push(self._names.find(module, name))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise Malformed("the arguments of a call are not a tuple")
        self._push(self._begun(self._names.called(function, arguments, self._budget)))

    def _new_object(self) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple or not isinstance(kind, type):
            raise Malformed("the pickle makes an object without a class, or its arguments are not a tuple")
        self._push(self._begun(self._names.new(kind, arguments, self._budget)))

    def _begun(self, value: Any) -> Any:
        self._n_pending += type(value) is Pending
        return value

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Pending:
            self._stack[-1] = self._names.with_state(target, state, self._budget)
            return
        self._n_pending -= 1
        value = self._stack[-1] = target.complete(state, self._budget)
        for place in target.places:
            if self._memo.get(place) is target:
                self._memo[place] = value

    def _persistent(self) -> None:
        if self._persistent_load is None:
            raise Malformed("it names a storage, but there are no storages")
        self._push(self._persistent_load(self._stack.pop()))

    def _refuse(self) -> None:
        opcode = self._cursor.data[self._cursor.at - 1]
        raise NotData(f"opcode {text_of(bytes([opcode]))}", "which no writer of checkpoints uses")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_STOP: Final = pickle.STOP[0]

_DISPATCH: Final[dict[int, Callable[[Machine], None]]] = {
    code[0]: run
    for code, run in (
        (pickle.MARK, Machine._mark),
        (pickle.TUPLE, Machine._tuple),
        (pickle.TUPLE1, Machine._tuple1),
        (pickle.TUPLE2, Machine._tuple2),
        (pickle.TUPLE3, Machine._tuple3),
        (pickle.LIST, Machine._list),
        (pickle.DICT, Machine._dict),
        (pickle.FROZENSET, Machine._frozen_set),
        (pickle.APPEND, Machine._append),
        (pickle.APPENDS, Machine._appends),
        (pickle.EMPTY_SET, Machine._empty_set),
        (pickle.ADDITEMS, Machine._add_items),
        (pickle.SETITEM, Machine._set_item),
        (pickle.SETITEMS, Machine._set_items),
        (pickle.PUT, Machine._put_text),
        (pickle.BINPUT, Machine._put1),
        (pickle.LONG_BINPUT, Machine._put4),
        (pickle.MEMOIZE, Machine._memoize),
        (pickle.GET, Machine._get_text),
        (pickle.BINGET, Machine._get1),
        (pickle.LONG_BINGET, Machine._get4),
        (pickle.POP, Machine._pop),
        (pickle.POP_MARK, Machine._pop_to_mark),
        (pickle.PROTO, Machine._proto),
        (pickle.FRAME, Machine._frame),
        (pickle.GLOBAL, Machine._global),
        (pickle.STACK_GLOBAL, Machine._stack_global),
        (pickle.REDUCE, Machine._reduce),
        (pickle.NEWOBJ, Machine._new_object),
        (pickle.BUILD, Machine._build),
        (pickle.BINPERSID, Machine._persistent),
        (pickle.INST, Machine._refuse),
        (pickle.OBJ, Machine._refuse),
        (pickle.NEWOBJ_EX, Machine._refuse),
        (pickle.EXT1, Machine._refuse),
        (pickle.EXT2, Machine._refuse),
        (pickle.EXT4, Machine._refuse),
    )
}
"""The opcodes of pickles, without those that no pickler of Python 3 writes. The opcodes that are refused name code."""
