"""A series: the checkpoints of one name below one directory, such as ``step_10``, ``step_20`` and ``step_30``.

    root/
      actor_100  actor_200  latest.actor_       the series "actor_{step}"
      step_100   step_200   latest              the series "step_{step}"
      iter_0000100  latest.iter_  latest_checkpointed_iteration.txt     "iter_{step:07d}", and Megatron's tracker
      wandb-2024  base_model_13                 what others have put there

Whatever is listed, loaded as the latest, kept or removed goes through a series, and a series sees nothing but its own
names. So several jobs can keep their checkpoints in one directory. This module reads names and small files, never data,
and does without torch.

A checkpoint stays if at least one policy keeps it. You can write your own policy:

.. code-block:: python

    class KeepFirst:
        def kept(self, checkpoints):
            return checkpoints[:1]

    CheckpointManager(root, keep=[KeepLast(3), KeepFirst()])

A series may lie in a store as well: the root is a URL then, and the disk that of the store. There a checkpoint is
removed in another order, since nothing can be renamed: a note of the removal, ``.metadata``, all other files that a
save or a copy of ours gives such names, the note. Only a checkpoint goes whose record names this series. So the record
is there before the checkpoint counts, and also has what it says of the checkpoint whose place this one takes.

Only what carries our mark is removed: a checkpoint whose ``.metadata`` is ours, files with the mark of a crashed save,
and directories that an earlier removal has renamed. A checkpoint is first renamed to a name that no checkpoint has.
Then its files are removed. If the process is killed in between, the next removal finds the directory by its name. So at
no moment does half a checkpoint have its old name. A checkpoint that is being loaded or saved to stays.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from errno import ENOENT, ENOTDIR
from functools import partial
from itertools import islice
from operator import ne
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec

from robust_dcp import errors
from robust_dcp.decoding import from_json
from robust_dcp.drain.record import digest_at, inode_of, is_awaited
from robust_dcp.nodes.parity_file import read_parity_note
from robust_dcp.storage.committing.saving_file import claimed, is_gone, sweep
from robust_dcp.storage.files.disk import Disk, storage_error
from robust_dcp.storage.files.paths import (
    COPYING_PREFIX,
    METADATA_NAME,
    READ_BY_NAME,
    RECORD_NAME,
    REMOVING_PREFIX,
    SAVING_PREFIX,
    is_url,
    metadata_name,
    writer_of,
)
from robust_dcp.storage.files.small_files import pass_over, read_hint
from robust_dcp.storage.files.what_is_there import TRACKER_NAME, why_no_bucket
from robust_dcp.storage.metadata.stored_pickle import (
    TRAILER_NBYTES,
    files_are_marked,
    is_cut_off,
    not_being_loaded,
    pickle_in,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# No hidden name, and no digit right before the step: "run2_10" is step 10 of "run2_", and never step 2.
_DIRECTORY: Final = re.compile(r"(?!\.)(?P<prefix>(?:[^/]*[^/0-9])?)(?P<step>[0-9]{1,18})")
LATEST_NAME: Final = "latest"
_DIGEST_LENGTH: Final = 16
_NAME_ADVICE: Final = "use a name that ends in the step, of at most 18 digits, such as 'iter_{step:07d}'"
_MOST_NAME_NBYTES: Final = 4096
_MOST_RECORD_NBYTES: Final = 1 << 20
_OVER_AFTER_SECONDS: Final = 3600.0
_THREADS: Final = 8  # each call to a store takes some ten milliseconds
_UNFINISHED: Final = (SAVING_PREFIX, COPYING_PREFIX)
_OF_OURS: Final = ".robust_dcp."
_TAIL_NBYTES: Final = 4096


class Job(msgspec.Struct, frozen=True, order=True):
    """The job that has saved a step.

    Attributes:
        id: tells it from others.
        host, pid: of its coordinator.
        started_seconds: when it first looked at the series, in seconds since 1970, by the clock of the file system.
        loaded: the id of the job whose checkpoint it went on from; empty if there was none.
        directory: the inode of the step's directory. A record that was copied along with its checkpoint lies in another
            one, and says nothing of who saves here.
    """

    id: str
    host: str
    pid: int
    started_seconds: float
    loaded: str = ""
    directory: int = 0


class Checkpoint(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A committed checkpoint. ``.robust_dcp.step.json`` beside its ``.metadata`` is its record. One without that file
    loads like any other.

    Attributes:
        step: the number in its name.
        path: its directory.
        saved_seconds: when it was committed, in seconds since 1970, by the clock of the file system. 0 in a record that
            was written before that, in a store: a later one says that the series has named it as the latest.
        metrics: what the training loop said of it, such as ``{"loss": 2.31}``.
        digest: tells its save from others. A record of another save does not count: it is still there if a save into
            the same directory was killed right after its commit. Empty in records of earlier versions.
        job: who has saved it; ``None`` if it was not a manager.
        series: the prefix of the names of the series that it was saved in.
        earlier: the record of the checkpoint that is at its place until it is committed.
        follows: what ``latest`` said right before that, in a store, as Python spells it.
    """

    step: int
    path: str = ""
    saved_seconds: float = 0.0
    metrics: dict[str, float] = {}
    digest: str = ""
    job: Job | None = None
    series: str | None = None
    earlier: Checkpoint | None = None
    follows: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return os.path.basename(self.path)


