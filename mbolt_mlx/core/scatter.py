"""Reads many ranges of files into places of one buffer, in few long reads.

A rewrite puts together bytes that lie far apart. Ranges that follow each other in a file are read
at once, wherever they go. Reads bypass the page cache where they can: a rewrite touches every byte
once, and would push out what others need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mbolt_mlx.core import files, reads
from mbolt_mlx.core.errors import ReadError

BOUNCE_BYTES = 8 << 20
_PAGE = 4096

# (number of the file, first byte in it, bytes, place in the buffer)
Segment = tuple[int, int, int, int]


def aligned_buffer(size: int) -> np.ndarray:
    """A uint8 array of ``size`` bytes that begins on a page."""
    return np.frombuffer(reads.aligned_buffer(size), np.uint8, count=size)


class Scatterer:
    """Reads segments of ``paths``. One a thread: it owns a bounce buffer of 8 MiB."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.bytes_read = 0
        self._bounce: np.ndarray | None = None

    def read(self, segments: Iterable[Segment], out: np.ndarray) -> None:
        """Put the bytes of each segment into its place of ``out`` (uint8, one dimension).

        Raises:
            ReadError: naming the file and the byte.
        """
        fd, opened = -1, -1
        direct = False
        try:
            for number, begin, parts in runs(segments):
                if number != opened:
                    if fd >= 0:
                        files.close(fd)
                        fd = -1
                    fd, direct = files.open_cold(self.paths[number], drop=False)
                    opened = number
                targets = [out[at : at + n] for at, n in parts]
                if direct:
                    self._read_direct(fd, begin, targets, self.paths[number])
                else:
                    views = [memoryview(t) for t in targets]
                    files.pread_into(fd, views, begin, path=str(self.paths[number]))
                self.bytes_read += sum(len(t) for t in targets)
        finally:
            if fd >= 0:
                files.close(fd)

    def _read_direct(self, fd: int, begin: int, targets: list[np.ndarray], path: Path) -> None:
        """Read an aligned range around the wanted one, then copy the wanted parts."""
        if self._bounce is None:
            self._bounce = aligned_buffer(BOUNCE_BYTES + 2 * _PAGE)
        first = begin // _PAGE * _PAGE
        end = begin + sum(len(t) for t in targets)
        room = -(-(end - first) // _PAGE) * _PAGE
        view = memoryview(self._bounce)[:room]
        try:
            files.pread_some(fd, view, first, need=end - first)
        except ReadError:
            # A drive that gives less than asked for, or a real failure: the plain way tells.
            plain = files.open_read(path)
            try:
                files.pread_into(plain, [view[: end - first]], first, path=str(path))
            finally:
                files.close(plain)
        position = begin - first
        for target in targets:
            target[:] = self._bounce[position : position + len(target)]
            position += len(target)


def runs(segments: Iterable[Segment]) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The reads that fetch ``segments``, each of at most 8 MiB: (file, first byte, [(place, bytes),
    …])."""
    number, start, end = -1, 0, 0
    parts: list[tuple[int, int]] = []
    for at_file, begin, length, place in sorted(segments):
        while length:
            if at_file != number or begin != end or end - start >= BOUNCE_BYTES:
                if parts:
                    yield number, start, parts
                number, start, end, parts = at_file, begin, begin, []
            taken = min(length, BOUNCE_BYTES - (end - start))
            parts.append((place, taken))
            begin, end, place, length = begin + taken, end + taken, place + taken, length - taken
    if parts:
        yield number, start, parts
