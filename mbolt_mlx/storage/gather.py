"""Reads experts from the plain shards and puts their pieces where a side-file's blocks want them.

Stacked experts are neighbours on the drive, so the pieces of many blocks come in a few long reads.
Reads bypass the page cache where they can: a rewrite touches every byte once, and would push out
what others need.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError
from mbolt_mlx.storage.plan import PlannedLayer

WINDOW_BYTES = 16 << 20
BOUNCE_BYTES = 8 << 20
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes ``lo`` to ``hi`` of each block of ``experts``, which follow each other in the file.

    Either whole blocks, or a part of one that is larger than a window. ``offset`` is the first
    byte in the side-file.
    """

    layer: PlannedLayer
    experts: tuple[int, ...]
    lo: int
    hi: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return len(self.experts) * (self.hi - self.lo)


def windows_of(layer: PlannedLayer, experts: Sequence[int]) -> Iterator[tuple[Window, ...]]:
    """Cut the blocks of ``experts``, given in file order, into windows of at most 16 MiB.

    Each tuple is worked through in order by one thread: one window of whole blocks, or all the
    parts of one large block.
    """
    block = layer.block_bytes
    fit = max(1, WINDOW_BYTES // block)
    pending: list[int] = []
    for expert in experts:
        follows = pending and layer.starts[expert] == layer.starts[pending[-1]] + block
        if pending and (not follows or len(pending) == fit):
            yield _cut(layer, pending)
            pending = []
        pending.append(expert)
    if pending:
        yield _cut(layer, pending)


def _cut(layer: PlannedLayer, experts: list[int]) -> tuple[Window, ...]:
    start, block = int(layer.starts[experts[0]]), layer.block_bytes
    if block <= WINDOW_BYTES:
        return (Window(layer, tuple(experts), 0, block, start),)
    return tuple(
        Window(layer, tuple(experts), lo, min(lo + WINDOW_BYTES, block), start + lo)
        for lo in range(0, block, WINDOW_BYTES)
    )


def aligned_buffer(size: int) -> np.ndarray:
    """A uint8 array of ``size`` bytes that begins on a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Filler(Protocol):
    """Where the bytes of blocks come from."""

    def fill(self, window: Window, out: np.ndarray) -> None:
        """Put the bytes of ``window`` into ``out`` (uint8, one dimension), padding as zeros."""


class Computer(Filler, Protocol):
    """Computes experts that are no ranges of the files; ``note`` says in the manifest how.

    It works in the order of the layers, on the calling thread (``threads`` is 0).
    """

    note: dict[str, Any]
    threads: int


class Gatherer:
    """Fills windows from shards. One a thread: it owns a bounce buffer of 8 MiB."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.bytes_read = 0
        self._bounce: np.ndarray | None = None

    def fill(self, window: Window, out: np.ndarray) -> None:
        """Put the bytes of ``window`` into ``out`` (uint8, one dimension), padding as zeros.

        Raises:
            ReadError: naming the shard and the byte.
        """
        zero_padding(window, out)
        fd, opened = -1, -1
        direct = False
        try:
            for shard, begin, parts in _runs(window):
                if shard != opened:
                    if fd >= 0:
                        files.close(fd)
                        fd = -1
                    fd, direct = files.open_cold(self.paths[shard], drop=False)
                    opened = shard
                targets = [out[at : at + n] for at, n in parts]
                if direct:
                    self._read_direct(fd, begin, targets, self.paths[shard])
                else:
                    views = [memoryview(t) for t in targets]
                    files.pread_into(fd, views, begin, path=str(self.paths[shard]))
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


def _runs(window: Window) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The window's reads, each (shard, first byte, [(place in the window, bytes), …])."""
    layer, width = window.layer, window.hi - window.lo
    segments = []
    for p, at, first, last in pieces_in(window):
        shards = layer.source.files[p]
        offsets = layer.source.offsets[p]
        for i, expert in enumerate(window.experts):
            begin = int(offsets[expert]) + first - at
            segments.append(
                (int(shards[expert]), begin, last - first, i * width + first - window.lo)
            )
    segments.sort()
    shard, start, end = -1, 0, 0
    parts: list[tuple[int, int]] = []
    for number, begin, length, place in segments:
        while length:
            if number != shard or begin != end or end - start >= BOUNCE_BYTES:
                if parts:
                    yield shard, start, parts
                shard, start, end, parts = number, begin, begin, []
            taken = min(length, BOUNCE_BYTES - (end - start))
            parts.append((place, taken))
            begin, end, place, length = begin + taken, end + taken, place + taken, length - taken
    if parts:
        yield shard, start, parts


def pieces_in(window: Window) -> Iterator[tuple[int, int, int, int]]:
    """The pieces that lie in ``window``: (number, its place in a block, first and last byte of
    the block that are in the window)."""
    layer = window.layer
    for p, (piece, at) in enumerate(zip(layer.source.pieces, layer.piece_offsets, strict=True)):
        first, last = max(window.lo, at), min(window.hi, at + piece.nbytes)
        if first < last:
            yield p, at, first, last


def zero_padding(window: Window, out: np.ndarray) -> None:
    """Set the bytes of ``window`` that belong to no piece to zero."""
    blocks = out[: window.nbytes].reshape(len(window.experts), window.hi - window.lo)
    for first, last in padding_of(window.layer):
        first, last = max(first, window.lo), min(last, window.hi)
        if first < last:
            blocks[:, first - window.lo : last - window.lo] = 0


def padding_of(layer: PlannedLayer) -> Iterator[tuple[int, int]]:
    """The ranges of a block, [first, last), that belong to no piece."""
    position = 0
    pieces = zip(layer.source.pieces, layer.piece_offsets, strict=True)
    for piece, at in sorted(pieces, key=lambda pair: pair[1]):
        if at > position:
            yield position, at
        position = at + piece.nbytes
    if layer.block_bytes > position:
        yield position, layer.block_bytes
