"""``convert``: a checkpoint, or a file of ``torch.save``, in another form. It appears as a whole or not at all.

torch reads and writes files of ``torch.save``, ``robust_dcp.save`` writes checkpoints, and the files of a Hugging Face
model are filled piece by piece. The target is made in a directory beside it (``workplace``), with a note of what is
being made. If the process is killed, the next one with the same arguments goes on with the finished files of
safetensors, and makes other forms anew.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Final, Literal

import torch

from robust_dcp.api import save
from robust_dcp.conversion.outline import Outline, filled, outline_of_paths, with_items
from robust_dcp.conversion.source import OUTLINE_NAME, Source, box_of, open_source
from robust_dcp.conversion.workplace import workplace_of
from robust_dcp.errors import StorageError, entry_point
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.layouts import layout_named
from robust_dcp.storage.model_file import INDEX_NAME, check_dtypes, in_shards, index_of, write_model_file
from robust_dcp.storage.pieces import NamedTensor, Piece, batches_of
from robust_dcp.storage.writer import RobustWriter

__all__ = ["ConversionReport", "Form", "Rules", "convert"]

Form = Literal["dcp", "safetensors", "torch"]

_OF_A_MODEL: Final = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
)
"""What lies beside the weights of a Hugging Face model, and is copied with ``config``."""

_SMALL_NBYTES: Final = 1 << 20


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True)
class Rules:
    """What becomes of items: which go in, and under which names and dtypes.

    Attributes:
        select: globs; an item goes in if one of them fits its name. Empty for all items.
        exclude: globs; an item that one of them fits stays out.
        rename: pairs of globs. The first pair whose left side fits a name gives its new name: what each ``*`` of the
            left side stood for is put where the ``*`` of the right side stand, in order.
        dtypes: pairs of a glob and the name of a dtype, for floating tensors with such a new name. The last one that
            fits counts.
    """

    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for left, right in self.rename:
            if left.count("*") < right.count("*"):
                raise ValueError(f"--rename {left}={right}: the right side has more * than the left side")

    def names(self, names: Iterable[str]) -> dict[str, str]:
        """The old names by the new ones, in the order of ``names``.

        Raises:
            ValueError: two items would get one name.
        """
        found: dict[str, str] = {}
        for name in names:
            if (self.select and not _fits(name, self.select)) or _fits(name, self.exclude):
                continue
            new = self.renamed(name)
            if new in found:
                raise ValueError(f"{found[new]!r} and {name!r} would both be called {new!r}; change --rename")
            found[new] = name
        return found

    def renamed(self, name: str) -> str:
        """The new name of an item."""
        for left, right in self.rename:
            fits = _pattern(left).fullmatch(name)
            if fits is not None:
                groups = iter(fits.groups())
                return "".join(next(groups) if part == "*" else part for part in re.split(r"(\*)", right))
        return name

    def dtype(self, name: str) -> str | None:
        """The name of the dtype that a floating tensor with this new name is cast to; ``None`` for its own."""
        return next((dtype for glob, dtype in reversed(self.dtypes) if _fits(name, (glob,))), None)

    def unused(self, names: Mapping[str, str]) -> list[str]:
        """The patterns of renames and dtypes that no item has fitted, which may be mistyped.

        Args:
            names: the old names by the new ones, as :meth:`names` gives them.
        """
        renames = [left for left, _ in self.rename if not any(map(_pattern(left).fullmatch, names.values()))]
        return renames + [glob for glob, _ in self.dtypes if not any(_fits(name, (glob,)) for name in names)]


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, glob.split("*"))), re.DOTALL)


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion has made.

    Attributes:
        target: where.
        tensors, objects: how many of each.
        nbytes: bytes of tensors.
        left_out: objects that the form cannot hold.
        files_there: how many files an earlier call had finished.
        unused: patterns of the rules that no item has fitted. They may be mistyped.
    """

    target: str
    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...] = ()
    files_there: int = 0
    unused: tuple[str, ...] = ()


