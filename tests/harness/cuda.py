"""A stand-in for CUDA devices, on a machine that has none: it says what was asked of which device, in which thread.

Its tensors lie in the memory of the host. They say that they are on a device, and copies between them and the host are
noted. It knows the current device and the current streams of each thread, the memory that is locked, and the devices
that have a context. As with CUDA 12, to make a device the current one gives it a context, and so does a stream. A copy
is done at once, so this shows no missing wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from robust_dcp.plan import load_items, state_dict
from robust_dcp.staging import blocks

__all__ = ["Cuda", "OnDevice", "Stream"]

_CUDA: list[Cuda] = []
_EMPTY, _PIN = torch.empty, torch.Tensor.pin_memory


class Stream:
    """A stream. It comes after those that it has waited for."""

    def __init__(self, device: Any = None, *, is_default: bool = False) -> None:
        number = _CUDA[-1].current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", number)
        self.waited_for: set[Stream] = {self}
        if not is_default:
            _CUDA[-1].contexts.add(number)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for |= other.waited_for

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking  # a thread that waits for another kind keeps a core busy

    def record(self, stream: Stream | None = None) -> None:
        _CUDA[-1].contexts.add((stream or _CUDA[-1].current_stream()).device.index)

    def synchronize(self) -> None:
        pass


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device."""

    device = property(lambda self: torch.device("cuda", _CUDA[-1].number_of(self)))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, kwargs = _CUDA[-1], dict(kwargs or {})
        if func is torch.Tensor.copy_:
            cuda.note(args[0], args[1])
        elif func is torch._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                cuda.note(target, source)
        elif func in (torch.Tensor.numpy, torch.Tensor.pin_memory):
            raise TypeError(f"{func} of a tensor on a device")
        device = kwargs.pop("device", None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        to_host = func is torch.Tensor.cpu or "cpu" in map(str, (device, *args[1:2]))
        if not isinstance(result, torch.Tensor) or result is args[0]:
            return result
        if to_host:
            result = result.as_subclass(torch.Tensor)
            cuda.note(result, args[0])
            return result
        first = next(each for each in _tensors(args) if isinstance(each, cls))
        return cuda.put(result, cuda.number_of(first))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Cuda(contextlib.ExitStack):
    """Within it, this process has used CUDA, and has some devices.

    Attributes:
        contexts: the devices that have a context.
        copies: for each copy between host and device the device, whether it goes to the device, and the stream.
        pageable: copies onto a device from memory that was not locked, or that torch would first convert on the host.
        locked: the memory that is locked, by its address.
    """

    def __init__(self, n_devices: int = 2) -> None:
        super().__init__()
        self.contexts: set[int] = set()
        self.copies: list[tuple[int, bool, Stream]] = []
        self.pageable: list[str] = []
        self.locked: dict[int, int] = {}
        self._of_thread = threading.local()
        self._number_of_storage: dict[int, int] = {}
        _CUDA.append(self)
        self.callback(_CUDA.remove, self)
        self.defaults = [Stream(torch.device("cuda", number), is_default=True) for number in range(n_devices)]
        for name, value in {
            "is_initialized": lambda: True,
            "device_count": lambda: n_devices,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device": self._device,
            "Stream": Stream,
            "Event": _Event,
            "current_stream": self.current_stream,
            "default_stream": lambda device: self.defaults[torch.device(device).index],
            "set_stream": self.set_stream,
            "stream": self._stream,
            "get_device_properties": lambda device: SimpleNamespace(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock),
        }.items():
            self.enter_context(mock.patch.object(torch.cuda, name, value))
        self.enter_context(mock.patch.object(torch, "empty", self._empty))
        locked = lambda tensor: self._locked(tensor)  # noqa: E731, PLW0108 (only a function becomes a method of tensors)
        self.enter_context(mock.patch.object(torch.Tensor, "pin_memory", locked))
        for module in (blocks, state_dict, load_items):
            self.enter_context(mock.patch.object(module, "PLAIN", (*blocks.PLAIN, OnDevice)))

    # What torch.cuda has.

    def current_device(self) -> int:
        number: int = getattr(self._of_thread, "device", 0)
        return number

    def set_device(self, device: Any) -> None:
        self._of_thread.device = number = device if isinstance(device, int) else device.index
        self.contexts.add(number)

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        if torch.device("cuda", before) != torch.device(device):
            self.set_device(torch.device(device))
        yield
        self._of_thread.device = before  # torch takes care not to give that device a context

    def current_stream(self, device: Any = None) -> Stream:
        number = self.current_device() if device is None else device if isinstance(device, int) else device.index
        stream: Stream = vars(self._of_thread).get(f"stream {number}", self.defaults[number])
        return stream

    def set_stream(self, stream: Stream) -> None:
        if self.current_device() != stream.device.index:
            self.set_device(stream.device)
        setattr(self._of_thread, f"stream {stream.device.index}", stream)

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        yield
        self.set_stream(there)
        self.set_stream(before)

    def _lock(self, address: int, nbytes: int, flags: int) -> int:
        self.contexts.add(self.current_device())
        self.locked[address] = nbytes
        return 0

    def _unlock(self, address: int) -> int:
        self.contexts.add(self.current_device())
        del self.locked[address]
        return 0

    # Tensors.

    def put(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """``tensor`` as one on a device."""
        with torch._C.DisableTorchFunctionSubclass():
            self._number_of_storage.setdefault(tensor.untyped_storage().data_ptr(), number)
            return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(OnDevice)

    def to_device(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A copy of ``tensor`` on a device, with the same strides."""
        self.contexts.add(number)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        self._number_of_storage.pop(copy.untyped_storage().data_ptr(), None)  # of one that is gone
        return self.put(copy, number)

    def number_of(self, tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return self._number_of_storage[tensor.untyped_storage().data_ptr()]

    def _empty(self, *sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made = _EMPTY(*sizes, **options)
        if device is None or torch.device(device).type != "cuda":
            return made
        return self.to_device(made, torch.device(device).index)

    def _locked(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise NotImplementedError("the stand-in locks no such tensors")
        copy = tensor.clone()
        self.locked[copy.data_ptr()] = copy.nbytes
        return copy

    def note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy."""
        from_device, to_device = isinstance(source, OnDevice), isinstance(target, OnDevice)
        if not source.numel() or from_device == to_device:
            return
        number = self.number_of(target if to_device else source)
        self.copies.append((number, to_device, self.current_stream(torch.device("cuda", number))))
        if not to_device:
            return
        begin = source.data_ptr()
        locked = [*self.locked.items()]  # at once: other threads lock and free memory meanwhile
        is_locked = any(at <= begin and begin + source.nbytes <= at + size for at, size in locked)
        if not is_locked or source.dtype != target.dtype or not source.is_contiguous():
            self.pageable.append(f"{source.dtype} {list(source.shape)} to {target.dtype}, locked: {is_locked}")
