"""``convert``: a checkpoint, or a file of ``torch.save``, in another form. It appears as a whole or not at all.

torch reads and writes files of ``torch.save``, ``robust_dcp.save`` writes checkpoints, and the files of a Hugging Face
model are filled piece by piece, by several ranks if they are given: each file has one owner. The target is made in a
directory beside it, ``….converting-…``, and is renamed when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from robust_dcp.api import save
from robust_dcp.comm import Channel, Offer
from robust_dcp.conversion.source import Path, Source, box_of, open_source
from robust_dcp.drain.record import digest_at
from robust_dcp.errors import PlanConflict, RobustCheckpointError, StorageError, entry_point, ranks_in_words
from robust_dcp.names import fit_nothing, fits
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.report import listed
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.kernel import exchange_names
from robust_dcp.storage.files.paths import METADATA_NAME, MODEL_INDEX_NAME, SAFETENSORS_SUFFIX, directory_path
from robust_dcp.storage.layouts.places import deal
from robust_dcp.storage.layouts.safetensors import files_of_tensors
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.model_file import check_dtypes, in_shards, index_of, write_model_file
from robust_dcp.storage.options import layout_named
from robust_dcp.storage.pieces import NamedTensor, Piece, batches_of
from robust_dcp.storage.writer import RobustWriter

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

_SHOWN: Final = 5
_SMALL_NBYTES: Final = 1 << 20


class Rules(msgspec.Struct, frozen=True):
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

    def names(self, names: Collection[str]) -> dict[str, str]:
        """The old names by the new ones, in the order of ``names``.

        Raises:
            ValueError: two items would get one name, or a pattern fits no item.
        """
        found: dict[str, str] = {}
        selected = [name for name in names if not self.select or fits(name, self.select)]
        taken = [name for name in selected if not fits(name, self.exclude)]
        for name in taken:
            new = self.renamed(name)
            if new in found:
                raise ValueError(f"{found[new]!r} and {name!r} would both be called {new!r}; change --rename")
            found[new] = name
        lefts = [left for left, _ in self.rename if not any(map(_pattern(left).fullmatch, taken))]
        for option, mistyped, among in (
            ("--select", fit_nothing(self.select, names), names),
            ("--exclude", fit_nothing(self.exclude, names), names),
            ("--rename", lefts, taken),
            ("--dtype", fit_nothing([glob for glob, _ in self.dtypes], found), found),
        ):
            if mistyped and among:
                shown = listed(map(repr, among), _SHOWN)
                raise ValueError(f"{option}: no item has a name that {mistyped[0]!r} fits; the names are {shown}")
        return found

    def renamed(self, name: str) -> str:
        """The new name of an item."""
        for left, right in self.rename:
            match = _pattern(left).fullmatch(name)
            if match is not None:
                groups = iter(match.groups())
                return "".join(next(groups) if part == "*" else part for part in re.split(r"(\*)", right))
        return name

    def dtype(self, name: str) -> str | None:
        """The name of the dtype that a floating tensor with this new name is cast to; ``None`` for its own."""
        return next((dtype for glob, dtype in reversed(self.dtypes) if fits(name, (glob,))), None)


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
    """

    target: str
    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...] = ()


class _Call(msgspec.Struct, frozen=True):
    """How ranks have called this.

    Attributes:
        ranks_of: by argument and value, in words, the ranks that have passed it.
        token: a text of this call.
    """

    ranks_of: dict[str, list[int]]
    token: str = ""

    @staticmethod
    def merge(calls: Sequence[_Call]) -> _Call:
        names = {name for each in calls for name in each.ranks_of}
        ranks_of = {name: [rank for each in calls for rank in each.ranks_of.get(name, ())] for name in names}
        return _Call(ranks_of, max(each.token for each in calls))


class _Written(msgspec.Struct, frozen=True):
    """``nbytes``: the lengths of the files that one rank has written."""

    nbytes: dict[str, int]