class KeepPolicy(Protocol):
    """Says which checkpoints are to stay."""

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        """Those of ``checkpoints``, which are sorted by step, that are to stay.

        It is asked a second time, for those up to the latest, after a job has gone back to an earlier step.
        """


@dataclass(frozen=True)
class KeepLast:
    """The ones with the highest steps.

    Attributes:
        number: how many, at least 1.
    """

    number: int

    def __post_init__(self) -> None:
        _check_number("number", self.number)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        return checkpoints[-self.number :]


@dataclass(frozen=True)
class KeepEvery:
    """Those whose step is a multiple of a number.

    Attributes:
        steps: the number, at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_number("steps", self.steps)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        return [each for each in checkpoints if each.step % self.steps == 0]


@dataclass(frozen=True)
class KeepBest:
    """The best ones by a metric. Of equal ones the newest.

    A checkpoint without the metric (NaN is none) is not rated. The other policies decide on it. If there are only such
    policies, and none of them rates it, it stays: a mistyped name must not cost the history of a run.

    Attributes:
        metric: its name.
        number: how many.
        best: whether the smallest or the largest value is best.
    """

    metric: str
    number: int = 1
    best: Literal["smallest", "largest"] = "smallest"

    def __post_init__(self) -> None:
        _check_number("number", self.number)
        if not isinstance(self.metric, str):
            raise ValueError(f"keep_best is the name of a metric, not {self.metric!r}")
        if self.best not in ("smallest", "largest"):
            raise ValueError(f"best is 'smallest' or 'largest', not {self.best!r}")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> Iterable[Checkpoint]:
        sign = 1 if self.best == "smallest" else -1
        rated = list(filter(self.rates, checkpoints))
        rated.sort(key=lambda each: (sign * each.metrics[self.metric], -each.step))
        return rated[: self.number]

    def rates(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has the metric."""
        return not math.isnan(checkpoint.metrics.get(self.metric, math.nan))


