"""The messages between a rank and its writer process, over a pair of sockets.

Owns the messages and how they are sent: structs in msgpack, with open files beside them. Nothing that is received is
executed, except that the class of the disk is made from its name. ``writer_process`` calls this on the side of the
rank, and ``writing_worker`` on the other side.
"""

from __future__ import annotations

import importlib
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import RobustCheckpointError, error_from_fields, failure_of
from robust_dcp.staging import TensorForm
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource
from robust_dcp.storage.writing.write_options import WriteOptions

__all__ = [
    "FROM_RANK",
    "FROM_WORKER",
    "Failed",
    "Job",
    "MessagePipe",
    "Plan",
    "Progress",
    "Stop",
    "Written",
    "disk_named",
    "name_of_disk",
]

Form = tuple[str, tuple[int, ...]]
"""The name of a dtype, and the size of a tensor."""


class Plan(msgspec.Struct, frozen=True):
    """The parts of a plan that the writer needs: the items of a rank and their places. All saves by one plan share it.

    Attributes:
        names, expected, chunk_offsets: the attributes of an ``ItemSource``.
        file, offset, nbytes: the columns of ``Placements``.
    """

    names: list[str]
    expected: list[Form | None]
    chunk_offsets: list[tuple[int, ...]]
    file: bytes
    offset: bytes
    nbytes: bytes
    file_nbytes: tuple[int, ...]
    variable_file: int | None
    heads: tuple[int, ...]

    @classmethod
    def of(cls, source: ItemSource, placements: Placements) -> Plan:
        places = range(len(source))
        expected = [source.expected(place) for place in places]
        return cls(
            names=[source.name(place) for place in places],
            expected=[None if form is None else form_message(form) for form in expected],
            chunk_offsets=[source.chunk_offset(place) for place in places],
            file=placements.file.tobytes(),
            offset=placements.offset.tobytes(),
            nbytes=placements.nbytes.tobytes(),
            file_nbytes=placements.file_nbytes,
            variable_file=placements.variable_file,
            heads=placements.heads,
        )

    def placements(self) -> Placements:
        return Placements(
            file=np.frombuffer(self.file, dtype=np.int32),
            offset=np.frombuffer(self.offset, dtype=np.int64),
            nbytes=np.frombuffer(self.nbytes, dtype=np.int64),
            file_nbytes=self.file_nbytes,
            variable_file=self.variable_file,
            heads=self.heads,
        )


