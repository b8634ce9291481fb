"""Rebuilds tensors and torch's constants, with torch's own functions, after a check that sizes fit the storages.

This module decides which of these functions a pickle may call, and with which arguments. A subclass of the program,
such as a quantized tensor, is rebuilt from its attributes: its inner tensors, and values that are data. None of its
code runs for that.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from types import GetSetDescriptorType
from typing import Any, Final

import torch
from torch import _utils as torch_utils
from torch.serialization import StorageType, _get_layout
from torch.storage import TypedStorage, UntypedStorage

from robust_dcp.storage.records.kinds import (
    Budget,
    Builder,
    Malformed,
    NotData,
    Trusted,
    exactly,
    expect,
    set_attributes,
)

_CONSTANT_TYPES: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_PLAIN_TYPES: Final = (bool, bytes, float, int, str, type(None), torch.Size, torch.device, *_CONSTANT_TYPES)
_SPARSE_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MAX_DIMENSIONS: Final = 64
_MAX_NUMBER: Final = 1 << 62
_TORCHS: Final = (*torch.Tensor.__mro__, torch.nn.Parameter)


def constant(module: str, name: str) -> Any:
    """What the name of a constant of torch, such as a dtype, or of a class of storages stands for; else ``None``."""
    found = vars(torch).get(name) if module == "torch" else None
    if isinstance(found, _CONSTANT_TYPES):
        return found
    if module not in ("torch", "torch.storage", "torch.cuda") or not name.endswith("Storage"):
        return None
    if name == "UntypedStorage":
        return UntypedStorage
    try:
        return StorageType(name)
    except KeyError:
        return None


def storage_of(persistent_id: Any) -> tuple[str, int, torch.dtype]:
    """Key, length in bytes and dtype of the storage ``("storage", class, key, location, elements)``."""
    valid = type(persistent_id) is tuple and len(persistent_id) == 5 and persistent_id[0] == "storage"
    _, kind, key, location, count = persistent_id if valid else (None,) * 5
    if type(key) is not str or type(location) is not str or type(count) is not int or not 0 <= count < 1 << 56:
        raise Malformed("a persistent id names no storage")
    dtype = torch.uint8 if kind is UntypedStorage else getattr(kind, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise Malformed("a persistent id does not name a class of storages")
    return key, count * dtype.itemsize, dtype


def _is_sizes(value: Any) -> bool:
    return (
        type(value) in (tuple, torch.Size, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < _MAX_NUMBER for size in value)
    )


def _check_place(offset: Any, size: Any, stride: Any) -> None:
    valid = type(offset) is int and 0 <= offset < _MAX_NUMBER and _is_sizes(size) and _is_sizes(stride)
    expect(valid, "size, strides and offset of a tensor are not integers of 0 or more")
    expect(len(size) == len(stride), "a tensor has another number of strides than of dimensions")
    expect(math.prod(size) < _MAX_NUMBER, "a tensor needs more elements than there can be")


def _check_view(storage: Any, place: tuple[Any, ...], itemsize: int) -> None:
    """Make sure that a tensor lies within its storage. Otherwise ``set_`` would make the storage larger.

    Args:
        place: offset, size, strides.
    """
    offset, size, stride = place
    _check_place(offset, size, stride)
    elements = 0
    if all(size):
        elements = 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    held = storage._untyped_storage.nbytes()
    if elements * itemsize > held:
        raise Malformed(
            f"a tensor of size {list(size)[:8]} needs {elements * itemsize} bytes, and its storage has {held}"
        )


def _is_plain(requires_grad: Any, hooks: Any) -> bool:
    return type(requires_grad) is bool and type(hooks) is OrderedDict and not hooks


def _tensor(function: Any, n_arguments: int) -> Builder:
    """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, flags])``; the third has a dtype
    before the flags.
    """

    def build(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
        valid = len(arguments) in (n_arguments, n_arguments + 1) and _is_plain(*arguments[4:6])
        valid = valid and (n_arguments == 6 or isinstance(arguments[6], torch.dtype))
        expect(valid, "the pickle makes a tensor from other arguments than torch.save writes")
        expect(type(arguments[0]) is TypedStorage, "a tensor has no storage")
        _check_view(arguments[0], arguments[1:4], (arguments[0].dtype if n_arguments == 6 else arguments[6]).itemsize)
        for flags in arguments[n_arguments:]:
            known = type(flags) is dict and all(key in ("conj", "neg") and type(flags[key]) is bool for key in flags)
            expect(flags is None or known, "a tensor has flags that torch.save does not write")
        found: torch.Tensor = function(*arguments)
        return found

    return build


def _quantized(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)``"""
    valid = len(arguments) == 7 and _is_plain(*arguments[5:]) and type(arguments[4]) is tuple and bool(arguments[4])
    valid = valid and type(arguments[0]) is TypedStorage
    expect(valid, "the pickle makes a quantized tensor from other arguments than torch.save writes")
    storage, _, size, _, quantizer = arguments[:5]
    itemsize = storage.dtype.itemsize
    _check_view(storage, arguments[1:4], itemsize)
    is_held = math.prod(size) * itemsize <= storage._untyped_storage.nbytes()  # the whole tensor is allocated first
    expect(is_held, "a quantized tensor is larger than its storage")
    scheme, *numbers = quantizer
    if scheme is torch.per_tensor_affine:
        expect([*map(type, numbers)] == [float, int], "the pickle makes a quantizer from other numbers")
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams) and len(numbers) == 3:
        axis = numbers[2]
        is_axis = type(axis) is int and 0 <= axis < len(size)
        if not is_axis or any(type(each) is not torch.Tensor or each.shape != (size[axis],) for each in numbers[:2]):
            raise Malformed("the scales of a quantized tensor do not fit it")
    else:
        raise NotData("torch._utils._rebuild_qtensor", "with a scheme that is not known")
    found: torch.Tensor = torch_utils._rebuild_qtensor(*arguments)
    return found