def _check_number(name: str, value: object) -> None:
    """Now, because a policy that fails when it is asked is only logged, and then nothing is ever removed."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1, and a whole number, got {value!r}")


def policies_of(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    more: Sequence[KeepPolicy] = (),
) -> list[KeepPolicy]:
    """The policies that short arguments ask for.

    Raises:
        TypeError: one of ``more`` has no method ``kept``.
        ValueError: a number is out of range.
    """
    short: dict[Callable[[Any], KeepPolicy], Any] = {KeepLast: keep_last, KeepEvery: keep_every, KeepBest: keep_best}
    policies = [*more, *(policy(value) for policy, value in short.items() if value is not None)]
    for each in policies:
        if isinstance(each, type) or not callable(getattr(each, "kept", None)):
            raise TypeError(f"keep is a list of policies, such as [KeepLast(3)], and {each!r} has no method kept")
    return policies


class Series:
    """The checkpoints of one name below one directory.

    Args:
        disk: the file system.
        root: the directory.
        name: the name of a step's directory, as a format: ``"iter_{step:07d}"`` is Megatron's. Zeros before a step do
            not matter: ``step_7`` and ``step_0007`` are of one series.

    Attributes:
        prefix: what all its names begin with, up to the step. This is what tells a series from others.
        latest_name: the file that names its latest checkpoint.
        tracker_name: Megatron's tracker file if it is of this series, too.

    Raises:
        ValueError: the name does not end in the step.
    """

    def __init__(self, disk: Disk, root: str, name: str = "step_{step}") -> None:
        self.disk = disk
        self.is_in_store = is_url(root)
        self.root = root if self.is_in_store else os.path.normpath(root)
        self.name = name
        self.prefix, _ = parse_name(self._formatted(0)) or ("", 0)
        if any(self.step_of(self._formatted(step)) != step for step in (0, 1234567)):
            raise ValueError(f"name={name!r} does not say which step a directory is of; {_NAME_ADVICE}")
        self.latest_name = LATEST_NAME if self.prefix == "step_" else f"{LATEST_NAME}.{self.prefix}"
        self.tracker_name = TRACKER_NAME if self.prefix == "iter_" else None
        self._missed_metrics: set[str] = set()

    def path_of(self, step: int) -> str:
        """The directory of a step.

        Raises:
            ValueError: it is no whole number from 0 on, or has more than 18 digits.
        """
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"a step is a whole number from 0 on, got {step!r}")
        name = self._formatted(number)
        if self.step_of(name) != number:
            raise ValueError(f"a directory {name!r} could not be found again as step {number}; {_NAME_ADVICE}")
        return os.path.join(self.root, name)

    def step_of(self, name: str) -> int | None:
        """The step that the name of a directory says; ``None`` if it is not a name of this series."""
        prefix, step = parse_name(name) or (None, None)
        return step if prefix == self.prefix else None

    def is_there(self) -> bool:
        """Whether the root is there. Nothing is before the first save, but for the bucket.

        Raises:
            StorageError: it cannot be looked at, or its bucket does not exist.
        """
        if self.disk.exists(self.root):
            return True
        # Other clients than that of S3 say the same of an empty bucket that one may not look at.
        if self.root.startswith(("s3://", "s3a://")) and (no_bucket := why_no_bucket(self.disk, self.root)):
            raise errors.StorageError(no_bucket, path=self.root, errno=ENOENT, operation="look at")
        return False

    def directories(self, names_in: Callable[[str], list[str]] | None = None) -> list[str]:
        """The paths of all directories that have a name of this series, whatever they hold, and links to such.

        Args:
            names_in: lists a directory; by default it gives directories only.

        Raises:
            StorageError: the root cannot be looked at.
        """
        names = (names_in or self.disk.directories_in)(self.root) if self.is_there() else []
        return [os.path.join(self.root, name) for name in names if self.step_of(name) is not None]

    def look(self, *, skips_unknown: bool = True, by_ranks: bool = False) -> list[Checkpoint]:
        """The committed checkpoints, by step, without those that vanish meanwhile.

        Args:
            skips_unknown: leave out directories that cannot be looked into, too.
            by_ranks: with those that DCP has saved with ``use_collectives=False``, where each rank leaves a file.

        Raises:
            StorageError: the root cannot be looked at, or a directory of a step, which may hold a checkpoint.
        """

        def look_at(path: str) -> Checkpoint | None:
            metadata = os.path.join(path, METADATA_NAME)
            try:
                if by_ranks and not self.disk.exists(metadata):
                    metadata = os.path.join(path, metadata_name(0))
                if not self.disk.exists(metadata):  # not by an error, because our errors need torch
                    return None
                saved_seconds = self.disk.modified_seconds(metadata)
                record = self.record_at(path) or Checkpoint(0)
            except errors.StorageError as error:
                if skips_unknown or error.errno in (ENOENT, ENOTDIR):
                    return None
                raise
            step = self.step_of(os.path.basename(path)) or 0
            return msgspec.structs.replace(record, step=step, path=path, saved_seconds=saved_seconds)

        paths = self.directories(self.disk.list_directory)  # whether each is a directory may not be known now
        with ThreadPoolExecutor(_THREADS) if self.is_in_store else nullcontext() as pool:
            checkpoints = list(filter(None, pool.map(look_at, paths) if pool else map(look_at, paths)))
        return sorted(checkpoints)

    def record_at(self, path: str) -> Checkpoint | None:
        """The record of a checkpoint; ``None`` if it has none of its own, or it cannot be understood.

        Raises:
            StorageError: it cannot be read.
        """
        file, decode = os.path.join(path, RECORD_NAME), partial(from_json, kind=Checkpoint)
        record = read_hint(self.disk, file, decode, what="the record of a step", at_most=_MOST_RECORD_NBYTES)
        if record is None or record.digest == "":
            return record
        digest = digest_at(self.disk, path)
        record = record if record.digest == digest else record.earlier
        if record is None or record.digest != digest:
            return None
        return msgspec.structs.replace(record, earlier=None)

    def noted_latest(self) -> Checkpoint | None:
        """The step that ``latest`` names, as its record has it; ``None`` if one of the two cannot be understood. It
        costs the same however many steps there are.

        Raises:
            StorageError: a file cannot be read.
        """
        text = self._text(self.latest_name)
        name = "" if text is None else text[_DIGEST_LENGTH:].strip()
        if self.step_of(name) is None:
            return None
        path = os.path.join(self.root, name)
        record = self.record_at(path)
        if record is None:
            return None
        is_copy = record.job is not None and record.job.directory != inode_of(self.disk, path)
        return msgspec.structs.replace(record, path=path, job=None if is_copy else record.job)

    def is_unfinished_name(self, name: str) -> bool:
        """Whether ``latest`` or the tracker has this name while it is written."""
        stem, _, mark = name.removesuffix(".tmp").rpartition(".")
        is_ours = stem in (self.latest_name, self.tracker_name) and name.endswith(".tmp")
        return is_ours and re.fullmatch("[0-9a-f]{16}", mark) is not None

    def decide(
        self, policies: Sequence[KeepPolicy], *, right_after_save: bool = False
    ) -> list[tuple[Checkpoint, str | None]]:
        """The checkpoints, by step, each with why it stays if no policy keeps it; ``None`` if it is to be removed.
        Without a policy all stay.

        If the latest checkpoint is not the one with the highest step, the job has gone back to an earlier step. Then
        each policy is asked twice: for all checkpoints, and for those up to the latest. So what was saved before the
        job went back takes no place from what it saves now, and is not removed for it.

        The latest and the newest stay whatever the policies say, and so do links, what robust_dcp has not saved, what
        has not arrived where it is copied to, and the newest one that outlives the loss of a node. So does the newest
        one whose ``.metadata`` is whole, which needs no look right after a save.

        Raises:
            StorageError: the root cannot be looked at.
        """
        checkpoints = self.look()
        if not policies:
            return [(each, "") for each in checkpoints]
        latest = self.latest_of(checkpoints)
        until_latest = [each for each in checkpoints if latest is not None and each.step <= latest.step]
        asked = [checkpoints] if until_latest == checkpoints else [checkpoints, until_latest]
        kept = {each.path for policy in policies for among in asked for each in policy.kept(among)}
        looked_at = () if right_after_save else checkpoints[::-1]
        whole = islice(filter(self._is_whole, looked_at), 1)
        kept |= {each.path for each in (latest, *checkpoints[-1:], *whole) if each is not None}
        kept |= {each.path for each in self._not_rated(policies, checkpoints)}
        on_drives = () if self.is_in_store else reversed(checkpoints)
        protected = next((each for each in on_drives if read_parity_note(self.disk, each.path)), None)
        kept |= set() if protected is None else {protected.path}
        return [(each, "" if each.path in kept else self._why_it_stays(each.path)) for each in checkpoints]

    def _not_rated(self, policies: Sequence[KeepPolicy], checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints of which no policy can say anything, as they lack its metric. A metric that one of them lacks
        is named in one warning."""
        of_metrics = [policy for policy in policies if isinstance(policy, KeepBest)]
        for policy in of_metrics:
            unrated = [each for each in checkpoints if not policy.rates(each)]
            if unrated and policy.metric not in self._missed_metrics:
                self._missed_metrics.add(policy.metric)
                there = sorted({name for each in checkpoints for name in each.metrics})
                logger.warning(
                    "%s: %s of %s checkpoints, such as %s, lack the metric %r of keep_best: %s. %s",
                    self.root,
                    len(unrated),
                    len(checkpoints),
                    unrated[-1].name,
                    policy.metric,
                    "they stay" if len(of_metrics) == len(policies) else "the other policies decide",
                    f"The metrics that there are: {', '.join(there)}" if there else "No checkpoint has any metric",
                )
        if len(of_metrics) < len(policies):
            return []
        return [each for each in checkpoints if not any(policy.rates(each) for policy in of_metrics)]

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        """Whether its ``.metadata`` is not damaged."""
        path = os.path.join(checkpoint.path, METADATA_NAME)
        try:
            data = self.disk.read_file(path) or b""
            pickle_in(data, path)
            return not is_cut_off(len(data), data)
        except (errors.StorageError, errors.CorruptCheckpoint):
            return False

    def is_ours(self, path: str) -> bool:
        """Whether a checkpoint carries our mark: ``.metadata`` ends as only ours does. Nobody else's is ever removed.

        Raises:
            StorageError: it cannot be read.
        """
        return files_are_marked(self.disk.read_end(os.path.join(path, METADATA_NAME), TRAILER_NBYTES)[1])

    def may_be_removed(self, path: str) -> bool:
        """Whether a checkpoint carries our mark, and in a store that of this series: others may keep theirs there.

        Raises:
            StorageError: it cannot be read.
        """
        if self.is_in_store:
            record = self.record_at(path)
            if record is None or record.series != self.prefix:
                return False
        return self.is_ours(path)

    def note_before_commit(self, record: Checkpoint, staged: str, *, overwrite: bool) -> tuple[str, ...]:
        """Put the record of a step that goes to a store beside what the save has staged, so it arrives before
        ``.metadata``: whenever the job is killed, the checkpoint has the mark of the series.

        Args:
            overwrite: whether a checkpoint of this series may be replaced.

        Returns:
            The digest of the checkpoint of this series whose place it takes, if there is one. Over any other the save
            is refused.

        Raises:
            StorageError: a call failed.
        """
        path, local = self.path_of(record.step), Disk()
        is_there = self.disk.exists(os.path.join(path, METADATA_NAME))
        earlier = self.record_at(path) if is_there else None
        follows = ascii(self._text(self.latest_name))  # it may be damaged, and no UTF-8
        noted = msgspec.structs.replace(record, digest=digest_at(local, staged), earlier=earlier, follows=follows)
        local.replace_file(os.path.join(staged, RECORD_NAME), msgspec.json.encode(noted))
        return (digest_at(self.disk, path),) if is_there and overwrite and self.may_be_removed(path) else ()

    def was_cut_off(self, path: str) -> bool:
        """Whether a checkpoint is ours, and its save was killed before it had named it as the latest.

        Raises:
            StorageError: it cannot be read.
        """
        record = self.record_at(path)
        is_unnamed = record is None if not self.is_in_store else record is not None and not record.saved_seconds
        return is_unnamed and self.is_ours(path)

    def _why_it_stays(self, path: str) -> str | None:
        """Why a checkpoint may not be removed although no policy keeps it."""
        try:
            if os.path.islink(path):
                return "somebody has put a link there"
            if not self.may_be_removed(path):
                return "this series has not saved it" if self.is_ours(path) else "robust_dcp has not saved it"
            return "its copy has not arrived" if is_awaited(self.disk, path) else None
        except errors.StorageError as error:
            return f"it cannot be read: {error.message}"

    def latest_of(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The one that is named as the latest; the one with the highest step if none is named, or the name is not true.

        If a save was killed right after its commit, its checkpoint is later than the named one: it is ours, no record
        says that it was named, and it was committed after the name was written. Nothing else is taken for it, since a
        job may have gone back, and a copy of the root may have other times.

        Megatron's tracker comes first: each of our saves moves it too, and a job may have gone on without us.

        Args:
            checkpoints: those of the series, by step.

        Raises:
            StorageError: the file that names it is there and cannot be read, or one that may be later.
        """
        iteration = self._text(self.tracker_name) if self.tracker_name else None
        tracked = next((each for each in checkpoints if iteration and str(each.step) == iteration.strip()), None)
        latest_path = os.path.join(self.root, self.latest_name)
        text = self._text(self.latest_name) if checkpoints else None
        named = None if text is None else self._named_by(text, checkpoints)
        if tracked is not None:
            if named is not None and named.saved_seconds > tracked.saved_seconds:
                pass_over(latest_path, f"it names {named.name}, and {self.tracker_name} an earlier one, {tracked.name}")
            return tracked
        if text is not None:
            written = self.disk.modified_seconds(latest_path)
            by_time = sorted(checkpoints, key=lambda each: each.saved_seconds)
            # The times of stores are whole seconds.
            may_follow = (
                each
                for each in by_time
                if each.saved_seconds > written or (each.saved_seconds == written and each.follows == ascii(text))
            )
            later = [each for each in may_follow if self.was_cut_off(each.path)]
            if later:
                return later[-1]
            if named is None:
                pass_over(latest_path, f"{text!r:.100} names no save that is there; {checkpoints[-1].name} is taken")
        return named or next(iter(checkpoints[-1:]), None)

    def _named_by(self, latest: str, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The checkpoint that ``latest`` names: the digest of its save, and its name. A person may give the name alone.

        One flipped bit in a name may make that of another checkpoint, whose digest differs. One in the digest leaves
        all but one of its digits. Two saves never have that much in common.
        """
        digest, name = latest[:_DIGEST_LENGTH], latest[_DIGEST_LENGTH:].strip()
        for each in checkpoints:
            if each.name == latest.strip():
                return each
        for each in sorted(checkpoints, key=lambda each: each.name != name):  # the one of this name first
            actual = digest_at(self.disk, each.path)
            if len(digest) == len(actual) and sum(map(ne, digest, actual)) <= 1:
                if (digest, name) != (actual, each.name):
                    path = os.path.join(self.root, self.latest_name)
                    pass_over(path, f"{latest!r:.100} is damaged; it means {each.name}, whose digest is {actual}")
                return each
        return None

    def move_latest(self, path: str, digest: str) -> None:
        """Name another checkpoint, durably. In Megatron's series its tracker is kept up too, where there is one.

        Args:
            digest: of its save.

        Raises:
            StorageError: a call failed; the old one is named, or the new one.
        """
        name = os.path.basename(path)
        self.disk.replace_file(os.path.join(self.root, self.latest_name), os.fsencode(f"{digest} {name}\n"))
        if self.tracker_name and self.disk.exists(os.path.join(self.root, self.tracker_name)):
            self.disk.replace_file(os.path.join(self.root, self.tracker_name), str(self.step_of(name)).encode())

    def _formatted(self, step: int) -> str:
        try:
            return self.name.format(step=step)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"name={self.name!r} is no format for a step: {error!r}; {_NAME_ADVICE}") from error

    def _text(self, name: str) -> str | None:
        path = os.path.join(self.root, name)
        return read_hint(self.disk, path, os.fsdecode, what="the name of a checkpoint", at_most=_MOST_NAME_NBYTES)


