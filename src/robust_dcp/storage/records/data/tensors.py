"""Rebuilds tensors and torch's constants, with torch's own functions, after a check that sizes fit the storages.

This module decides which of these functions a pickle may call, and with which arguments. ``archives`` gives the
storages. A subclass of the program, such as a quantized tensor, is rebuilt from its attributes: its inner tensors, and
values that are data. None of its code runs for that.
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

from robust_dcp.storage.records.data.limits import Budget, Malformed, NotData
from robust_dcp.storage.records.data.python_kinds import Builder, arguments_of
from robust_dcp.storage.records.data.user_classes import set_slot

__all__ = [
    "BUILT_BY_CALL",
    "NAMED",
    "constant",
    "is_subclass",
    "rebuilt_with_attributes",
    "storage_type",
    "why_not",
]

_CONSTANT_TYPES: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_SPARSE_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MAX_DIMENSIONS: Final = 64
_MAX_NUMBER: Final = 1 << 62
_TORCHS: Final = (*torch.Tensor.__mro__, torch.nn.Parameter)


def constant(name: str) -> Any:
    """``torch.<name>`` if that is a constant such as a dtype or a layout; else ``None``."""
    found = vars(torch).get(name)
    return found if isinstance(found, _CONSTANT_TYPES) else None


def storage_type(module: str, name: str) -> Any:
    """What a pickled storage class stands for; ``None`` if the name is not a storage class."""
    if module not in ("torch", "torch.storage", "torch.cuda") or not name.endswith("Storage"):
        return None
    if name == "UntypedStorage":
        return UntypedStorage
    try:
        return StorageType(name)
    except KeyError:
        return None


def _is_sizes(value: Any) -> bool:
    return (
        type(value) in (tuple, torch.Size, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < _MAX_NUMBER for size in value)
    )


def _check_place(place: tuple[Any, ...], itemsize: int) -> None:
    """Make sure that a tensor lies within its storage. Otherwise ``set_`` would make the storage larger.

    Args:
        place: storage, offset, size, strides.
    """
    storage, offset, size, stride = place
    if type(storage) is not TypedStorage:
        raise Malformed("a tensor has no storage")
    if not (type(offset) is int and 0 <= offset < _MAX_NUMBER and _is_sizes(size) and _is_sizes(stride)):
        raise Malformed("size, strides and offset of a tensor are not integers of 0 or more")
    if len(size) != len(stride):
        raise Malformed("a tensor has another number of strides than of dimensions")
    elements = 0
    if all(size):
        elements = 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    held = storage._untyped_storage.nbytes()
    if elements * itemsize > held or math.prod(size) >= _MAX_NUMBER:
        raise Malformed(
            f"a tensor of size {list(size)[:8]} needs {elements * itemsize} bytes, and its storage has {held}"
        )


def _is_plain(requires_grad: Any, hooks: Any) -> bool:
    return type(requires_grad) is bool and type(hooks) is OrderedDict and not hooks


def _tensor(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_tensor(storage, offset, size, stride)``"""
    if len(arguments) != 4:
        raise Malformed("the pickle makes a tensor from other arguments than its storage and its place there")
    _check_place(arguments, _itemsize(arguments[0]))
    found: torch.Tensor = torch_utils._rebuild_tensor(*arguments)
    return found