class Job(msgspec.Struct, frozen=True, tag=True):
    """Asks the writer process to write the files of a rank. The shared memory with the tensors comes as an open file.

    Attributes:
        disk: the name of the disk's class, from :func:`name_of_disk`.
        options: the fields of ``WriteOptions``.
        known_places: int64 ``[v, 2]``, the places of the items of variable size in an earlier save; ``None`` if not
            known.
        plan: an encoded :class:`Plan`.
        memory_nbytes: the size of the shared memory.
        tensor_places, tensor_forms: the places and forms of the tensors in the shared memory, in their order there.
        records: for all other items, the bytes to write, by place.
        cpus: the processors near the memory, on which the worker should run.
    """

    directory: str
    rank: int
    mark: str
    disk: str
    options: dict[str, Any]
    known_places: bytes | None
    plan: bytes
    memory_nbytes: int
    tensor_places: list[int]
    tensor_forms: list[Form]
    records: dict[int, bytes]
    cpus: list[int]

    def write_options(self) -> WriteOptions:
        return WriteOptions(**self.options)

    def places_known(self) -> npt.NDArray[np.int64] | None:
        if self.known_places is None:
            return None
        return np.frombuffer(self.known_places, dtype=np.int64).reshape(-1, 2)


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Tells the writer process that the save has failed elsewhere. It removes what it has written."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How many bytes the worker has written, and how many all items of fixed size have."""

    done_nbytes: int
    total_nbytes: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """Says that the files are written. Has the fields of ``WrittenFiles``."""

    variable_places: bytes
    names: tuple[str, ...]
    nbytes: int
    how: tuple[str, ...]
    peak_buffer_nbytes: int
    uncommitted_names: tuple[str, ...]
    digest: bytes

    @classmethod
    def of(cls, files: WrittenFiles) -> Written:
        fields = {name: getattr(files, name) for name in cls.__struct_fields__}
        return cls(**{**fields, "variable_places": files.variable_places.tobytes()})

    def files(self) -> WrittenFiles:
        places = np.frombuffer(self.variable_places, dtype=np.int64).reshape(-1, 2)
        return WrittenFiles(**{**msgspec.structs.asdict(self), "variable_places": places})


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Says that writing has failed, with the error as text. All files were removed except for ``not_removed``."""

    type_name: str
    fields: dict[str, Any]
    not_removed: list[str]

    @classmethod
    def of(cls, error: BaseException, rank: int, not_removed: Sequence[str]) -> Failed:
        if isinstance(error, RobustCheckpointError):
            return cls(type(error).__name__, error.to_fields(), list(not_removed))
        failure = failure_of(rank, error)
        message = f"in the writer process: {failure.type_name}: {failure.message}\n{failure.traceback_text}".rstrip()
        return cls(failure.type_name, {"message": message}, list(not_removed))

    def error(self) -> RobustCheckpointError:
        return error_from_fields(self.type_name, self.fields)


FROM_RANK: Final = msgspec.msgpack.Decoder(Job | Stop)
FROM_WORKER: Final = msgspec.msgpack.Decoder(Progress | Written | Failed)


def form_message(form: TensorForm) -> Form:
    dtype, size = form
    return str(dtype).removeprefix("torch."), tuple(size)


def form_of(message: Form) -> TensorForm:
    name, size = message
    dtype: torch.dtype = getattr(torch, name)
    return dtype, torch.Size(size)


def options_message(options: WriteOptions) -> dict[str, Any]:
    return asdict(replace(options, stripe_paths=options.stripes))


def name_of_disk(disk: Disk) -> str:
    """The name by which another process finds the class of ``disk``, to make another disk of it.

    Raises:
        ValueError: another process cannot make such a disk.
    """
    kind = type(disk)
    is_importable = kind.__module__ != "__main__" and "<" not in kind.__qualname__
    if not is_importable or getattr(disk, "__dict__", None):
        raise ValueError(
            f'executor="process" makes the disk anew in the writer process, by its class alone: {kind.__qualname__} '
            "must be defined at the top level of a module other than the script, and have no attributes of its own; "
            'or pass executor="thread"'
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def disk_named(name: str) -> Disk:
    """Make a disk of the class with this name, which :func:`name_of_disk` returned."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    disk: Disk = found()
    return disk


_HEAD: Final = struct.Struct("<Q")


class MessagePipe:
    """One end of the pair of sockets.

    Args:
        end: the socket. The pipe owns it.
        decoder: decodes what the other end sends.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._socket = end
        self._decoder = decoder
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct | bytes, fds: Sequence[int] = ()) -> None:
        """Send a message. Any thread may call this.

        Args:
            message: the message, or its encoded bytes.

        Raises:
            OSError: the other end is closed, or takes nothing within the timeout of the socket.
        """
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        with self._sending:
            socket.send_fds(self._socket, [_HEAD.pack(len(body))], list(fds))
            self._socket.sendall(body)

    def has_message(self, within_seconds: float) -> bool:
        """Whether there is a message to receive, or the other end is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(within_seconds * 1000))

    def receive(self) -> tuple[Any, list[int]]:
        """Receive a message and the open files that came with it.

        Raises:
            EOFError: the other end is closed.
            OSError: the connection is broken.
        """
        head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
        if len(head) < _HEAD.size:
            raise EOFError
        body = bytearray(_HEAD.unpack(head)[0])
        view = memoryview(body)
        while view:
            received = self._socket.recv_into(view)
            if received == 0:
                raise EOFError
            view = view[received:]
        return self._decoder.decode(body), fds

    def close(self) -> None:
        self._socket.close()
