"""Which bytes of one set of files make up another file: the plan of a rewrite and of its check.

A file is its header and tensors that follow each other, each padded with zeros. A tensor is made of
rows: equal pieces at equal distances, each copied from a place of the source. A plain copy is one
row, a permuted tensor has one an expert, an interleaved one has some for each piece of an expert.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mbolt_mlx.core.scatter import Scatterer, Segment

WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """``len(order)`` rows of ``nbytes`` bytes: row p of the tensor lies at ``offset + p·stride``
    (from the start of the tensor) and is copied from ``base + order[p]·from_stride`` of the source
    file number ``file``."""

    offset: int
    stride: int
    nbytes: int
    file: int
    base: int
    from_stride: int
    order: Sequence[int] | np.ndarray

    def segments(self, start: int, lo: int, hi: int) -> Iterator[Segment]:
        """What of these rows lies in bytes [lo, hi) of the file, where the tensor is at ``start``;
        places count from ``lo``."""
        if not self.nbytes:
            return
        begin = start + self.offset
        first = max(0, (lo - begin) // self.stride)
        last = min(len(self.order) - 1, (hi - 1 - begin) // self.stride)
        for p in range(first, last + 1):
            at = begin + p * self.stride
            a, b = max(at, lo), min(at + self.nbytes, hi)
            if a < b:
                source = self.base + int(self.order[p]) * self.from_stride + a - at
                yield self.file, source, b - a, a - lo


def whole(file: int, offset: int, nbytes: int) -> Rows:
    """The rows of a tensor that is copied as it is."""
    return Rows(0, max(nbytes, 1), nbytes, file, offset, 0, (0,))


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file: where it is, how long, and what it is made of."""

    name: str
    offset: int
    nbytes: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Layout:
    """A whole file: ``head`` are its first bytes, ``parts`` its tensors by rising offset."""

    size: int
    head: bytes = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """(number, first byte, end) of the windows of 16 MiB that the file is cut into."""
        for number, lo in enumerate(range(0, self.size, WINDOW_BYTES)):
            yield number, lo, min(lo + WINDOW_BYTES, self.size)

    def parts_in(self, lo: int, hi: int) -> Iterator[Part]:
        """The tensors that have bytes in [lo, hi)."""
        at = bisect_right(self.parts, lo, key=lambda part: part.offset) - 1
        for part in self.parts[max(at, 0) :]:
            if part.offset >= hi:
                return
            if part.offset + part.nbytes > lo:
                yield part

    def fill(self, scatterer: Scatterer, lo: int, hi: int, out: np.ndarray) -> None:
        """Put bytes [lo, hi) of the file into ``out``, uint8 of that length.

        Raises:
            ReadError: naming the source file and the byte.
        """
        segments = [
            segment
            for part in self.parts_in(lo, hi)
            for rows in part.rows
            for segment in rows.segments(part.offset, lo, hi)
        ]
        end = 0
        for place, length in sorted((s[3], s[2]) for s in segments):
            out[end:place] = 0
            end = place + length
        out[end:] = 0
        if lo < len(self.head):
            head = np.frombuffer(self.head, np.uint8, min(len(self.head), hi) - lo, lo)
            out[: len(head)] = head
        scatterer.read(segments, out)
