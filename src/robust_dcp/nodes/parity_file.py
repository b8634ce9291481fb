"""The file that a node keeps of a group's parity, and what it says of the group.

    0            L = segment_nbytes                                                             end
    | parity     | CRC-32 of each 256 KiB of it, 4 bytes each | note, in JSON | tail, 36 bytes |

k nodes form a group. What a node has written is one stream of bytes: its data files, sorted by name, each padded to a
page. The stream is cut into k - 1 segments. Segment j of node n is covered by the parity on node (n + 1 + j) mod k,
which is the XOR of one segment of each other node. So each node stores 1 / (k - 1) of a stream more, and any one node
can be made anew from the others.

    node     0      1      2      3          k = 4, three segments each: a b c
    covered  a0>1   a1>2   a2>3   a3>0       the parity on node 1 is a0 ^ c2 ^ b3
    by       b0>2   b1>3   b2>0   b3>1
             c0>3   c1>0   c2>1   c3>2

The file gets its name when all nodes of the save have theirs durably. So where it has its name, the checkpoint is
protected. It is a hint: what it says is compared with what is there. ``robust-dcp ls`` reads it without torch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from robust_dcp import errors
from robust_dcp.decoding import from_json
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import PARITY_PREFIX, writer_of
from robust_dcp.storage.files.small_files import pass_over
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32

PAGE_NBYTES: Final = 4096

PARITY: Final = -1
"""In the place of the number of a segment: the parity that the node keeps."""

_MAGIC: Final = b"RDCPPAR1"
_TAIL: Final = struct.Struct("<8sQQII")
_TAIL_NBYTES: Final = _TAIL.size + 4
"""Magic, bytes of the parity, bytes of the note, CRC-32 of the checksums, CRC-32 of the note. The CRC-32 of the tail
itself follows."""

_MOST_NOTE_NBYTES: Final = 64 << 20
_MOST_PARITY_NBYTES: Final = 1 << 44
_MOST_NODES: Final = 1 << 16
_READ_NBYTES: Final = 8 << 20


class Part(NamedTuple):
    """As many bytes of a node as a segment has: segment ``number`` of its stream, or its :data:`PARITY`."""

    node: int
    number: int

    def sources(self, k: int) -> tuple[Part, ...]:
        """The parts of the other ``k - 1`` nodes whose XOR this part is."""
        if self.number == PARITY:
            return tuple(Part((self.node - away) % k, away - 1) for away in range(1, k))
        keeper = Part((self.node + 1 + self.number) % k, PARITY)
        return (keeper, *(each for each in keeper.sources(k) if each.node != self.node))


class FileNote(msgspec.Struct, frozen=True):
    """A data file: its name, its length, and the CRC-32 of all of it."""

    name: str
    nbytes: int
    crc32: int = 0


class NodeNote(msgspec.Struct, frozen=True):
    """A node of a group.

    Attributes:
        host: its name, for people.
        ranks: those that work on its files; the one that leads comes first. In a file: those that have saved them.
        files: its data files, sorted by name.
    """

    host: str
    ranks: tuple[int, ...]
    files: tuple[FileNote, ...]

    @property
    def starts(self) -> list[int]:
        """Where each file begins in the stream, and where the stream ends."""
        starts = [0]
        for file in self.files:
            starts.append(starts[-1] - -file.nbytes // PAGE_NBYTES * PAGE_NBYTES)
        return starts


class GroupNote(msgspec.Struct, frozen=True):
    """The nodes that keep parity for each other.

    Attributes:
        mark: of the save.
        segment_nbytes: the length of each segment, and of the parity.
        nodes: in the order of their numbers.
    """

    mark: str
    segment_nbytes: int
    nodes: tuple[NodeNote, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.nodes) <= _MOST_NODES:
            raise ValueError(f"a group of {len(self.nodes)} nodes")
        names = [file.name for node in self.nodes for file in node.files]
        for name in names:
            writer = writer_of(name)
            if writer is None or writer.mark != self.mark or not self.mark:
                raise ValueError(f"{name!r:.100} is no data file of the save {self.mark!r:.50}")
        if len(set(names)) < len(names):
            raise ValueError("a file is on two nodes")
        if any(file.nbytes < 0 for node in self.nodes for file in node.files):
            raise ValueError("a file has a negative length")
        if self.segment_nbytes != segment_nbytes_of(self.nodes):
            raise ValueError(f"segments of {self.segment_nbytes} bytes do not fit the files")

    def nbytes_of(self, part: Part) -> int:
        """How many bytes of a part are no zeros behind the end of a stream."""
        if part.number == PARITY:
            return self.segment_nbytes
        left = self.nodes[part.node].starts[-1] - part.number * self.segment_nbytes
        return min(max(left, 0), self.segment_nbytes)

    def __str__(self) -> str:
        """The host names, for people."""
        return ", ".join(node.host for node in self.nodes)


def segment_nbytes_of(nodes: Sequence[NodeNote]) -> int:
    """The length of the segments of a group: whole pages, as many as the longest stream needs."""
    return -(-max(node.starts[-1] for node in nodes) // ((len(nodes) - 1) * PAGE_NBYTES)) * PAGE_NBYTES


class ParityNote(msgspec.Struct, frozen=True):
    """What the file of one node says: the number of this node, and its group."""

    number: int
    group: GroupNote

    def __post_init__(self) -> None:
        if not 0 <= self.number < len(self.group.nodes):
            raise ValueError(f"node {self.number} of {len(self.group.nodes)}")

    def __str__(self) -> str:
        return f"any 1 of {len(self.group.nodes)} nodes"


def parity_name(mark: str) -> str:
    """The name of the file in a directory."""
    return PARITY_PREFIX + mark


def sums_nbytes(parity_nbytes: int) -> int:
    """How many bytes the checksums of a parity take."""
    return -(-parity_nbytes // SUM_NBYTES) * 4


def write_note(disk: Disk, path: str, note: ParityNote) -> None:
    """Write what follows the checksums, once all of them are there, and make the file durable."""
    nbytes, encoded = note.group.segment_nbytes, msgspec.json.encode(note)
    with disk.reading(path, flags=os.O_RDWR) as file:
        sums = disk.read(file, nbytes, sums_nbytes(nbytes))
        tail = _TAIL.pack(_MAGIC, nbytes, len(encoded), crc32(sums), crc32(encoded))
        disk.pwrite(file, encoded + tail + crc32(tail).to_bytes(4, "little"), nbytes + len(sums))
        disk.fsync(file)


class ParityFile(NamedTuple):
    """An open file of parity: what it says, and its checksums, 4 bytes for each block."""

    file: OpenFile
    note: ParityNote
    sums: bytes

    def read(self, disk: Disk, begin: int, out: memoryview) -> None:
        """Read bytes of the parity, which begin where a block does.

        Raises:
            CorruptCheckpoint: they do not have their checksums.
        """
        end = begin + len(out)
        n_read = disk.pread_into(self.file, out, begin)
        for at in range(begin, end, SUM_NBYTES):
            stop = min(at + SUM_NBYTES, end)
            expected = int.from_bytes(self.sums[at // SUM_NBYTES * 4 :][:4], "little")
            found = crc32(out[at - begin : stop - begin])
            is_whole = stop % SUM_NBYTES == 0 or stop == self.note.group.segment_nbytes
            if n_read < stop - begin or (is_whole and found != expected):
                raise errors.CorruptCheckpoint.of_file(
                    self.file.path, f"bytes {at} to {stop} with CRC-32 {expected:08x}", f"{found:08x}"
                )


def open_parity(disk: Disk, path: str) -> ParityFile:
    """Open a file of parity. The caller closes it.

    Raises:
        CorruptCheckpoint: its note or its checksums are damaged.
        StorageError: it cannot be read.
    """
    file = disk.open_read(path)
    try:
        tail = disk.read(file, max(file.nbytes - _TAIL_NBYTES, 0), _TAIL_NBYTES)
        if len(tail) < _TAIL_NBYTES or crc32(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
            raise ValueError("an end that is damaged, or of another file")
        magic, parity_nbytes, note_nbytes, sums_crc32, note_crc32 = _TAIL.unpack(tail[:-4])
        n_sums = sums_nbytes(parity_nbytes)
        fits = parity_nbytes + n_sums + note_nbytes + _TAIL_NBYTES == file.nbytes
        fits = fits and note_nbytes <= _MOST_NOTE_NBYTES and parity_nbytes <= _MOST_PARITY_NBYTES
        if magic != _MAGIC or not fits:
            raise ValueError("an end that does not fit the length of the file")
        sums, encoded = disk.read(file, parity_nbytes, n_sums), disk.read(file, parity_nbytes + n_sums, note_nbytes)
        if crc32(sums) != sums_crc32 or crc32(encoded) != note_crc32:
            raise ValueError("checksums or a note that are damaged")
        note = from_json(encoded, ParityNote)
        if note.group.segment_nbytes != parity_nbytes:
            raise ValueError(f"a note of {note.group.segment_nbytes} bytes of parity where {parity_nbytes} are")
        return ParityFile(file, note, sums)
    except ValueError as error:
        disk.close(file)
        raise errors.CorruptCheckpoint.of_file(path, "the parity of a checkpoint", str(error)) from error
    except BaseException:
        disk.close(file)
        raise


def read_parity_note(disk: Disk, directory: str, mark: str | None = None) -> ParityNote | None:
    """What the parity in a directory says; ``None`` if there is none that can be used.

    Args:
        mark: of the save; ``None`` for the save whose data files are there.
    """
    try:
        names = set(disk.list_directory(directory))
    except errors.StorageError:
        return None
    for name in sorted(names):
        if not name.startswith(PARITY_PREFIX) or name.endswith(".tmp") or mark not in (None, name[-16:]):
            continue
        path = os.path.join(directory, name)
        try:
            note = check_parity(disk, path, with_data=False)
        except (errors.StorageError, errors.CorruptCheckpoint) as error:
            pass_over(path, error.message)
            continue
        files = {file.name for file in note.group.nodes[note.number].files}
        if name == parity_name(note.group.mark) and (mark is not None or files <= names):
            return note
    return None


def check_parity(disk: Disk, path: str, *, with_data: bool) -> ParityNote:
    """Make sure that a file of parity has its checksums, and return what it says.

    Args:
        with_data: whether the parity itself is read; otherwise only what follows it.

    Raises:
        CorruptCheckpoint: it is damaged.
        StorageError: it cannot be read.
    """
    parity = open_parity(disk, path)
    try:
        nbytes = parity.note.group.segment_nbytes if with_data else 0
        buffer = memoryview(bytearray(min(nbytes, _READ_NBYTES)))
        for at in range(0, nbytes, _READ_NBYTES):
            parity.read(disk, at, buffer[: nbytes - at])
    finally:
        disk.close(parity.file)
    return parity.note
