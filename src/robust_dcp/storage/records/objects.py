"""Items that are no tensors (DCP's BYTE_IO): loaded, or checked before somebody else loads them.

Owns which classes an object in a checkpoint may hold. A planner that gets the bytes calls ``torch.load`` with
``weights_only=False``, as stock's does: so bytes that would run code must be found here. Called by the reader.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar, Final

import numpy as np
import torch

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.records.unpickling import PLAIN_CLASSES, ClassName, RestrictedUnpickler, all_of

__all__ = ["OBJECT_CLASSES", "check_object", "load_object"]

OBJECT_CLASSES: Final = (
    PLAIN_CLASSES
    # What tensors, parameters and storages are rebuilt with: the same functions that weights_only=True allows.
    | all_of(
        "torch._utils",
        "_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor "
        "_rebuild_tensor_v2 _rebuild_tensor_v3",
    )
    | all_of("torch", "Tensor device")
    | all_of("torch.nn.parameter", "Parameter")
    | all_of("torch.serialization", "_get_layout")
    | all_of("torch.storage", "UntypedStorage")
    | all_of("_io", "BytesIO")
    | all_of("argparse", "Namespace")
    | all_of("datetime", "date datetime time timedelta timezone")
    | all_of("decimal", "Decimal")
    | all_of("fractions", "Fraction")
    | all_of("types", "SimpleNamespace")
    | all_of("uuid", "UUID")
    | all_of("_codecs", "encode")  # how protocol 2 holds bytes
    | all_of("numpy", "dtype ndarray")
)
"""Data without behaviour: loading an object of these classes runs no code of its author. Enums and classes of your
own are registered with ``torch.serialization.add_safe_globals``."""


def _stand_ins() -> dict[ClassName, Any]:
    """What is pickled under names that differ between versions of Python and NumPy, or belong to another system."""
    paths: dict[str, type[PurePath]] = {"PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
    paths |= {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath, type(Path()).__name__: type(Path())}
    numpy = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    return {
        **{(module, name): path for module in ("pathlib", "pathlib._local") for name, path in paths.items()},
        **{(f"numpy.{core}.multiarray", name): value for core in ("core", "_core") for name, value in numpy.items()},
    }


_STAND_INS: Final = _stand_ins()
_ZIP_MAGIC: Final = b"PK\x03\x04"
_TORCHSCRIPT_MEMBER: Final = "constants.pkl"  # by this torch.load recognises a program, and would start to load it


def load_object(data: bytes | io.BytesIO, *, file: str, item: str, trusted: bool = False) -> Any:
    """Load what ``torch.save`` wrote, if it is data only.

    Args:
        data: the item's bytes.
        file, item: where they come from, for errors.
        trusted: load with ``torch.load(weights_only=False)``, which runs whatever code the bytes name.

    Returns:
        The object, its tensors on the CPU.

    Raises:
        UnsafeCheckpoint: it needs a class that is neither in :data:`OBJECT_CLASSES` nor registered by the user.
        CorruptCheckpoint: these are not the bytes of a ``torch.save``.
    """
    view = data.getvalue() if isinstance(data, io.BytesIO) else data
    try:
        if trusted:
            return torch.load(io.BytesIO(view), map_location="cpu", weights_only=False)
        return _load_restricted(view, file, item)
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # broken bytes raise almost anything
        raise _corrupt(file, item, error) from error


def check_object(data: bytes | io.BytesIO, *, file: str, item: str) -> None:
    """Make sure that ``torch.load(weights_only=False)`` of ``data`` runs no code.

    Bytes that ``torch.load`` cannot read in any of its formats pass: a planner of its own gave them a meaning.

    Raises:
        UnsafeCheckpoint: as :func:`load_object`.
        CorruptCheckpoint: these are the damaged bytes of a ``torch.save``.
    """
    view = data.getvalue() if isinstance(data, io.BytesIO) else data
    try:
        _load_restricted(view, file, item)
    except UnsafeCheckpoint:
        raise
    except Exception as error:
        # A zip is a torch.save. Of other bytes the loader has seen as much as an unrestricted one would before it
        # fails in the same place: nothing that it named was refused.
        if view[:4] == _ZIP_MAGIC:
            raise _corrupt(file, item, error) from error


def _load_restricted(data: bytes, file: str, item: str) -> Any:
    """``torch.load`` with nothing but data, first by its own rules, then by :data:`OBJECT_CLASSES`."""
    if data[:4] == _ZIP_MAGIC:
        if _TORCHSCRIPT_MEMBER in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records():
            raise _unsafe(file, item, "a TorchScript archive: a program")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            pass  # refused, or not understood: torch's own list has neither a defaultdict nor NumPy
    elif _is_tar(data):
        raise _unsafe(file, item, "a tar archive, PyTorch's format before 0.1.10, which cannot be read safely")
    module = _PickleModule(f"item {item!r} in {file}")
    return torch.load(io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False)


class _PickleModule:
    """What ``torch.load`` uses of the module ``pickle``, restricted."""

    __name__ = "robust_dcp.storage.records.objects"

    def __init__(self, source: str) -> None:
        # torch.load derives a class from this one and makes it with (stream, encoding=...).
        self.Unpickler = type("Unpickler", (_ObjectUnpickler,), {"source": source})

    def load(self, stream: IO[bytes], encoding: str = "ASCII") -> Any:
        return self.Unpickler(stream, encoding=encoding).load()


class _ObjectUnpickler(RestrictedUnpickler):
    source: ClassVar[str]

    def __init__(self, stream: IO[bytes], encoding: str = "ASCII") -> None:
        super().__init__(
            stream,
            encoding=encoding,
            file=self.source,
            allowed=OBJECT_CLASSES,
            stand_ins=_STAND_INS,
            how_to_allow="if you trust it, register the class with torch.serialization.add_safe_globals([...]), or "
            "pass trusted=True to load whatever the checkpoint holds",
        )


def _is_tar(data: bytes) -> bool:
    try:
        tarfile.open(fileobj=io.BytesIO(data), mode="r:").close()
    except tarfile.TarError:
        return False
    return True


def _unsafe(file: str, item: str, what: str) -> UnsafeCheckpoint:
    return UnsafeCheckpoint(f"item {item!r} in {file} is {what}", file=file, what=what)


def _corrupt(file: str, item: str, error: Exception) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"item {item!r} in {file} is not what torch.save wrote: {type(error).__name__}: {error}",
        file=file,
        item=item,
        expected="the bytes of a torch.save",
        found=f"{type(error).__name__}: {error}",
    )
