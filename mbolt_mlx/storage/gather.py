"""Reads experts from the plain shards and puts their pieces where a side-file's blocks want them.

Stacked experts are neighbours on the drive, so the pieces of many blocks come in a few long reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mbolt_mlx.core.scatter import Scatterer, Segment
from mbolt_mlx.storage.plan import PlannedLayer

WINDOW_BYTES = 16 << 20


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
    """Fills windows from shards. One a thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._scatterer = Scatterer(paths)

    def fill(self, window: Window, out: np.ndarray) -> None:
        """Put the bytes of ``window`` into ``out`` (uint8, one dimension), padding as zeros.

        Raises:
            ReadError: naming the shard and the byte.
        """
        zero_padding(window, out)
        self._scatterer.read(_segments(window), out)


def _segments(window: Window) -> list[Segment]:
    """The ranges of the shards that make up ``window``."""
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
    return segments


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