def _sparse(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_sparse_tensor(layout, (indices…, values, size[, is_coalesced]))``. We check it; torch does not."""
    valid = len(arguments) == 2 and type(arguments[1]) is tuple and 3 <= len(arguments[1]) <= 4
    expect(valid, "the pickle makes a sparse tensor from other arguments than torch.save writes")
    layout, parts = arguments
    n_tensors = 2 if layout is torch.sparse_coo else 3
    tensors, size, rest = parts[:n_tensors], parts[n_tensors : n_tensors + 1], parts[n_tensors + 1 :]
    valid = all(type(part) is torch.Tensor for part in tensors) and bool(size) and _is_sizes(size[0])
    expect(valid, "a sparse tensor has no indices, values or size")
    if layout is torch.sparse_coo:
        is_coalesced = rest[0] if rest and type(rest[0]) is bool else None
        indices, values = tensors
        return torch.sparse_coo_tensor(indices, values, size[0], check_invariants=True, is_coalesced=is_coalesced)
    if layout not in _SPARSE_COMPRESSED:
        raise NotData("torch._utils._rebuild_sparse_tensor", "with a layout that is not known")
    compressed, plain, values = tensors
    return torch.sparse_compressed_tensor(compressed, plain, values, size[0], layout=layout, check_invariants=True)


def _meta(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)``. It takes no memory."""
    valid = len(arguments) == 4 and isinstance(arguments[0], torch.dtype) and type(arguments[3]) is bool
    valid = valid and _is_sizes(arguments[1]) and _is_sizes(arguments[2])
    expect(valid, "the pickle makes a tensor without data from other arguments than torch.save writes")
    found: torch.Tensor = torch_utils._rebuild_meta_tensor_no_storage(*arguments)
    return found


def _of_device(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)``. The tensor stays on the CPU."""
    valid = len(arguments) == 4 and type(arguments[0]) is torch.Tensor and isinstance(arguments[1], torch.dtype)
    valid = valid and type(arguments[3]) is bool and arguments[0].layout is torch.strided
    expect(valid, "the pickle makes a tensor on a device from other arguments than torch.save writes")
    budget.spend(arguments[0].numel())
    found: torch.Tensor = arguments[0].to(dtype=arguments[1])
    return found.requires_grad_(arguments[3])


def _parameter(arguments: tuple[Any, ...], budget: Budget) -> torch.nn.Parameter:
    """``_rebuild_parameter(data, requires_grad, hooks)``, or ``_rebuild_parameter_with_state`` with attributes."""
    valid = len(arguments) in (3, 4) and type(arguments[0]) is torch.Tensor and _is_plain(*arguments[1:3])
    expect(valid, "the pickle makes a parameter from other arguments than torch.save writes")
    found: torch.nn.Parameter = torch_utils._rebuild_parameter(*arguments[:3])
    for state in arguments[3:]:
        _set_attributes(found, state)
    return found


def is_subclass(kind: type) -> bool:
    """Whether this is a subclass of ``torch.Tensor``. It asks no metaclass."""
    return torch.Tensor in kind.__mro__


def why_not(kind: type) -> str | None:
    """Why tensors of a subclass cannot be rebuilt from their attributes; ``None`` if they can."""
    own = [vars(each) for each in kind.__mro__ if each not in _TORCHS]
    for name in ("__setstate__", "__dict__", "__del__"):
        if any(name in each and not isinstance(each[name], GetSetDescriptorType) for each in own):
            return f"a subclass of torch.Tensor with a {name} of its own"
    return None


def _wrapper(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_wrapper_subclass(class, dtype, size, strides, offset, layout, device, requires_grad)``

    The tensor has no memory. Its inner tensors come with its attributes. Like these it is on the CPU.
    """
    valid = len(arguments) == 8 and isinstance(arguments[0], type) and is_subclass(arguments[0])
    valid = valid and arguments[0] not in _TORCHS and isinstance(arguments[1], torch.dtype)
    valid = valid and isinstance(arguments[5], torch.layout) and type(arguments[7]) is bool
    expect(valid, "the pickle makes a tensor that wraps others from other arguments than torch.save writes")
    kind, dtype, size, stride, offset, layout, _, requires_grad = arguments
    _check_place(offset, size, stride)
    found: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind,
        size,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        layout=layout,
        device=torch.device("cpu"),
        requires_grad=requires_grad,
    )
    return found


