"""Disks for a writer process, which makes them anew by their class: what they do is said by the environment."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from robust_dcp import StorageError
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk

_ONE_AT_THE_GATE = threading.Lock()

GATES = "ROBUST_DCP_TEST_GATES"


class GatedDisk(PosixDisk):
    """Before its first data: says which process writes, by one FIFO, and waits for leave to go on, by another."""

    def pwrite(self, file: Any, data: Any, offset: int) -> None:
        self.pass_gate(file)
        super().pwrite(file, data, offset)

    def pass_gate(self, file: Any) -> None:
        directory = os.environ.get(GATES, "")
        if file.path.endswith(".distcp") and directory and f"__{os.environ['RANK']}_" in file.path:
            at_gate = Path(directory) / "at_gate"
            with _ONE_AT_THE_GATE:
                if not (at_gate.parent / "passed").exists():
                    at_gate.write_text(f"{os.getpid()}\n")
                    (at_gate.parent / "go").read_text()
                    (at_gate.parent / "passed").touch()


class FullDisk(GatedDisk):
    """Has no space for data."""

    def pwrite(self, file: Any, data: Any, offset: int) -> None:
        self.pass_gate(file)
        if file.path.endswith(".distcp"):
            raise StorageError("there is no space", path=file.path, errno=28, operation="write")
        super().pwrite(file, data, offset)


class CpusDisk(PosixDisk):
    """Says beside the checkpoint which processors the thread that opens files for data may run on."""

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if path.endswith(".distcp"):
            cpus = sorted(os.sched_getaffinity(0))
            Path(path).parents[1].joinpath("cpus").write_text(" ".join(map(str, cpus)))
        return super().open_new(path, direct=direct)


def make_gates(directory: str) -> Path:
    """Have the writer process that this one is about to start wait at a gate."""
    gates = Path(directory) / f"gates{os.environ['RANK']}"
    gates.mkdir()
    os.mkfifo(gates / "at_gate")
    os.mkfifo(gates / "go")
    os.environ[GATES] = str(gates)
    return gates


def pid_at_gate(gates: Path) -> int:
    """Wait until a process stands at the gate."""
    return int((gates / "at_gate").read_text())


def open_gate(gates: Path) -> None:
    (gates / "go").write_text("go")
