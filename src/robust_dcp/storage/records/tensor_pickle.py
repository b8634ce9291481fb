"""Reads the pickle of one plain tensor, ``data.pkl`` of a ``torch.save`` record, without building anything it names."""

from __future__ import annotations

import pickletools
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch

from robust_dcp.storage.records.torch_zip import sample_pickle

__all__ = ["PickledTensor", "read_tensor_pickle"]


class PickledTensor(NamedTuple):
    """A tensor as its pickle describes it. ``storage_offset`` and ``stride`` are in elements."""

    dtype: torch.dtype
    storage_nbytes: int
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class _NotPlain(ValueError):
    pass


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: _Global
    size: int


_MARK: Final = object()
_ORDERED_DICT: Final = object()


@lru_cache(maxsize=1024)  # tensors of one dtype and shape have the same pickle
def read_tensor_pickle(data: bytes) -> PickledTensor:
    """Run the dozen opcodes of a pickled tensor on a stack of plain values.

    Raises:
        ValueError, IndexError, KeyError: this is not the pickle of one plain tensor.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"):
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Global(*argument.split(" ")))
        elif name in ("NEWTRUE", "NEWFALSE"):
            stack.append(name == "NEWTRUE")
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE":
            start = len(stack) - 1 - stack[::-1].index(_MARK)
            stack[start:] = [tuple(stack[start + 1 :])]
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            start = len(stack) - int(name[-1])
            stack[start:] = [tuple(stack[start:])]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_reduced(stack.pop(), arguments))
        elif name == "STOP":
            break
        elif name != "PROTO":
            raise _NotPlain
    (result,) = stack
    if not isinstance(result, PickledTensor):
        raise _NotPlain
    return result


def _storage(persistent_id: Any) -> _Storage:
    # ("storage", storage class, key, location, size); the location does not matter: we read into CPU memory.
    if not (isinstance(persistent_id, tuple) and len(persistent_id) == 5):
        raise _NotPlain
    tag, kind, key, _, size = persistent_id
    if tag != "storage" or key != "0" or not isinstance(kind, _Global) or not _is_size(size):
        raise _NotPlain
    return _Storage(kind, size)


def _reduced(function: Any, arguments: Any) -> Any:
    if function == _Global("collections", "OrderedDict") and arguments == ():
        return _ORDERED_DICT  # the backward hooks, which are always empty
    if function == _Global("torch._utils", "_rebuild_tensor_v2"):
        return _tensor(arguments, None)
    if function == _Global("torch._utils", "_rebuild_tensor_v3"):
        *arguments, dtype = arguments
        return _tensor(arguments, dtype)
    raise _NotPlain


def _tensor(arguments: Any, dtype_name: Any) -> PickledTensor:
    storage, storage_offset, shape, stride, requires_grad, hooks = arguments
    valid = (
        isinstance(storage, _Storage)
        and _is_size(storage_offset)
        and all(isinstance(values, tuple) and all(map(_is_size, values)) for values in (shape, stride))
        and len(shape) == len(stride)
        and isinstance(requires_grad, bool)
        and hooks is _ORDERED_DICT
    )
    if not valid:
        raise _NotPlain
    if dtype_name is None:
        dtype = _dtypes_of_storages()[storage.kind]
        unit_nbytes = dtype.itemsize
    else:
        dtype = _dtype_named(dtype_name)
        unit_nbytes = 1  # _rebuild_tensor_v3 takes an untyped storage, which counts its size in bytes
        if storage.kind != _Global("torch.storage", "UntypedStorage"):
            raise _NotPlain
    storage_nbytes = storage.size * unit_nbytes
    elements = 0
    if 0 not in shape:
        elements = 1 + storage_offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if elements * dtype.itemsize > storage_nbytes:
        raise _NotPlain
    return PickledTensor(dtype, storage_nbytes, storage_offset, shape, stride, requires_grad)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _dtype_named(name: Any) -> torch.dtype:
    if not (isinstance(name, _Global) and name.module == "torch"):
        raise _NotPlain
    dtype = getattr(torch, name.name, None)
    if not isinstance(dtype, torch.dtype):
        raise _NotPlain
    return dtype


@cache
def _dtypes_of_storages() -> dict[_Global, torch.dtype]:
    """The dtype of each typed storage class, learnt from how this torch pickles each dtype."""
    found: dict[_Global, torch.dtype] = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        data = sample_pickle(dtype)
        if data is None:
            continue
        names = [str(argument) for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"]
        storage = next((_Global(*name.split(" ")) for name in names if name.endswith("Storage")), None)
        if storage is not None and storage.name != "UntypedStorage":
            found[storage] = dtype
    return found