def rebuilt_with_attributes(tensor: Any, kind: Any, state: Any) -> Any:
    """The last step of ``_rebuild_from_type_v2``: give a tensor its class and its attributes back.

    Args:
        tensor: what the pickle has made so far.
        kind: a class of torch, or a subclass for which :func:`why_not` gives no reason.
        state: the attributes, or a tuple of attributes and slots.
    """
    valid = isinstance(tensor, torch.Tensor) and isinstance(kind, type) and is_subclass(kind)
    expect(valid, "the pickle gives a class of tensors to something else")
    found: torch.Tensor = tensor
    if type(tensor) is torch.Tensor and kind not in _TORCHS:
        found = tensor.as_subclass(kind)
    expect(type(found) is kind, "the pickle gives a tensor another class than it has")
    _set_attributes(found, state)
    return found


def _set_attributes(tensor: torch.Tensor, state: Any) -> None:
    kind = type(tensor)
    attributes = state[0] if type(state) is tuple and len(state) == 2 else state
    for name, value in attributes.items() if type(attributes) is dict else ():
        if type(name) is str and (hasattr(torch.Tensor, name) or callable(inspect.getattr_static(kind, name, None))):
            raise Malformed(f"{name[:60]!r} is an attribute of a tensor that a checkpoint must not set")
        if kind in _TORCHS and not _is_plain_value(value):
            raise NotData("torch.Tensor", f"with an attribute {name!s:.60} that is not a plain value")
    set_attributes(tensor, state)


def _is_plain_value(value: Any) -> bool:
    """Whether an attribute of a tensor is a plain value, such as a number or a text, or a short collection of these."""
    if type(value) in (list, tuple, dict):
        return all(type(each) in _PLAIN_TYPES for each in (value.values() if type(value) is dict else value))
    return type(value) in _PLAIN_TYPES


def layout_named(name: str) -> torch.layout:
    """The result of ``torch.serialization._get_layout(name)``: for example ``torch.strided``."""
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise Malformed(f"{name[:60]!r} is not a layout")
    return found


def _size(arguments: tuple[Any, ...], budget: Budget) -> torch.Size:
    sizes: Any = arguments[0] if len(arguments) == 1 else None
    if type(sizes) not in (tuple, list) or not all(type(size) is int and abs(size) < 1 << 63 for size in sizes):
        raise Malformed("the pickle makes a torch.Size from other arguments than numbers")
    budget.spend(len(sizes))
    return torch.Size(sizes)


_TORCH_UTILS: Final[dict[str, Builder]] = {
    "_rebuild_tensor_v2": _tensor(torch_utils._rebuild_tensor_v2, 6),
    "_rebuild_tensor_v3": _tensor(torch_utils._rebuild_tensor_v3, 7),
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_device_tensor_from_cpu_tensor": _of_device,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_wrapper_subclass": _wrapper,
}

TRUSTED: Final[dict[Any, Trusted]] = {
    **{
        getattr(torch_utils, name): Trusted(build) for name, build in _TORCH_UTILS.items() if hasattr(torch_utils, name)
    },
    torch.device: Trusted(exactly(torch.device, (str,), (str, int))),
    _get_layout: Trusted(exactly(layout_named, (str,), of="a layout"), makes_constants=True),
    torch.Size: Trusted(_size),
}

NAMED: Final[dict[tuple[str, str], Any]] = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): torch._tensor._rebuild_from_type_v2,
}