def parse_name(name: str) -> tuple[str, int] | None:
    """What the name of a directory begins with, and the step in which it ends; ``None`` if it ends in none."""
    parts = _DIRECTORY.fullmatch(name)
    return None if parts is None else (parts["prefix"], int(parts["step"]))


def series_in(disk: Disk, root: str) -> list[Series]:
    """The series below a directory that hold a checkpoint, of whomever, or a save of ours that has not committed.

    Raises:
        StorageError: the root cannot be looked at.
    """
    found: dict[str, Series] = {}
    for name in disk.directories_in(root):
        prefix, _ = parse_name(name) or (None, None)
        path = os.path.join(root, name)
        if prefix is None or prefix in found:
            continue
        try:
            names = disk.list_directory(path)
        except errors.StorageError:
            continue
        if any(each.endswith(METADATA_NAME) or each.startswith(_UNFINISHED) for each in names):
            found[prefix] = Series(disk, root, prefix.replace("{", "{{").replace("}", "}}") + "{step}")
    return list(found.values())


def prune(
    series: Series,
    policies: Sequence[KeepPolicy],
    *,
    only: Collection[str] | None = None,
    right_after_save: bool = False,
) -> dict[str, list[str]]:
    """Remove what no policy keeps, and what crashed saves and removals that were cut off have left.

    Links, directories without a trace of us, and files that are not ours stay as they are. What cannot be removed is
    logged, and all else is removed all the same.

    Args:
        only: paths of checkpoints; no others are removed. ``None`` for no such limit.
        right_after_save: as for :meth:`Series.decide`.

    Returns:
        Paths of directories: ``removed``, checkpoints that are gone; ``in_use``, checkpoints that stay for now, because
        they are being loaded or saved; ``swept``, leftovers of crashed saves that are gone; ``failed``, checkpoints
        that could not be removed.

    Raises:
        StorageError: the root cannot be looked at.
    """
    disk, root = series.disk, series.root
    pruned: dict[str, list[str]] = {"removed": [], "in_use": [], "swept": [], "failed": []}
    if not series.is_there():  # nothing was saved yet
        return pruned
    end_removals(series)
    for name in filter(series.is_unfinished_name, disk.list_directory(root)):
        _attempt(_remove_unfinished, series, os.path.join(root, name))
    for path in series.directories():
        is_swept = _attempt(_sweep_store, series, path) if series.is_in_store else _attempt(sweep, disk, path)
        if is_swept:
            pruned["swept"].append(path)
    decided = series.decide(policies, right_after_save=right_after_save)
    doomed = [each.path for each, why_it_stays in decided if why_it_stays is None]
    for path in [each for each in doomed if only is None or each in only]:
        outcomes = {True: "removed", False: "in_use", None: "failed"}
        pruned[outcomes[_attempt(_remove, series, path)]].append(path)
    return pruned


