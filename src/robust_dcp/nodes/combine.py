"""Combines parts of nodes by XOR: reads what a node has written, and checks it, and moves pieces between ranks.

Making parity and making files anew are one thing: a part of one node is the XOR of a part of each other node of its
group. The ranks of a node share the work by ranges of bytes. A rank holds one piece that it sends, one that it gets,
and one in which it adds up what it has got.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm import Bucket, Channel, Relay
from robust_dcp.nodes.parity_file import PARITY, GroupNote, NodeNote, ParityFile, Part, damaged, open_parity
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.footer import footer_in
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, crc32_of_both

UInt8 = npt.NDArray[np.uint8]

_MOST_PIECE_NBYTES: Final = 8 << 20
_PIECES_AT_ONCE: Final = 4


def piece_nbytes_of(buffer_nbytes: int, n_shares: int) -> int:
    """The size of a piece where each rank may take ``buffer_nbytes``, and works on ``n_shares`` ranges at once."""
    most = min(buffer_nbytes // (_PIECES_AT_ONCE * n_shares), _MOST_PIECE_NBYTES)
    return max(most // SUM_NBYTES, 1) * SUM_NBYTES


class Stream:
    """The data files of one node as one run of bytes. What is read is compared with the checksums that the files hold.

    A block of a file may begin in one range that is read and end in the next one. Whoever has read its beginning
    compares it: at once if the ranges follow each other, and else in :meth:`finish`.

    Args:
        disk: the file system.
        directory: where the files lie.
        node: which files.
        suffix: what follows their names for now.

    Attributes:
        crcs: by the number of a file and a place in it: how many bytes were read from there on, and their CRC-32.
    """

    def __init__(self, disk: Disk, directory: str, node: NodeNote, mark: str, suffix: str = "") -> None:
        self.crcs: dict[tuple[int, int], tuple[int, int]] = {}
        self._disk = disk
        self._mark = mark
        self._paths = [os.path.join(directory, file.name + suffix) for file in node.files]
        self._files, self._starts = node.files, node.starts
        self._open: dict[int, OpenFile] = {}
        self._blocks: dict[int, Any] = {}
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}  # by file and place: a block, and its CRC-32 up to it
        self._ends: dict[tuple[int, int], int] = {}  # by file and place: where what was read up to there begins
        self._checked: set[tuple[int, int]] = set()  # a piece is read once more if a connection breaks

    def read(self, begin: int, end: int) -> UInt8:
        """Bytes of the stream.

        Raises:
            CorruptCheckpoint: they do not have their checksums.
            StorageError: a file cannot be read.
        """
        out: UInt8 = np.zeros(end - begin, dtype=np.uint8)
        for number, file in enumerate(self._files):
            start = self._starts[number]
            first, last = max(begin, start), min(end, start + file.nbytes)
            if first < last:
                view = out.data[first - begin : last - begin]
                self._read(number, first - start, view)
                self._check(number, first - start, view)
        return out

    def finish(self) -> None:
        """Read the rest of blocks of which only the beginning was read, and compare them."""
        for (number, at), (row, crc) in self._begun.items():
            rest = bytearray(int(self._blocks_of(number)[1][row]) - at)
            self._read(number, at, memoryview(rest))
            self._compare(number, row, crc32(rest, crc))
        self._begun.clear()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            self._disk.close(file)
        self._open.clear()

    def _file(self, number: int) -> OpenFile:
        if number not in self._open:
            self._open[number] = file = self._disk.open_read(self._paths[number])
            if file.nbytes != self._files[number].nbytes:
                raise damaged(file.path, f"{self._files[number].nbytes} bytes", f"{file.nbytes} bytes")
        return self._open[number]

    def _read(self, number: int, at: int, view: memoryview) -> None:
        n_read = self._disk.pread_into(self._file(number), view, at)
        if n_read < len(view):
            raise damaged(self._paths[number], f"{at + len(view)} bytes", f"{at + n_read} bytes")

    def _blocks_of(self, number: int) -> Any:
        """Where each block of a file begins and ends, and its CRC-32."""
        if number not in self._blocks:
            footer, path = footer_in(self._disk, self._file(number)), self._paths[number]
            if footer is None or footer.mark != self._mark:
                raise damaged(path, f"the footer of the save {self._mark} at its end", "none")
            try:
                self._blocks[number] = footer.blocks()
            except ValueError as error:
                raise damaged(path, "checksums of its blocks as they were saved", str(error)) from error
        return self._blocks[number]

    def _check(self, number: int, at: int, view: memoryview) -> None:
        if (number, at) in self._checked:
            return
        self._checked.add((number, at))
        begins, ends, _ = self._blocks_of(number)
        done, crc, stop = at, 0, at + len(view)
        for row in range(int(np.searchsorted(ends, at, "right")), int(np.searchsorted(begins, stop, "left"))):
            begin, end = int(begins[row]), int(ends[row])
            first, last = max(begin, at), min(end, stop)
            crc = crc32(view[done - at : first - at], crc)
            of_block = crc32(view[first - at : last - at])
            crc, done = crc32_of_both(crc, of_block, last - first), last
            if first > begin:
                begun = self._begun.pop((number, first), None)
                if begun is None:
                    continue  # whoever has read its beginning compares it
                of_block = crc32_of_both(begun[1], of_block, last - first)
            if last == end:
                self._compare(number, row, of_block)
            else:
                self._begun[number, last] = row, of_block
        begin = self._ends.pop((number, at), at)
        before_nbytes, before = self.crcs.get((number, begin), (0, 0))
        crc = crc32_of_both(before, crc32(view[done - at :], crc), len(view))
        self.crcs[number, begin], self._ends[number, stop] = (before_nbytes + len(view), crc), begin

    def _compare(self, number: int, row: int, found: int) -> None:
        begins, ends, crcs = self._blocks_of(number)
        if found != int(crcs[row]):
            expected = f"bytes {begins[row]} to {ends[row]} with CRC-32 {int(crcs[row]):08x}"
            raise damaged(self._paths[number], expected, f"CRC-32 {found:08x}")


def whole_crc32(parts: Mapping[int, tuple[int, int]], nbytes: int) -> int | None:
    """The CRC-32 of a file, from the length and the CRC-32 of what was read at each place; ``None`` if not all was."""
    at = crc = 0
    for begin, (length, of_part) in sorted(parts.items()):
        if begin != at:
            return None
        at, crc = at + length, crc32_of_both(crc, of_part, length)
    return crc if at == nbytes else None


class Node:
    """What a rank reads of one node of a group: the stream, or the parity."""

    def __init__(self, disk: Disk, directory: str, group: GroupNote, number: int, parity_path: str) -> None:
        self.stream = Stream(disk, directory, group.nodes[number], group.mark)
        self._disk, self._group, self._path = disk, group, parity_path
        self._parity: ParityFile | None = None

    def read(self, part: Part, begin: int, end: int) -> UInt8:
        """Bytes of a part."""
        if part.number != PARITY:
            at = part.number * self._group.segment_nbytes
            return self.stream.read(at + begin, at + end)
        if self._parity is None:
            self._parity = open_parity(self._disk, self._path)
        return np.frombuffer(self._parity.read(self._disk, begin, end), dtype=np.uint8)

    def close(self) -> None:
        self.stream.close()
        if self._parity is not None:
            self._disk.close(self._parity.file)


class _Piece:
    """A piece of a part that this rank makes."""

    def __init__(self, target: Part, begin: int, end: int) -> None:
        self.target, self.begin, self.end = target, begin, end
        self.local: list[tuple[Part, int]] = []
        self.n_missing = 0
        self.sum: UInt8 | None = None

    def add(self, data: UInt8) -> None:
        if self.sum is None and len(data) == self.end - self.begin and data.flags.writeable:
            self.sum = data
            return
        if self.sum is None:
            self.sum = np.zeros(self.end - self.begin, dtype=np.uint8)
        np.bitwise_xor(self.sum[: len(data)], data, out=self.sum[: len(data)])


class _Move(NamedTuple):
    """A piece of a source: whose it is, where it begins, and the piece that it is added to; ``None`` on the sender."""

    source: Part
    begin: int
    end: int
    piece: _Piece | None


class Combining:
    """One rank's part in making parts of nodes.

    Args:
        group: the nodes.
        rank: this process's rank in the group of the channel.
        targets: the parts to make.
        readers, writers: the ranks that read a part, and that write one.
        piece_nbytes: how much is moved at once.
        read: reads bytes of a part. write: takes a piece of a target, and where it begins.
        side_by_side: whether all targets are made at once, by different ranks; else one after the other.
        wants: whether bytes of a target are wanted.
    """

    def __init__(
        self,
        group: GroupNote | None,
        rank: int,
        targets: Sequence[Part] = (),
        *,
        readers: Callable[[Part], Sequence[int]] = lambda part: (),
        writers: Callable[[Part], Sequence[int]] = lambda part: (),
        piece_nbytes: int = _MOST_PIECE_NBYTES,
        read: Callable[[Part, int, int], UInt8] = lambda part, begin, end: np.empty(0, dtype=np.uint8),
        write: Callable[[Part, int, UInt8], None] = lambda part, begin, data: None,
        side_by_side: bool = False,
        wants: Callable[[Part, int, int], bool] = lambda part, begin, end: True,
    ) -> None:
        self._read, self._write = read, write
        self._pieces: list[_Piece] = []
        self._next = 0  # the first bucket that has not arrived
        self._done_nbytes = 0
        rows: list[tuple[tuple[int, int, int], Bucket, _Move]] = []
        k, nbytes = (2, 0) if group is None else (len(group.nodes), group.segment_nbytes)
        turns = (k - 1) * (1 if side_by_side else len(targets))
        n_shares = max((len(each) for t in targets for each in (writers(t), *map(readers, t.sources(k)))), default=1)
        n_pieces = -(-nbytes // piece_nbytes)
        for share in range(n_shares if group is not None else 0):
            first, last = (edge * n_pieces // n_shares for edge in (share, share + 1))
            for number, target in enumerate(targets):
                writer = writers(target)[share % len(writers(target))]
                ranges = [(at, at * piece_nbytes, min((at + 1) * piece_nbytes, nbytes)) for at in range(first, last)]
                ranges = [each for each in ranges if wants(target, *each[1:])]
                pieces = {at: _Piece(target, begin, end) for at, begin, end in ranges if rank == writer}
                self._pieces += pieces.values()
                for step, source in enumerate(target.sources(k)):
                    reader = readers(source)[share % len(readers(source))]
                    limit = nbytes if group is None else group.nbytes_of(source)
                    turn = step if side_by_side else number * (k - 1) + step
                    for at, begin, end in ranges if rank in (reader, writer) else ():
                        end = min(end, limit)
                        if end <= begin:
                            continue  # zeros
                        if reader == writer:
                            pieces[at].local.append((source, end))
                            continue
                        move = _Move(source, begin, end, pieces.get(at))
                        if move.piece is not None:
                            move.piece.n_missing += 1
                        bucket = Bucket((at - first) * turns + turn, (reader, writer), end - begin)
                        rows.append(((bucket.round, share, number), bucket, move))
        rows.sort(key=lambda row: row[0])
        self._moves, self._buckets = [row[2] for row in rows], [row[1] for row in rows]
        self._total_nbytes = sum(bucket.nbytes for bucket in self._buckets)

    def run(self, channel: Channel, phase: str) -> None:
        """Make the parts. All ranks of the channel call this together.

        Raises:
            RobustCheckpointError: the same on all ranks.
        """
        self._note = channel.check_stop
        channel.barrier(f"{phase}: of this node", self._complete_own)
        channel.relay(f"{phase}: move", Relay(self._buckets, self._outgoing, self._incoming, self._arrived))

    def _complete_own(self) -> None:
        for piece in self._pieces:
            if not piece.n_missing:
                self._complete(piece)
        self._pieces.clear()

    def _complete(self, piece: _Piece) -> None:
        for source, end in piece.local:
            piece.add(self._read(source, piece.begin, end))
        data = np.zeros(piece.end - piece.begin, dtype=np.uint8) if piece.sum is None else piece.sum
        piece.sum = None
        self._write(piece.target, piece.begin, data)
        self._note(self._done_nbytes, self._total_nbytes)

    # The functions of a relay, which may call them once more after a connection broke.

    def _outgoing(self, number: int) -> torch.Tensor:
        move = self._moves[number]
        self._done_nbytes += move.end - move.begin
        self._note(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
        data = self._read(move.source, move.begin, move.end)
        return torch.from_numpy(data)

    def _incoming(self, number: int) -> torch.Tensor:
        return torch.empty(self._buckets[number].nbytes, dtype=torch.uint8)

    def _arrived(self, number: int, received: torch.Tensor) -> None:
        piece = self._moves[number].piece
        if number < self._next or piece is None:
            return
        self._next = number + 1
        self._done_nbytes += received.numel()
        piece.add(received.numpy())
        piece.n_missing -= 1
        if not piece.n_missing:
            self._complete(piece)
