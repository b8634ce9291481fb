"""Notices two live jobs in one series: torchrun's agent was killed, its workers live on, and the job was restarted.

Each step's record says which job has saved it. A job remembers what was there when it first looked, and what it has
loaded. If ``latest`` names a step of another job that came later, that job lives, too. Then the older one stops saving,
and the newer one warns, once. Nothing is locked, so nothing outlives a machine. A job that goes back to an earlier step
finds what it has seen before.

Which job is older does not rest on the clocks of two machines. A job that another has loaded from is older, and so is
one whose steps were there at the first look. Between others decides when they first looked, by the clock of the file
system.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from robust_dcp.drain.record import inode_of
from robust_dcp.errors import StorageError
from robust_dcp.manager.series import Checkpoint, Job, Series

logger = logging.getLogger(__name__)


@functools.cache
def _id_of(pid: int) -> str:
    """The id of the job that this process saves for, as all its managers do. A forked child is of another one."""
    return secrets.token_hex(8)


def _now_seconds() -> float:
    """A clock that goes on while the machine sleeps: a job that was suspended is no newer for that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class JobInSeries:
    """This job in a series, as the coordinator of its saves knows it.

    Args:
        series: the series.
    """

    def __init__(self, series: Series) -> None:
        self._series = series
        self._looked_at_seconds: float | None = None
        self._seen: set[tuple[str, str]] = set()
        self._seen_jobs: set[str] = set()
        self._loaded = ""
        self._started_seconds = 0.0
        self._has_warned = False

    @property
    def id(self) -> str:
        """Tells this job from others."""
        return _id_of(os.getpid())

    def look(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Remember what is there at the first save, or at a load: it is no news later."""
        if self._looked_at_seconds is None:
            self._looked_at_seconds = _now_seconds()
        self._seen |= {(each.name, each.digest) for each in checkpoints}
        self._seen_jobs |= {each.job.id for each in checkpoints if each.job is not None}

    def has_loaded(self, checkpoint: Checkpoint) -> None:
        """Remember whose checkpoint this job goes on from."""
        self._loaded = "" if checkpoint.job is None else checkpoint.job.id

    def for_record(self, path: str) -> Job:
        """What the record of a step that this job has just saved says of the job.

        Raises:
            StorageError: a call failed.
        """
        return Job(
            self.id, socket.gethostname(), os.getpid(), self._started(), self._loaded, inode_of(self._series.disk, path)
        )

    def check_alone(self) -> None:
        """Look whether ``latest`` names what another live job has saved: each of its saves moves it.

        Raises:
            StorageError: this job is the older one of two.
        """
        latest: Checkpoint | None = None
        with suppress(StorageError):  # what is wrong with the root shows in the save itself
            if self._looked_at_seconds is None:
                return self.look(self._series.look())
            latest = self._series.noted_latest()
        if latest is None or latest.job is None:
            return None
        job = latest.job
        if job.id == self.id or (latest.name, latest.digest) in self._seen:
            return None
        if self._is_older_than(job):
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(job.started_seconds))
            raise StorageError(
                f"job {job.id} (process {job.pid} on host {job.host}) has taken over the series in "
                f"{self._series.root} since {since}, and has saved {latest.name}; this job ({self.id}, process "
                f"{os.getpid()} on host {socket.gethostname()}) stops saving. End this one if it was replaced; else "
                "give one of the two another root or name",
                path=self._series.root,
                operation="begin",
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s was saved by an older job that still runs: job %s, process %d on host %s. Its next save fails; end "
                "it, or give it another root or name",
                latest.path,
                job.id,
                job.pid,
                job.host,
            )
        return None

    def _is_older_than(self, other: Job) -> bool:
        if other.loaded == self.id:
            return True
        if other.id in self._seen_jobs or other.id == self._loaded:
            return False
        with suppress(StorageError):
            return (self._started(), self.id) < (other.started_seconds, other.id)
        return False  # it cannot be found out now; the next save looks again

    def _started(self) -> float:
        """When this job first looked, by the clock of the file system.

        Raises:
            StorageError: a call failed.
        """
        if not self._started_seconds:
            disk = self._series.disk
            path = os.path.join(self._series.root, f"{self._series.latest_name}.{secrets.token_hex(8)}.tmp")
            try:
                disk.write_file(path, b"", durable=False)
                now_seconds = disk.modified_seconds(path)
            finally:
                with suppress(StorageError):
                    disk.unlink(path)
            looked_at_seconds = self._looked_at_seconds
            waited_seconds = 0.0 if looked_at_seconds is None else _now_seconds() - looked_at_seconds
            self._started_seconds = now_seconds - waited_seconds
        return self._started_seconds