def end_removals(series: Series) -> None:
    """Go on with removals that were cut off.

    Raises:
        StorageError: the root cannot be looked at.
    """
    for name in series.disk.list_directory(series.root) if series.is_there() else ():
        if name.startswith(REMOVING_PREFIX) and series.step_of(name.removeprefix(REMOVING_PREFIX)) is not None:
            _attempt(_end_removal, series, os.path.join(series.root, name))


def _attempt(remove: Callable[[T, str], bool], where: T, path: str) -> bool | None:
    """Whether a directory is gone: ``False`` if a save runs there, ``None`` if that failed, which is logged."""
    try:
        return remove(where, path)
    except errors.StorageError as error:
        if error.errno == ENOENT and not os.path.lexists(path):  # another process has removed it meanwhile
            return True
        if error.operation == "begin":
            return False
        logger.warning("%s is not removed: %s", path, error.message)
        return None


def _remove(series: Series, path: str) -> bool:
    """Remove a checkpoint with all that lies in its directory.

    Returns:
        ``False`` if it is being loaded or saved to, or does not carry our mark any more; then nothing has been touched.

    Raises:
        StorageError: a save runs there (the operation is ``begin``), or a call failed. If the checkpoint has lost its
            name, the next :func:`prune` goes on.
    """
    disk, doomed = series.disk, os.path.join(series.root, f"{REMOVING_PREFIX}{os.path.basename(path)}")
    if series.is_in_store:
        if not series.may_be_removed(path):
            return False
        disk.replace_file(doomed, digest_at(disk, path).encode())
        return _end_removal(series, doomed)
    if disk.exists(doomed):  # an earlier removal of that name was cut off
        _remove_tree(disk, doomed)
    with claimed(disk, path), not_being_loaded(disk, path) as is_free:
        if not is_free or not series.may_be_removed(path):  # stock may have saved over it meanwhile
            return False
        disk.rename(path, doomed)
    disk.fsync_directory(series.root)
    return _end_removal(series, doomed)