@entry_point
def convert(
    source: str | os.PathLike[str] | dict[str, Any],
    target: str | os.PathLike[str],
    *,
    form: Form,
    rules: Rules | None = None,
    flat: bool = False,
    layout: str = "torch",
    max_shard_nbytes: int = 5 << 30,
    config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    buffer_nbytes: int = 64 << 20,
    progress: Callable[[int, int], object] = lambda done, total: None,
    process_group: dist.ProcessGroup | None = None,
) -> ConversionReport:
    """Convert a checkpoint, a file of ``torch.save``, or what is live.

    Args:
        source: a checkpoint of any kind, or a file of ``torch.save`` with a state dict. Or a state dict as for
            ``save``, which is saved beside the target first: no rank has to hold more than its own shards.
        target: a directory, or for ``form="torch"`` a file.
        form: ``dcp``: a checkpoint that ``load`` reads; ``safetensors``: the files of a Hugging Face model;
            ``torch``: one file that ``torch.load`` reads, of a checkpoint.
        rules: which items, under which names, with which dtypes; ``None`` for all as they are.
        flat: for ``torch``: whether the names are the keys of one dict. Otherwise it is nested as the paths of the
            checkpoint say, which hold no number keys of dicts and no empty dicts.
        layout: for ``dcp``: the layout of the data files, as for ``RobustWriter``.
        max_shard_nbytes: for ``safetensors``: most bytes of tensors in one file.
        config: for ``safetensors``: a directory whose ``config.json`` and tokenizer are copied into the target. If its
            ``model.safetensors.index.json`` names all tensors, it also says which of them go into which file.
        overwrite: whether to replace a file, a checkpoint or a model that exists, with all that lies in its directory.
            It stays until the new one is whole.
        buffer_nbytes: about how much data is in memory at a time.
        progress: called with the bytes of tensors that were written, and of all.
        process_group: for ``safetensors``: the ranks that convert together, such as ``dist.group.WORLD``. All of them
            call this, and see the same directories. ``None`` for this process alone.

    Raises:
        ValueError: the rules do not fit the source, the form cannot hold an item, or there is no such layout.
        StorageError: the target exists, or a call failed.
        CorruptCheckpoint, UnsafeCheckpoint: the source is damaged, or no data.
        RobustCheckpointError: another rank has failed. There is no target then.
    """
    disk, is_model, alone = Disk(), form == "safetensors", process_group is None
    path = os.path.abspath(directory_path(target))
    channel = Channel.for_group(process_group, operation="convert", no_dist=alone)
    phase = f"convert to {os.fspath(target)}"
    arguments = {
        "source": "a state dict" if isinstance(source, dict) else repr(os.fspath(source)),
        "target": repr(os.fspath(target)),
        "form": repr(form),
        "rules": msgspec.json.encode(rules or Rules()).decode(),
        "flat": repr(flat),
        "layout": repr(layout),
        "max_shard_nbytes": repr(max_shard_nbytes),
        "config": repr(config and os.fspath(config)),
        "overwrite": repr(overwrite),
    }

    def note(done_nbytes: int, total_nbytes: int) -> None:
        progress(done_nbytes, total_nbytes)
        if not alone:
            channel.check_stop(done_nbytes, total_nbytes)

    def open_plan(place: str) -> _Plan:
        return _Plan(open_source(place, buffer_nbytes // 2), rules or Rules(), buffer_nbytes, note)

    def open_live(place: str) -> _Plan:
        def attempt() -> _Plan | ValueError:
            try:
                return open_plan(place)
            except RobustCheckpointError:
                raise
            except ValueError as error:  # of the rules, so every rank has it, and may raise it as it is
                return error

        # Whoever raises removes what all read, so they all have read it by then.
        outcome, _ = channel.agree(f"{phase}: what is live", attempt, lambda _: Offer())
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    with channel.together(), ExitStack() as stack:
        own = _Call(
            {f"{name}={value}": [channel.rank] for name, value in arguments.items()},
            secrets.token_hex(4) if channel.is_coordinator else "",
        )
        call = channel.reduce("convert: arguments", lambda: own, _Call, _Call.merge)
        differing = [(each, ranks) for each, ranks in call.ranks_of.items() if len(ranks) < channel.size]
        if differing:
            differing.sort(key=lambda each: (each[0].partition("=")[0], min(each[1])))
            called = listed(f"{each} on {ranks_in_words(ranks)}" for each, ranks in differing)
            raise PlanConflict(f"convert was called with {called}: pass the same on all ranks")
        layout_named(layout)
        if form not in get_args(Form):
            raise ValueError(f"form is one of {', '.join(get_args(Form))}, not {form!r}")
        asked = (flat, "--flat", "torch"), (layout != "torch", "--layout", "dcp"), (config, "--config", "safetensors")
        for is_given, option, made in asked:
            if is_given and form != made:
                raise ValueError(f"{option} is for --to {made}, not for --to {form}")
        if not (alone or is_model):
            raise ValueError(f"--to {form} is made by one process; only --to safetensors by several")
        beside = _beside(config)
        if isinstance(source, dict):
            made = stack.enter_context(_made_beside(disk, path, call.token))
            _check_target(path, form, overwrite=overwrite)
            live = os.path.join(os.path.dirname(made), "live")
            planner = RobustPlanner(on_structure_change="quiet")
            writer = RobustWriter(live, report=False)
            save(source, storage_writer=writer, planner=planner, process_group=process_group, no_dist=alone)
            plan = open_live(live)
        else:
            plan = open_plan(os.fspath(source))
            stack.enter_context(needed_for_a_load(disk, os.fspath(source)))
            made = stack.enter_context(_made_beside(disk, path, call.token))
            _check_target(path, form, overwrite=overwrite)
        stack.enter_context(_saying_room(disk, path, plan))

        def finish(messages: Sequence[_Written | None] = ()) -> None:
            """On one rank, when all have written."""
            progress(plan.nbytes, plan.nbytes)
            if is_model:
                _finish_model(shards, made, disk, [each for each in messages if each is not None])
                try:
                    for each in beside:
                        shutil.copy(each, made)
                except OSError as error:
                    raise storage_error("copy to", made, error) from error
            _check_target(path, form, overwrite=overwrite)  # again: another call may have made it
            _publish(disk, made, path)

        if is_model:
            check_dtypes([*plan.tensors.values()], "leave it out with --exclude")
            file_of = {} if config is None else files_of_tensors(disk, os.fspath(config))
            shards = in_shards([*plan.tensors.values()], max_shard_nbytes, file_of)
            if not alone:
                same = _digest_of(source, shards, disk)
                _, agreement = channel.agree(f"{phase}: what is read", lambda: Offer(same=same))
                if not agreement.is_same:
                    raise PlanConflict(
                        f"the ranks do not convert the same to {path}: some see another source, or another config"
                    )
            disk.mkdirs(made)
            owner, _ = deal(
                np.array([sum(each.nbytes for each in shard) for shard in shards.values()], dtype=np.int64),
                np.zeros(channel.size, dtype=np.int64),
            )
            nbytes = max(buffer_nbytes // 8, 1)  # a piece is read, cast and written, and the next one is there by then

            def write() -> _Written:
                """Write the files of this rank, durably."""
                lengths = {}
                for name in (name for name, rank in zip(shards, owner, strict=True) if rank == channel.rank):
                    path = os.path.join(made, name)
                    file = disk.open_new(path)
                    try:
                        write_model_file(disk, file, tensors=shards[name], read=plan.read, buffer_nbytes=nbytes)
                        disk.fsync(file)
                    finally:
                        disk.close(file)
                    lengths[name] = os.path.getsize(path)
                return _Written(lengths)

            if alone:
                finish([write()])
            else:
                channel.gather(f"{phase}: write", write, _Written, then=finish)
        else:
            paths = {new: plan.path_of(new, flat=flat and form == "torch") for new in plan.names}
            state_dict = _nested(paths, lambda: plan.values(os.path.dirname(made)))
            if form == "dcp":
                options: Any = {"layout": layout, "files_per_rank": 1, "report": False}
                writer = RobustWriter(made, **options, buffer_bytes=max(buffer_nbytes // 2, 1 << 20), disk=disk)
                writer.checkpoint_id = path
                planner = RobustPlanner(on_structure_change="quiet", no_dist=True)
                save(state_dict, storage_writer=writer, planner=planner)
            else:
                _write_file(state_dict, made)
            finish()
    return ConversionReport(
        target=os.fspath(target),
        tensors=len(plan.tensors),
        objects=0 if is_model else len(plan.objects),
        nbytes=plan.nbytes,
        left_out=plan.objects if is_model else (),
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
            raise ValueError("the source holds no item that --select and --exclude let through")
        self.tensors: dict[str, NamedTensor] = {}
        for new, old in self.names.items():
            if old in source.tensors:
                _, dtype, shape = source.tensors[old]
                wanted = rules.dtype(new) if _is_castable(dtype) else None
                self.tensors[new] = NamedTensor(new, dtypes[wanted] if wanted else dtype, shape)
        self.objects = tuple(new for new in self.names if new not in self.tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._piece_nbytes = max(buffer_nbytes // 4, 1)
        self._progress = progress
        self._done_nbytes = 0

    def path_of(self, name: str, *, flat: bool) -> Path:
        """The keys of an item. One with a new name stands at the top, under that name."""
        return (name,) if flat or self.names[name] != name else self.source.paths.get(name, (name,))

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The data of pieces of :attr:`tensors`, contiguous and cast."""
        self._progress(self._done_nbytes, self.nbytes)  # what was read before is written by now, or being written
        asked = [piece._replace(tensor=self.source.tensors[self.names[piece.tensor.name]]) for piece in pieces]
        values = self.source.read(asked)
        self._done_nbytes += sum(piece.nbytes for piece in pieces)
        return [value.to(piece.tensor.dtype).contiguous() for value, piece in zip(values, pieces, strict=True)]

    def values(self, directory: str) -> dict[str, Any]:
        """All items as whole values, which take little memory: a large tensor that is not mapped already is read piece
        by piece into a file in ``directory`` that nobody else sees, and is mapped."""
        mapped = {new: self.source.mapped.get(self.names[new]) for new in self.tensors}
        unread = [each for new, each in self.tensors.items() if getattr(mapped[new], "dtype", None) != each.dtype]
        values: dict[str, Any] = mapped | {each.name: _empty(each, directory) for each in unread}
        for batch in batches_of(unread, self._piece_nbytes):
            for piece, data in zip(batch, self.read(batch), strict=True):
                box_of(values[piece.tensor.name], piece).copy_(data)
        objects = self.source.load([self.names[new] for new in self.objects])
        return values | dict(zip(self.objects, objects, strict=True))


def _nested(paths: Mapping[str, Path], read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict with items at these paths. A dict by places is a list, unless a place is empty.

    Raises:
        ValueError: two items are in each other's way.
    """
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        inside: Any = root
        for key in path[:-1]:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else inside
        if not isinstance(inside, dict) or path[-1] in inside:
            raise ValueError(f"{name!r} stands where another item does, at {'.'.join(map(str, path))}; pass --flat")
        inside[path[-1]] = name

    values_of = read()

    def filled(node: Any) -> Any:
        if isinstance(node, str):
            return values_of[node]
        values = {key: filled(each) for key, each in node.items()}
        is_list = all(type(key) is int for key in values) and sorted(values) == list(range(len(values)))
        return [values[place] for place in range(len(values))] if is_list else values

    return {key: filled(each) for key, each in root.items()}


def _is_castable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and not str(dtype).endswith("_x2")  # which hold two values in one element


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not _is_castable(dtype):
        raise ValueError(f"{name!r} is no floating dtype of torch, such as bfloat16, float32 or float8_e4m3fn")
    return dtype


def _empty(tensor: NamedTensor, directory: str) -> torch.Tensor:
    if tensor.nbytes < _SMALL_NBYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        with NamedTemporaryFile(prefix="scratch-", dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk is an error now, and no signal later
            storage: Any = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=tensor.nbytes)
    except OSError as error:
        raise storage_error("make a file in", directory, error) from error
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)


def _beside(config: str | os.PathLike[str] | None) -> list[str]:
    """The files to copy from the directory of a Hugging Face model."""
    if config is None:
        return []
    names = sorted(os.listdir(config)) if os.path.isdir(config) else []
    if "config.json" not in names:
        raise ValueError(f"--config {os.fspath(config)}: there is no config.json")
    paths = [os.path.join(config, name) for name in names if fits(name, _OF_A_MODEL)]
    return [path for path in paths if os.path.isfile(path)]


def _write_file(state_dict: Any, path: str) -> None:
    try:
        with open(path, "xb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # While torch gives up its archive, it raises an error of its own over that of the system.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise storage_error("write", path, cause) from error


def _digest_of(source: Any, shards: Mapping[str, list[NamedTensor]], disk: Disk) -> bytes:
    """Of what is converted, and into which files, 16 bytes."""
    home = None if isinstance(source, dict) else os.path.join(os.fspath(source), METADATA_NAME)
    is_dcp = home is not None and disk.exists(home)
    digest = hashlib.blake2b((digest_at(disk, os.fspath(source)) if is_dcp else "").encode(), digest_size=16)
    for name, shard in shards.items():
        digest.update(repr((name, [(each.name, str(each.dtype), tuple(each.shape)) for each in shard])).encode())
    return digest.digest()


def _finish_model(
    shards: Mapping[str, Sequence[NamedTensor]], directory: str, disk: Disk, written: Sequence[_Written]
) -> None:
    """Write the index of a Hugging Face model, all files of which are here as their owners have written them.

    Raises:
        StorageError: this rank does not see a file as its owner has written it.
    """
    nbytes = {name: each.nbytes[name] for each in written for name in each.nbytes}
    for name in shards:
        path = os.path.join(directory, name)
        file = disk.fingerprint(path)
        if file is None or file[1] != nbytes.get(name):
            seen = "no file" if file is None else f"{file[1]} bytes"
            raise StorageError(
                f"{path}: expected the {nbytes.get(name)} bytes that its owner has written, found {seen}; all ranks of "
                "a conversion have to see one directory",
                path=path,
            )
    disk.write_file(os.path.join(directory, MODEL_INDEX_NAME), index_of(shards))


def _check_target(path: str, form: Form, *, overwrite: bool) -> None:
    """Find out whether the target can be there.

    Raises:
        StorageError: it is there, and may not or cannot be replaced.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StorageError(f"{path} is there already; pass overwrite=True (--force) to replace it", path=path)
    names = Disk().list_directory(path) if os.path.isdir(path) else []
    there = "directory" if os.path.isdir(path) else "file" if os.path.isfile(path) else "device, a pipe or a socket"
    if os.path.islink(path):
        there = "symbolic link"
    elif names and not any(name.endswith((METADATA_NAME, SAFETENSORS_SUFFIX)) for name in names):
        there = "directory without a checkpoint or a model"
    elif any(os.path.isdir(os.path.join(path, name)) for name in names):
        there = "directory that holds directories"
    if there != ("file" if form == "torch" else "directory"):
        raise StorageError(
            f"{path} is there, and is not replaced, because it is a {there}; remove it, or take another name", path=path
        )


@contextmanager
def _made_beside(disk: Disk, path: str, token: str) -> Iterator[str]:
    """The name under which the target is made: in a directory beside it that only this call uses, and removes. All
    ranks do, because the one that has made it may have been killed."""
    directory = f"{path}.converting-{token}"
    disk.mkdirs(directory)
    try:
        yield os.path.join(directory, "made")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _saying_room(disk: Disk, path: str, plan: _Plan) -> Iterator[None]:
    """An error of a full disk in the block says how much the target needs, and how much is free."""
    try:
        yield
    except StorageError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _, free_nbytes = disk.room(os.path.dirname(path))
            error.message += (
                f". {path} needs more than {plan.nbytes} bytes (--to dcp and torch need up to twice that for a while), "
                f"and {free_nbytes} bytes are free"
            )
        raise


def _publish(disk: Disk, made: str, path: str) -> None:
    """Give the target its name. An old one keeps it until that moment.

    Where the system can swap two names in one step (``renameat2`` of Linux), there is always something whole under the
    name. Elsewhere a process that is killed between two renames leaves the old directory as ``replaced`` beside it.
    """
    directory = os.path.dirname(made)
    disk.fsync_directory(directory)
    try:
        is_swapped = os.path.isdir(made) and os.path.lexists(path) and exchange_names(made, path)
    except OSError as error:
        raise storage_error("rename", path, error) from error
    if not is_swapped:
        replaced = os.path.join(directory, "replaced")
        if os.path.isdir(path):
            disk.rename(path, replaced)
        try:
            disk.rename(made, path)
        except StorageError:
            if os.path.lexists(replaced):
                disk.rename(replaced, path)
            raise
    disk.fsync_directory(os.path.dirname(path))
