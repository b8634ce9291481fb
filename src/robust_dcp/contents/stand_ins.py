"""Plain records in place of the classes of a ``.metadata``.

Their names and states are those of ``metadata.py``, ``filesystem.py``, ``planner.py`` and ``_hf_utils.py`` in
``torch/distributed/checkpoint``, and of Megatron-Core's ``dist_checkpointing/strategies/torch.py``. Any other class
becomes an :class:`Unknown`. It keeps nothing and runs nothing, so a ``.metadata`` with an object of the user's class
can be listed, too.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

__all__ = ["Names", "Record", "RecordOf", "Unknown"]


class Record:
    """An object of a known class, with the attributes in ``fields``. What its pickle does not set is ``None``."""

    fields: ClassVar[tuple[str, ...]] = ()
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # a class with __slots__
        if not isinstance(state, dict):
            raise ValueError(f"the state of a {type(self).__name__} is a {type(state).__name__}")
        for field in self.fields:
            setattr(self, field, state.get(field))

    def __getattr__(self, name: str) -> Any:
        if name in self.fields:  # its pickle gave it no state
            return None
        raise AttributeError(name)


def RecordOf(name: str, fields: str) -> type[Record]:  # noqa: N802 - it makes a class, as NamedTuple does
    """A class of records with these fields."""
    names = tuple(fields.split())
    return type(name, (Record,), {"__slots__": names, "fields": names})


class Unknown:
    """An object of a class that does not belong into a ``.metadata``. It takes whatever its pickle does with it."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **named: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> Unknown:
        return self

    def append(self, value: Any) -> None:
        """Forget it."""

    def extend(self, values: Any) -> None:
        """Forget them."""

    def add(self, value: Any) -> None:
        """Forget it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


_DCP: Final = "torch.distributed.checkpoint"
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES: Final = {
    f"{_DCP}.metadata": {
        "Metadata": "state_dict_metadata planner_data storage_data storage_meta version",
        "TensorStorageMetadata": "properties size chunks",
        "BytesStorageMetadata": "",
        "ChunkStorageMetadata": "offsets sizes",
        "MetadataIndex": "fqn offset index",
        "StorageMeta": "checkpoint_id save_id load_id modules",
    },
    f"{_DCP}.filesystem": {"_StorageInfo": "relative_path offset length transform_descriptors", "_StoragePrefix": ""},
    f"{_DCP}._hf_utils": {"_HFStorageInfo": "relative_path shape dtype"},
    f"{_DCP}.planner": dict.fromkeys(("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"), ""),
    _MEGATRON: {"MCoreSavePlan": ""},
}
_HOMES_OF_PROPERTIES: Final = ("torch.distributed._shard.sharded_tensor.metadata", f"{_DCP}.metadata")
_CONSTANT: Final = re.compile(
    r"(?:b?float|q?u?int|complex|bits?|sparse_|per_|channels_last)\w*|bool|c?half|c?double|cfloat|long|short"
    r"|strided|jagged|_mkldnn|(?:legacy_)?contiguous_format|preserve_format"
)
"""Names of dtypes, layouts, memory formats and quantization schemes in ``torch``."""


class _TensorProperties(RecordOf("TensorProperties", "dtype layout requires_grad memory_format pin_memory")):  # type: ignore[misc]
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(dict(zip(self.fields, state, strict=False)) if isinstance(state, tuple) else state)


def _size(values: Any = ()) -> tuple[Any, ...]:
    """``torch.Size(values)``."""
    return tuple(values)


def _text(value: Any = None) -> str:
    """A layout or a memory format in words."""
    return str(value)


def _path(*parts: Any) -> str:
    """A ``pathlib`` path. It says where the checkpoint once was, and nothing opens it."""
    return "/".join(str(part) for part in parts)


class Names:
    """What each name in the pickle of a ``.metadata`` stands for.

    Attributes:
        classes: the records by the names of the classes that they stand for.
        unknown: the names of classes that became :class:`Unknown`, sorted.
    """

    def __init__(self) -> None:
        self.classes: dict[tuple[str, str], Any] = {
            (module, name): RecordOf(name, fields)
            for module, group in _CLASSES.items()
            for name, fields in group.items()
        }
        # Megatron-Core's class of older checkpoints is a Metadata with more attributes.
        self.classes[_MEGATRON, "MCoreMetadata"] = self.classes[f"{_DCP}.metadata", "Metadata"]
        for home in _HOMES_OF_PROPERTIES:
            self.classes[home, "TensorProperties"] = _TensorProperties
            self.classes[home, "MEM_FORMAT_ENCODING"] = self.classes[home, "_MEM_FORMAT_ENCODING"] = _text
        self.classes["torch.serialization", "_get_layout"] = _text
        self.classes[f"{_DCP}.planner", "WriteItemType"] = _text
        self.classes["torch", "Size"] = _size
        for module in ("pathlib", "pathlib._local"):
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
                self.classes[module, name] = _path
        self._unknown: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """The record that stands for a class of ``torch.distributed.checkpoint.metadata``."""
        return self.classes[f"{_DCP}.metadata", name]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of classes that do not belong into a ``.metadata``."""
        return tuple(sorted(self._unknown))

    def other(self, module: str, name: str) -> Any:
        """A dtype, as its name; anything else becomes an :class:`Unknown`."""
        if module == "torch" and _CONSTANT.fullmatch(name):
            return name
        self._unknown.add(f"{module}.{name}")
        return Unknown