def _end_removal(series: Series, doomed: str) -> bool:
    """Go on with a removal. In a store it may be that of a checkpoint whose place a later save has taken.

    Returns:
        Whether the checkpoint is gone. In a store not if a copy to its place has begun.

    Raises:
        StorageError: a call failed.
    """
    disk, name = series.disk, os.path.basename(doomed).removeprefix(REMOVING_PREFIX)
    if not series.is_in_store:
        return _remove_tree(disk, doomed)
    path = os.path.join(series.root, name)
    names = disk.list_directory(path) if disk.exists(path) else []
    if _is_copied_to(series, path, names):
        return False
    if METADATA_NAME not in names or digest_at(disk, path) == (disk.read_file(doomed, _DIGEST_LENGTH) or b"").decode():
        for each in sorted(filter(_is_of_ours, names), key=METADATA_NAME.__ne__):  # what is left is no checkpoint
            disk.unlink(os.path.join(path, each))
    disk.unlink(doomed)
    return True


def _is_of_ours(name: str) -> bool:
    """Whether a save or a copy of ours gives a file such a name. No other file in a store is removed."""
    writer = writer_of(name)
    return (writer is not None and bool(writer.mark)) or name in READ_BY_NAME or name.startswith(_OF_OURS)


def _over_before_seconds(series: Series) -> float:
    """What began before is over: an hour before ``latest`` was moved again."""
    disk, latest_path = series.disk, os.path.join(series.root, series.latest_name)
    return (disk.modified_seconds(latest_path) if disk.exists(latest_path) else 0.0) - _OVER_AFTER_SECONDS


