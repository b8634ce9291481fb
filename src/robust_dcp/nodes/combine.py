"""Combines parts of nodes by XOR: reads what a node has written, and checks it, and moves pieces between ranks.

Making parity and making files anew are one thing: a part of one node is the XOR of a part of each other node of its
group. The ranks of a node share the work by ranges of bytes. A rank holds one piece that it sends, one that it gets,
and one in which it adds up what it has got, all in the same buffers from first to last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm import Bucket, Channel, Relay
from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.nodes.parity_file import (
    PARITY,
    FileNote,
    GroupNote,
    NodeNote,
    ParityFile,
    Part,
    open_parity,
    parity_name,
    sums_nbytes,
)
from robust_dcp.staging.blocks import Block, BlockLease
from robust_dcp.storage.committing.saving_file import is_gone
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.layouts.blocks import blocks_in
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, crc32_of_both, sums_of

UInt8 = npt.NDArray[np.uint8]

UNFINISHED: Final = ".anew.tmp"
"""What the name of a file ends in until it is whole."""

_MOST_PIECE_NBYTES: Final = 8 << 20
_PIECES_AT_ONCE: Final = 4


class Run(NamedTuple):
    """Bytes of a data file that were read one after the other: the number of the file, where they lie, their CRC-32."""

    number: int
    begin: int
    nbytes: int
    crc32: int


def merged(runs: Iterable[Run]) -> list[Run]:
    """Runs that follow each other, as one."""
    whole: list[Run] = []
    for run in sorted(runs):
        before = whole[-1] if whole else Run(-1, 0, 0, 0)
        if (before.number, before.begin + before.nbytes) == run[:2]:
            crc = crc32_of_both(before.crc32, run.crc32, run.nbytes)
            whole[-1] = Run(run.number, before.begin, before.nbytes + run.nbytes, crc)
        else:
            whole.append(run)
    return whole


def crc32_of_files(runs: Iterable[Run], files: Sequence[FileNote]) -> list[int | None]:
    """The CRC-32 of each file; ``None`` if not all of it was read."""
    whole = {run.number: run.crc32 for run in merged(runs) if run[1:3] == (0, files[run.number].nbytes)}
    return [whole.get(number) if file.nbytes else 0 for number, file in enumerate(files)]


class Stream:
    """The data files of one node as one run of bytes. What is read is compared with the checksums that the files hold:
    each block by who has read its beginning.

    Args:
        disk: the file system.
        directory: where the files lie.
        node: which files.
        suffix: what follows their names for now.
        direct: whether to read past the page cache, as for a load.

    Attributes:
        runs: what was read.
    """

    def __init__(
        self, disk: Disk, directory: str, node: NodeNote, mark: str, suffix: str = "", direct: bool | None = None
    ) -> None:
        self.runs: set[Run] = set()  # a piece is read once more if a connection breaks
        self._disk = disk
        self._mark = mark
        self._paths = [os.path.join(directory, file.name + suffix) for file in node.files]
        self._files, self._starts = node.files, node.starts
        self._direct = direct
        self._open: dict[int, DataFile] = {}
        self._blocks: dict[int, Any] = {}
        self._edges = BlockLease(_MOST_PIECE_NBYTES, 1, of_load=True)  # for the ends of files that are no whole pages

    def read(self, begin: int, out: UInt8) -> None:
        """Read bytes of the stream. Between two files are zeros.

        Raises:
            CorruptCheckpoint: they do not have their checksums.
            StorageError: a file cannot be read.
        """
        done, end = begin, begin + len(out)
        for number, file in enumerate(self._files):
            start = self._starts[number]
            first, last = max(begin, start), min(end, start + file.nbytes)
            if first < last:
                view = out.data[first - begin : last - begin]
                address = out.ctypes.data + first - begin
                n_read, _ = self._file(number).read_piece(view, address, first - start, self._edges)
                self._make_sure(number, first - start, len(view), n_read)
                self.runs.add(Run(number, first - start, len(view), self._checked(number, first - start, view)))
                out[done - begin : first - begin] = 0
                done = last
        out[done - begin :] = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._edges.close()

    def _file(self, number: int) -> DataFile:
        if number not in self._open:
            file = self._open[number] = DataFile(self._disk, self._paths[number], self._direct)
            self._make_sure(number, 0, self._files[number].nbytes, file.nbytes)
            with self._disk.reading(file.path) as opened:
                self._blocks[number] = blocks_in(self._disk, opened, self._mark)
        return self._open[number]

    def _make_sure(self, number: int, at: int, expected: int, found: int) -> None:
        if found != expected:
            raise CorruptCheckpoint.of_file(self._paths[number], f"{at + expected} bytes", f"{at + found} bytes")

    def _checked(self, number: int, at: int, view: memoryview) -> int:
        """Compare the blocks that begin in what was read. The rest of the last one is read for that.

        Returns:
            The CRC-32 of what was read.
        """
        begins, ends, crcs = self._blocks[number]
        place, stop, whole = at, at + len(view), 0
        for row in range(int(np.searchsorted(begins, at)), int(np.searchsorted(begins, stop))):
            begin, end = int(begins[row]), int(ends[row])
            crc = crc32(view[begin - at : end - at])
            last = min(end, stop)
            whole = crc32_of_both(crc32(view[place - at : begin - at], whole), crc, last - begin)
            place = last
            for more in range(stop, end, SUM_NBYTES):
                nbytes = min(SUM_NBYTES, end - more)
                data = self._file(number).read(more, nbytes)
                self._make_sure(number, more, nbytes, len(data))
                crc = crc32(data, crc)
            if crc != int(crcs[row]):
                expected = f"bytes {begin} to {end} with CRC-32 {int(crcs[row]):08x}"
                raise CorruptCheckpoint.of_file(self._paths[number], expected, f"CRC-32 {crc:08x}")
        return crc32(view[place - at :], whole)


class Parts:
    """What a rank reads and writes of the parts of a group, in the directory that it sees.

    Args:
        disk: the file system.
        directory: where all files lie.
        group: the nodes.
        made: the names of the files that are made, of data or of parity. Until they are whole other names stand for
            them.
        direct: whether to read, and to write parity, past the page cache. ``None``: where the file system can.
    """

    def __init__(
        self, disk: Disk, directory: str, group: GroupNote, made: Collection[str], direct: bool | None
    ) -> None:
        self.group, self.made = group, made
        self._direct = direct
        self._disk, self._directory = disk, directory
        self._parity_name = parity_name(group.mark)
        self._streams: dict[int, Stream] = {}
        self._parity: ParityFile | None = None
        self._written: dict[str, OpenFile] = {}
        self._sums: dict[int, bytes] = {}  # of the parity that was written, by their places in the file
        self._held = ExitStack()

    def create(self) -> None:
        """Create the files that are made, with all of their room."""
        sizes = {file.name: file.nbytes for node in self.group.nodes for file in node.files}
        sizes[self._parity_name] = self.group.segment_nbytes + sums_nbytes(self.group.segment_nbytes)
        remove_unfinished(self._disk, self._directory)
        for name in self.made:
            file = self._disk.open_new(self._path(name + UNFINISHED))
            try:
                if not self._disk.preallocate(file, sizes[name]):
                    self._disk.truncate(file, sizes[name])
            finally:
                self._disk.close(file)

    def read(self, part: Part, begin: int, out: UInt8) -> None:
        """Read bytes of a part. Behind the end of what its node has written are zeros."""
        if part.number == PARITY:
            if self._parity is None:
                self._parity = open_parity(self._disk, self._path(self._parity_name))
                self._held.callback(self._disk.close, self._parity.file)
            self._parity.read(self._disk, begin, out.data)
            return
        if part.node not in self._streams:
            node = self.group.nodes[part.node]
            stream = Stream(self._disk, self._directory, node, self.group.mark, direct=self._direct)
            self._streams[part.node] = stream
            self._held.callback(stream.close)
        self._streams[part.node].read(part.number * self.group.segment_nbytes + begin, out)

    def runs(self, node: int) -> list[Run]:
        """What was read of a node's files."""
        return merged(self._streams[node].runs) if node in self._streams else []

    def wants(self, part: Part, begin: int, end: int) -> bool:
        """Whether bytes of a part belong to a file that is made."""
        return part.number == PARITY or any(True for _ in self._within(part, begin, end))

    def write(self, part: Part, begin: int, data: UInt8) -> None:
        """Write bytes of a part into the files that are made."""
        if part.number == PARITY:
            file, place = self._file(self._parity_name), self.group.segment_nbytes + begin // SUM_NBYTES * 4
            self._sums[place] = np.array(sums_of(data.data), dtype="<u4").tobytes()
            self._disk.write_pages(file, data.data, begin)
            return
        for name, place, first, last in self._within(part, begin, begin + len(data)):
            self._disk.pwrite(self._file(name), data.data[first:last], place)

    def sync(self) -> None:
        """Make durable what was written."""
        for name, file in self._written.items():
            if name == self._parity_name:
                self._disk.use_page_cache(file, "")  # these bytes are few, and not whole pages
                for place, sums in self._sums.items():
                    self._disk.pwrite(file, sums, place)
            self._disk.fsync(file)

    def close(self) -> None:
        """Close all files."""
        self._held.close()

    def give_names(self, names: Iterable[str]) -> None:
        """Give files that are whole their names, one right after the other."""
        for name in names:
            self._disk.rename(self._path(name + UNFINISHED), self._path(name))
        self._disk.fsync_directory(self._directory)

    def _within(self, part: Part, begin: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """The files that are made and have bytes there: name, place in the file, and which of these bytes."""
        node, at = self.group.nodes[part.node], part.number * self.group.segment_nbytes + begin
        for file, start in zip(node.files, node.starts, strict=False):
            first, last = max(at, start), min(at + end - begin, start + file.nbytes)
            if first < last and file.name in self.made:
                yield file.name, first - start, first - at, last - at

    def _file(self, name: str) -> OpenFile:
        if name not in self._written:
            direct = self._direct if name == self._parity_name else False
            file = self._disk.open_read(self._path(name + UNFINISHED), direct=direct, flags=os.O_RDWR)
            self._written[name] = file
            self._held.callback(self._disk.close, file)
        return self._written[name]

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def remove_unfinished(disk: Disk, directory: str) -> None:
    """Remove the files that were being made."""
    for name in disk.list_directory(directory) if disk.exists(directory) else ():
        if name.endswith(UNFINISHED):
            is_gone(disk.unlink, os.path.join(directory, name))


class _Piece:
    """A piece of a part that this rank makes: the sum so far, and the parts that are still to be added to it."""

    def __init__(self, target: Part, begin: int, end: int) -> None:
        self.target, self.begin, self.end = target, begin, end
        self.left = set[Part]()
        self.sum: UInt8 | None = None


class _Move(NamedTuple):
    """A piece of a source: where it begins, and the piece that it is added to on this rank, if it is."""

    source: Part
    begin: int
    piece: _Piece | None


class Combining:
    """One rank's part in making parts of nodes.

    Args:
        channel: of all ranks.
        parts: what this rank reads and writes; ``None`` if it only takes part in the exchange.
        targets: the parts to make.
        ranks_of: the ranks that write a target, or read a part for it.
        buffer_nbytes: how much memory each rank may take.
        side_by_side: whether all targets are made at once, by different ranks; else one after the other.
    """

    def __init__(
        self,
        channel: Channel,
        parts: Parts | None,
        targets: Sequence[Part],
        *,
        ranks_of: Callable[[Part], Sequence[int]],
        buffer_nbytes: int,
        side_by_side: bool = False,
    ) -> None:
        self._channel = channel
        self._parts = cast("Parts", parts)  # without one there is nothing to read or write
        self._piece_nbytes = SUM_NBYTES
        self._free: list[UInt8] = []
        self._lent: dict[int, UInt8] = {}  # by the number of a bucket of this round
        self._round = -1
        self._done_nbytes = 0
        rows: list[tuple[tuple[int, int, int], Bucket, _Move]] = []
        if parts is not None:
            rows = self._rows(parts.group, targets, ranks_of, buffer_nbytes, side_by_side)
        rows.sort(key=lambda row: row[0])
        self._moves, self._buckets = [row[2] for row in rows], [row[1] for row in rows]
        self._total_nbytes = sum(bucket.nbytes for bucket in self._buckets)

    def _rows(
        self,
        group: GroupNote,
        targets: Sequence[Part],
        ranks_of: Callable[[Part], Sequence[int]],
        buffer_nbytes: int,
        side_by_side: bool,
    ) -> list[tuple[tuple[int, int, int], Bucket, _Move]]:
        """What this rank moves, and in which order."""
        rank, k = self._channel.rank, len(group.nodes)
        counts = {len(ranks_of(part)) for target in targets for part in (target, *target.sources(k))}
        n_shares, turns = max(counts), (k - 1) * (1 if side_by_side else len(targets))
        # A rank of the node with the fewest works on several shares at once.
        most_nbytes = buffer_nbytes // (_PIECES_AT_ONCE * -(-n_shares // min(counts)))
        nbytes = self._piece_nbytes = max(min(most_nbytes, _MOST_PIECE_NBYTES) // SUM_NBYTES, 1) * SUM_NBYTES
        n_pieces = -(-group.segment_nbytes // nbytes)
        rows = []
        for share in range(n_shares):
            first, last = (edge * n_pieces // n_shares for edge in (share, share + 1))
            for at, (number, target) in product(range(first, last), enumerate(targets)):
                begin, end = at * nbytes, min((at + 1) * nbytes, group.segment_nbytes)
                if not self._parts.wants(target, begin, end):
                    continue
                writer = ranks_of(target)[share % len(ranks_of(target))]
                piece = _Piece(target, begin, end) if rank == writer else None
                for step, source in enumerate(target.sources(k)):
                    reader = ranks_of(source)[share % len(ranks_of(source))]
                    # Zeros need not be sent, but for one, so that each piece gets something.
                    n_sent = max(min(end, group.nbytes_of(source)) - begin, step == 0)
                    if rank not in (reader, writer) or n_sent <= 0:
                        continue
                    if piece is not None:
                        piece.left.add(source)
                    turn = step if side_by_side else number * (k - 1) + step
                    ranks = (reader,) if reader == writer else (reader, writer)
                    bucket = Bucket((at - first) * turns + turn, ranks, n_sent)
                    rows.append(((bucket.round, share, number), bucket, _Move(source, begin, piece)))
        return rows

    def run(self, phase: str) -> None:
        """Make the parts. All ranks of the channel call this together.

        Raises:
            RobustCheckpointError: the same on all ranks.
        """
        self._channel.relay(phase, Relay(self._buckets, self._outgoing, self._incoming, self._arrived))

    # The functions of a relay, which may call them once more after a connection broke.

    def _outgoing(self, number: int) -> torch.Tensor:
        move, out = self._moves[number], self._moving(number)
        self._parts.read(move.source, move.begin, out)
        self._add(number, out)
        return torch.from_numpy(out)

    def _incoming(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._moving(number))

    def _arrived(self, number: int, received: torch.Tensor) -> None:
        self._add(number, self._moving(number))

    def _moving(self, number: int) -> UInt8:
        """A buffer for what is moved. Those of the round before are free by now."""
        if self._buckets[number].round != self._round:
            self._round = self._buckets[number].round
            self._free += self._lent.values()
            self._lent.clear()
        if number not in self._lent:
            self._lent[number] = self._buffer()
        return self._lent[number][: self._buckets[number].nbytes]

    def _buffer(self) -> UInt8:
        return self._free.pop() if self._free else Block(self._piece_nbytes).data  # whole pages, for direct I/O

    def _add(self, number: int, data: UInt8) -> None:
        """Add bytes to the piece that they are for, if they are for one of this rank. Write it when it is whole."""
        (source, _, piece), n_added = self._moves[number], len(data)
        self._done_nbytes = min(self._done_nbytes + n_added, self._total_nbytes)
        self._channel.check_stop(self._done_nbytes, self._total_nbytes)
        if piece is None or source not in piece.left:
            return
        piece.left.remove(source)
        if piece.sum is None and not piece.left and n_added == piece.end - piece.begin:  # a mirror
            self._parts.write(piece.target, piece.begin, data)
            return
        if piece.sum is None:
            piece.sum = self._buffer()
            piece.sum[:n_added], piece.sum[n_added:] = data, 0
        else:
            np.bitwise_xor(piece.sum[:n_added], data, out=piece.sum[:n_added])
        if not piece.left:
            self._parts.write(piece.target, piece.begin, piece.sum[: piece.end - piece.begin])
            self._free.append(piece.sum)
            piece.sum = None