def _tensor_v2(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    if len(arguments) not in (6, 7) or not _is_plain(*arguments[4:6]):
        raise Malformed("the pickle makes a tensor from other arguments than torch.save writes")
    _check_place(arguments[:4], _itemsize(arguments[0]))
    _check_flags(arguments[6:])
    found: torch.Tensor = torch_utils._rebuild_tensor_v2(*arguments)
    return found


def _tensor_v3(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    if len(arguments) not in (7, 8) or not _is_plain(*arguments[4:6]) or not isinstance(arguments[6], torch.dtype):
        raise Malformed("the pickle makes a tensor from other arguments than torch.save writes")
    _check_place(arguments[:4], arguments[6].itemsize)
    _check_flags(arguments[7:])
    found: torch.Tensor = torch_utils._rebuild_tensor_v3(*arguments)
    return found


def _check_flags(given: tuple[Any, ...]) -> None:
    for flags in given:
        known = type(flags) is dict and all(key in ("conj", "neg") and type(flags[key]) is bool for key in flags)
        if flags is not None and not known:
            raise Malformed("a tensor has flags that torch.save does not write")


def _itemsize(storage: Any) -> int:
    return int(storage.dtype.itemsize) if type(storage) is TypedStorage else 1


def _quantized(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)``"""
    if len(arguments) != 7 or not _is_plain(*arguments[5:]) or type(arguments[4]) is not tuple or not arguments[4]:
        raise Malformed("the pickle makes a quantized tensor from other arguments than torch.save writes")
    storage, size, quantizer = arguments[0], arguments[2], arguments[4]
    _check_place(arguments[:4], _itemsize(storage))
    if math.prod(size) * _itemsize(storage) > storage._untyped_storage.nbytes():  # the whole tensor is allocated first
        raise Malformed("a quantized tensor is larger than its storage")
    scheme, *numbers = quantizer
    if scheme is torch.per_tensor_affine:
        arguments_of(tuple(numbers), (float, int), of="a quantizer")
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
    if len(arguments) != 2 or type(arguments[1]) is not tuple or not 3 <= len(arguments[1]) <= 4:
        raise Malformed("the pickle makes a sparse tensor from other arguments than torch.save writes")
    layout, parts = arguments
    n_tensors = 2 if layout is torch.sparse_coo else 3
    tensors, size, rest = parts[:n_tensors], parts[n_tensors : n_tensors + 1], parts[n_tensors + 1 :]
    if not all(type(part) is torch.Tensor for part in tensors) or not (size and _is_sizes(size[0])):
        raise Malformed("a sparse tensor has no indices, values or size")
    if layout is not torch.sparse_coo and layout not in _SPARSE_COMPRESSED:
        raise NotData("torch._utils._rebuild_sparse_tensor", "with a layout that is not known")

    def make(*, is_checked: bool) -> torch.Tensor:
        if layout is torch.sparse_coo:
            coalesced = rest[0] if rest and type(rest[0]) is bool else None
            indices, values = tensors
            return torch.sparse_coo_tensor(
                indices, values, size[0], check_invariants=is_checked, is_coalesced=coalesced
            )
        compressed, plain, values = tensors
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size[0], layout=layout, check_invariants=is_checked
        )

    budget.check_later(lambda: make(is_checked=True))
    return make(is_checked=False)


def _meta(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)``. It takes no memory."""
    fits = len(arguments) == 4 and isinstance(arguments[0], torch.dtype) and type(arguments[3]) is bool
    if not fits or not _is_sizes(arguments[1]) or not _is_sizes(arguments[2]):
        raise Malformed("the pickle makes a tensor without data from other arguments than torch.save writes")
    found: torch.Tensor = torch_utils._rebuild_meta_tensor_no_storage(*arguments)
    return found


def _of_device(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)``. The tensor stays on the CPU."""
    fits = len(arguments) == 4 and type(arguments[0]) is torch.Tensor and isinstance(arguments[1], torch.dtype)
    if not fits or type(arguments[3]) is not bool or arguments[0].layout is not torch.strided:
        raise Malformed("the pickle makes a tensor on a device from other arguments than torch.save writes")
    budget.spend(arguments[0].numel())
    tensor: torch.Tensor = arguments[0].to(dtype=arguments[1])
    tensor.requires_grad = arguments[3]
    return tensor


def _parameter(arguments: tuple[Any, ...], budget: Budget) -> torch.nn.Parameter:
    if len(arguments) != 3 or type(arguments[0]) is not torch.Tensor or not _is_plain(*arguments[1:]):
        raise Malformed("the pickle makes a parameter from other arguments than torch.save writes")
    found: torch.nn.Parameter = torch_utils._rebuild_parameter(*arguments)
    return found


def _parameter_with_state(arguments: tuple[Any, ...], budget: Budget) -> torch.nn.Parameter:
    if len(arguments) != 4:
        raise Malformed("the pickle makes a parameter from other arguments than torch.save writes")
    parameter = _parameter(arguments[:3], budget)
    _set_attributes(parameter, arguments[3])
    return parameter


def is_subclass(kind: type) -> bool:
    """Whether this is a subclass of ``torch.Tensor``. It asks no metaclass."""
    return torch.Tensor in kind.__mro__


def why_not(kind: type) -> str | None:
    """Why tensors of a subclass cannot be rebuilt from their attributes; ``None`` if they can."""
    own = [vars(each) for each in kind.__mro__ if each not in _TORCHS]
    for name in ("__setstate__", "__dict__"):
        if any(name in each and not isinstance(each[name], GetSetDescriptorType) for each in own):
            return f"a subclass of torch.Tensor with a {name} of its own"
    return None


def _wrapper(arguments: tuple[Any, ...], budget: Budget) -> torch.Tensor:
    """``_rebuild_wrapper_subclass(class, dtype, size, strides, offset, layout, device, requires_grad)``

    The tensor has no memory. Its inner tensors come with its attributes. Like these it is on the CPU.
    """
    fits = len(arguments) == 8 and isinstance(arguments[0], type) and is_subclass(arguments[0])
    if not fits or arguments[0] in _TORCHS or not isinstance(arguments[1], torch.dtype):
        raise Malformed("the pickle makes a tensor that wraps others from other arguments than torch.save writes")
    kind, dtype, size, stride, offset, layout, _, requires_grad = arguments
    is_place = _is_sizes(size) and _is_sizes(stride) and len(size) == len(stride) and math.prod(size) < _MAX_NUMBER
    if not is_place or type(offset) is not int or not 0 <= offset < _MAX_NUMBER:
        raise Malformed("size, strides and offset of a tensor are not integers of 0 or more")
    if not isinstance(layout, torch.layout) or type(requires_grad) is not bool:
        raise Malformed("the pickle makes a tensor that wraps others from other arguments than torch.save writes")
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
    if not isinstance(tensor, torch.Tensor) or not isinstance(kind, type) or not is_subclass(kind):
        raise Malformed("the pickle gives a class of tensors to something else")
    found: torch.Tensor = tensor
    if type(tensor) is torch.Tensor and kind not in _TORCHS:
        found = tensor.as_subclass(kind)
    if type(found) is not kind:
        raise Malformed("the pickle gives a tensor another class than it has")
    _set_attributes(found, state)
    return found


def _set_attributes(tensor: torch.Tensor, state: Any) -> None:
    kind = type(tensor)
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for values in (attributes, slots):
        if values is not None and not (type(values) is dict and all(type(name) is str for name in values)):
            raise Malformed("the attributes of a tensor are not a dict")
    for name, value in (attributes or {}).items():
        if hasattr(torch.Tensor, name) or callable(inspect.getattr_static(kind, name, None)):
            raise Malformed(f"{name[:60]!r} is an attribute of a tensor that a checkpoint must not set")
        if kind in _TORCHS and not _is_plain_value(value):
            raise NotData("torch.Tensor", f"with an attribute {name[:60]!r} that is not a plain value")
    tensor.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        set_slot(tensor, name, value)


def _is_plain_value(value: Any) -> bool:
    """Whether an attribute of a tensor is a plain value, such as a number or a text, or a short collection of these."""
    kinds = (bool, bytes, float, int, str, type(None), torch.Size, torch.device, *_CONSTANT_TYPES)
    if type(value) in (list, tuple):
        return all(type(each) in kinds for each in value)
    return type(value) in kinds or (type(value) is dict and all(type(each) in kinds for each in value.values()))


def _device(arguments: tuple[Any, ...], budget: Budget) -> torch.device:
    return torch.device(*arguments_of(arguments, (str,), (str, int), of="a device"))


def _layout(arguments: tuple[Any, ...], budget: Budget) -> torch.layout:
    (name,) = arguments_of(arguments, (str,), of="a layout")
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise Malformed(f"{name[:60]!r} is not a layout")
    return found


def _size(arguments: tuple[Any, ...], budget: Budget) -> torch.Size:
    if len(arguments) != 1 or type(arguments[0]) not in (tuple, list):
        raise Malformed("the pickle makes a torch.Size from other arguments than numbers")
    if not all(type(size) is int and abs(size) < 1 << 63 for size in arguments[0]):
        raise Malformed("the pickle makes a torch.Size from other arguments than numbers")
    budget.spend(len(arguments[0]))
    return torch.Size(arguments[0])


_TORCH_UTILS: Final[dict[str, Builder]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_device_tensor_from_cpu_tensor": _of_device,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter_with_state,
    "_rebuild_wrapper_subclass": _wrapper,
}

BUILT_BY_CALL: Final[dict[Any, Builder]] = {
    **{getattr(torch_utils, name): build for name, build in _TORCH_UTILS.items() if hasattr(torch_utils, name)},
    torch.device: _device,
    _get_layout: _layout,
    torch.Size: _size,
}

NAMED: Final[dict[tuple[str, str], Any]] = {
    **{("torch._utils", name): getattr(torch_utils, name) for name in _TORCH_UTILS if hasattr(torch_utils, name)},
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "device"): torch.device,
    ("torch", "Size"): torch.Size,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.serialization", "_get_layout"): _get_layout,
}