def _is_copied_to(series: Series, path: str, names: Iterable[str]) -> bool:
    """Whether a copy to a place in a store may still run. There are no locks that would tell."""
    claims = [os.path.join(path, name) for name in names if name.startswith(COPYING_PREFIX)]
    over_seconds = _over_before_seconds(series) if claims else 0.0
    return any(series.disk.modified_seconds(claim) > over_seconds for claim in claims)


def _sweep_store(series: Series, path: str) -> bool:
    """Remove what a copy to a store has left that was killed: before it committed all, after that what it had not
    removed yet of the checkpoint whose place it took. Returns whether the directory is gone.
    """
    disk = series.disk
    names = disk.list_directory(path)
    if not any(name.startswith(COPYING_PREFIX) for name in names) or _is_copied_to(series, path, names):
        return False
    is_committed = METADATA_NAME in names
    left = [name for name in names if name.startswith(COPYING_PREFIX) or (not is_committed and _is_of_ours(name))]
    if is_committed:
        # The end of .metadata holds the id of its save, which begins with the mark.
        end = disk.read_end(os.path.join(path, METADATA_NAME), _TAIL_NBYTES)[1].replace(b"-", b"")
        marks = {name: writer.mark for name in names if (writer := writer_of(name)) and writer.mark}
        others = [name for name, mark in marks.items() if mark.encode() not in end]
        left += others if len(others) < len(marks) else []
    for name in sorted(left, key=lambda name: name.startswith(COPYING_PREFIX)):
        disk.unlink(os.path.join(path, name))
    return not is_committed


def _remove_unfinished(series: Series, path: str) -> bool:
    """Remove the new ``latest`` or tracker of a job that was killed before its rename. Returns whether it is gone."""
    is_over = series.disk.modified_seconds(path) < _over_before_seconds(series)
    return is_over and is_gone(series.disk.unlink, path, tells=True)


def _remove_tree(disk: Disk, path: str) -> bool:
    """Remove a directory. Another process may do the same meanwhile. What a symbolic link leads to stays."""
    if os.path.islink(path):
        return is_gone(disk.unlink, path, tells=True)
    try:
        shutil.rmtree(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise storage_error("remove", path, error) from error
    return True