@entry_point
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    form: Form,
    rules: Rules | None = None,
    flat: bool = False,
    layout: str = "torch",
    files: int = 1,
    max_shard_nbytes: int = 5 << 30,
    config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    buffer_nbytes: int = 128 << 20,
    progress: Callable[[int, int], object] = lambda done, total: None,
    disk: Disk | None = None,
) -> ConversionReport:
    """Convert a checkpoint or a file of ``torch.save``.

    Args:
        source: a checkpoint of any kind, or a file of ``torch.save`` with a state dict.
        target: a directory, or for ``form="torch"`` a file.
        form: ``dcp``: a checkpoint that ``load`` reads; ``safetensors``: the files of a Hugging Face model;
            ``torch``: one file that ``torch.load`` reads.
        rules: which items, under which names, with which dtypes; ``None`` for all as they are.
        flat: for ``torch``: whether the names are the keys of one dict. Otherwise it is nested as the source was.
        layout: for ``dcp``: the layout of the data files, as for ``RobustWriter``.
        files: for ``dcp``: how many data files.
        max_shard_nbytes: for ``safetensors``: most bytes of tensors in one file.
        config: for ``safetensors``: a directory whose ``config.json`` and tokenizer are copied into the target.
        overwrite: whether to replace a target that exists. It stays until the new one is whole.
        buffer_nbytes: about how much data is in memory at a time.
        progress: called with the bytes of tensors that were written, and of all.
        disk: the file system of the target.

    Raises:
        ValueError: the rules do not fit the source, the form cannot hold an item, or there is no such layout.
        StorageError: the target exists, there is no room, or a call failed.
        CorruptCheckpoint, UnsafeCheckpoint: the source is damaged, or no data.
    """
    layout_named(layout)
    disk = Disk() if disk is None else disk
    path = os.path.abspath(directory_path(target))
    rules = rules or Rules()
    plan = _Plan(open_source(os.fspath(source), buffer_nbytes // 2), rules, buffer_nbytes, progress)
    is_model = form == "safetensors"
    if is_model:
        check_dtypes([*plan.tensors.values()], "leave it out with --exclude")
    beside = _beside(config, form)
    n_there = 0
    with workplace_of(disk, path) as place:
        _check_target(path, form, overwrite=overwrite)
        if is_model:
            note = {
                "source": _identity(disk, os.path.abspath(source)),
                "rules": asdict(rules),
                "shard": max_shard_nbytes,
            }
            place.begin(json.dumps(note, sort_keys=True).encode())
            disk.mkdirs(place.made)
            _check_room(disk, path, plan.nbytes - sum(each.stat().st_size for each in os.scandir(place.made)))
            # A piece is read, cast and written, and the next one is there by then.
            n_there = _write_model(plan, place.made, disk, max_shard_nbytes, max(buffer_nbytes // 8, 1), progress)
            for each in beside:
                shutil.copy(each, place.made)
        else:
            place.clear()
            unmapped = [tensor.nbytes for tensor in plan.tensors.values() if plan.mapped(tensor) is None]
            _check_room(disk, path, plan.nbytes + sum(unmapped))
            outline = {name: name for name in plan.names} if flat and form == "torch" else plan.outline()
            state_dict = filled(outline, lambda name: plan.value(name, place.directory))
            if form == "dcp":
                buffer_bytes = max(buffer_nbytes // 2, 1 << 20)
                writer = RobustWriter(
                    place.made, layout=layout, files_per_rank=files, buffer_bytes=buffer_bytes, report=False, disk=disk
                )
                writer.known_as = path
                save(state_dict, storage_writer=writer, planner=RobustPlanner(on_structure_change="quiet"))
                if plan.source.outline is not None:
                    _write_file(outline, os.path.join(place.made, OUTLINE_NAME))
            else:
                _write_file(state_dict, place.made)
            progress(plan.nbytes, plan.nbytes)
        place.publish()
    return ConversionReport(
        target=os.fspath(target),
        tensors=len(plan.tensors),
        objects=0 if is_model else len(plan.objects),
        nbytes=plan.nbytes,
        left_out=plan.objects if is_model else (),
        files_there=n_there,
        unused=tuple(rules.unused(plan.names)),
    )


class _Plan:
    """The items of the target, and their values.

    Args:
        source: where the data comes from.
        rules: what becomes of its items.
        buffer_nbytes: about how much is in memory at a time.
        progress: called with the bytes that were done, and all.

    Attributes:
        names: the old names by the new ones.
        tensors: with new names and dtypes, in the order of the source.
        objects: new names of other items.
        nbytes: bytes of all tensors.

    Raises:
        ValueError: two items would get one name, or a dtype is unknown, or nothing is left.
    """

    def __init__(
        self, source: Source, rules: Rules, buffer_nbytes: int, progress: Callable[[int, int], object]
    ) -> None:
        self.source = source
        self.names = rules.names([*source.tensors, *source.objects])
        dtypes = {name: _dtype_named(name) for _, name in rules.dtypes}
        if not self.names:
            raise ValueError("no item has a name that --select and --exclude let through")
        self.tensors: dict[str, NamedTensor] = {}
        for new, old in self.names.items():
            if old in source.tensors:
                _, dtype, shape = source.tensors[old]
                wanted = rules.dtype(new) if dtype.is_floating_point else None
                self.tensors[new] = NamedTensor(new, dtypes[wanted] if wanted else dtype, shape)
        self.objects = tuple(new for new in self.names if new not in self.tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._piece_nbytes = max(buffer_nbytes // 4, 1)
        self._progress = progress
        self._done_nbytes = 0

    def mapped(self, tensor: NamedTensor) -> torch.Tensor | None:
        """A tensor of the target that is there already, in a mapped file."""
        value = self.source.mapped.get(self.names[tensor.name])
        return value if value is not None and value.dtype == tensor.dtype else None

    def outline(self) -> Outline:
        """How the items are nested. An item with a new name stands at the top, under that name.

        Raises:
            ValueError: two items are in each other's way.
        """
        in_place = {new for new, old in self.names.items() if new == old}
        if self.source.outline is None:
            paths = self.source.paths
            return outline_of_paths({new: paths.get(new, (new,)) if new in in_place else (new,) for new in self.names})
        return with_items(self.source.outline, in_place, (new for new in self.names if new not in in_place))

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The data of pieces of :attr:`tensors`, contiguous and cast."""
        asked = [piece._replace(tensor=self.source.tensors[self.names[piece.tensor.name]]) for piece in pieces]
        values = self.source.read(asked)
        return [value.to(piece.tensor.dtype).contiguous() for value, piece in zip(values, pieces, strict=True)]

    def value(self, name: str, directory: str) -> Any:
        """An item as a whole value, which takes little memory: a large tensor that is not mapped already is read piece
        by piece into a file in ``directory`` that nobody else sees, and is mapped."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return self.source.load(self.names[name])
        mapped = self.mapped(tensor)
        if mapped is not None:
            # Its own elements only: torch.save would write all of the storage that a slice is of.
            is_whole = mapped.untyped_storage().nbytes() == mapped.nbytes and mapped.is_contiguous()
            return mapped if is_whole else mapped.clone(memory_format=torch.contiguous_format)
        value = _empty(tensor, directory)
        for batch in batches_of([tensor], self._piece_nbytes):
            for piece, data in zip(batch, self.read(batch), strict=True):
                box_of(value, piece).copy_(data)
            self._done_nbytes += sum(piece.nbytes for piece in batch)
            self._progress(self._done_nbytes // 2, self.nbytes)
        return value


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is no floating dtype of torch, such as bfloat16, float32 or float8_e4m3fn")
    return dtype


def _empty(tensor: NamedTensor, directory: str) -> torch.Tensor:
    if tensor.nbytes < _SMALL_NBYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    path = os.path.join(directory, f"scratch-{secrets.token_hex(8)}")
    try:
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk is an error now, and no signal later
        storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=tensor.nbytes)
    except OSError as error:
        raise storage_error("make", path, error) from error
    finally:
        with suppress(OSError):
            os.unlink(path)
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)


def _beside(config: str | os.PathLike[str] | None, form: Form) -> list[str]:
    """The files to copy from the directory of a Hugging Face model."""
    if config is None:
        return []
    if form != "safetensors":
        raise ValueError("--config is for --to safetensors: only a Hugging Face model has a config.json")
    names = sorted(os.listdir(config)) if os.path.isdir(config) else []
    if "config.json" not in names:
        raise ValueError(f"--config {os.fspath(config)}: there is no config.json")
    paths = [os.path.join(config, name) for name in names if _fits(name, _OF_A_MODEL)]
    return [path for path in paths if os.path.isfile(path)]


def _write_file(state_dict: Any, path: str) -> None:
    try:
        with open(path, "xb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error("write", path, error) from error


def _write_model(
    plan: _Plan,
    directory: str,
    disk: Disk,
    max_shard_nbytes: int,
    buffer_nbytes: int,
    progress: Callable[[int, int], object],
) -> int:
    """Write the files of a Hugging Face model that are not in ``directory`` yet, and their index. Each gets its name
    when it is durable. Returns how many files were there already.
    """
    shards = in_shards([*plan.tensors.values()], max_shard_nbytes)
    done = n_there = 0

    def read(pieces: Sequence[Piece]) -> list[torch.Tensor]:
        nonlocal done
        progress(done, plan.nbytes)  # what was read before is written by now, or just being written
        done += sum(piece.nbytes for piece in pieces)
        return plan.read(pieces)

    for name, shard in shards.items():
        path = os.path.join(directory, name)
        if disk.exists(path):
            n_there += 1
            done += sum(tensor.nbytes for tensor in shard)
            continue
        _finish(disk, path, partial(write_model_file, disk, tensors=shard, read=read, buffer_nbytes=buffer_nbytes))
        progress(done, plan.nbytes)
    _finish(disk, os.path.join(directory, INDEX_NAME), lambda file: disk.pwrite(file, index_of(shards), 0))
    return n_there


def _finish(disk: Disk, path: str, write: Callable[..., object]) -> None:
    """Write a file under another name, make it durable, and give it its own."""
    temporary = f"{path}.part"
    if disk.exists(temporary):
        disk.unlink(temporary)
    file = disk.open_new(temporary)
    try:
        write(file)
        disk.fsync(file)
        disk.rename(temporary, path)
    except BaseException:
        with suppress(StorageError):
            disk.unlink(temporary)
        raise
    finally:
        disk.close(file)


def _check_target(path: str, form: Form, *, overwrite: bool) -> None:
    """Find out before anything is made whether the target can be there.

    Raises:
        StorageError: it is there, and may not or cannot be replaced.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StorageError(f"{path} is there already; pass overwrite=True (--force) to replace it", path=path)
    if (form == "torch") == os.path.isdir(path):
        there, made = ("directory", "file") if form == "torch" else ("file", "directory")
        raise StorageError(
            f"{path} is there, and is not replaced, because it is a {there}, and a {made} is to be made; remove it, or "
            "take another name",
            path=path,
        )


def _check_room(disk: Disk, path: str, nbytes: int) -> None:
    _, free_nbytes = disk.room(os.path.dirname(path))
    if free_nbytes < nbytes:
        raise StorageError(f"{path} needs about {nbytes} bytes, and {free_nbytes} are free there", path=path)


def _identity(disk: Disk, path: str) -> list[Any]:
    """What tells whether a source is still the one that an earlier call has read: its files, sizes and times."""
    files = [path] if os.path.isfile(path) else []
    files += sorted(os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names)
    return [(file, *disk.fingerprint(file)[1:]) for file in files]
