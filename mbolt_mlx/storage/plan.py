"""The geometry of a side-file: where each layer, block and piece lies, before a byte is written.

The side-file is a safetensors file with one U8 tensor ``[experts, block_bytes]`` a layer. Its data
begins at a multiple of 16 KiB and every block is a multiple of 16 KiB, so the layers follow each
other without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.manifest import (
    FORMAT,
    VERSION,
    Alignment,
    LayerEntry,
    PieceEntry,
    layers_digest,
)

BLOCK_ALIGN = 16384
PIECE_ALIGN = 4096
PIECE_ALIGN_SMALL = 512
PIECE_PADDING_MAX = 0.03
TENSOR_SUFFIX = ".blocks"
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Hints:
    """What a profile says of a layer, by expert: how often it is used, and 0 hot to 2 cold."""

    heat: tuple[float, ...]
    tier_hint: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """A layer's place: ``starts`` (int64) are the blocks' first bytes by original expert id."""

    source: ExpertLayer
    piece_offsets: tuple[int, ...]
    piece_align: int
    block_bytes: int
    start: int
    starts: np.ndarray
    sequence: np.ndarray  # expert ids in file order
    heat: tuple[float, ...] | None = None
    tier_hint: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return self.source.experts * self.block_bytes

    def entry(self, checksums: Sequence[str]) -> LayerEntry:
        """What the manifest says of this layer; ``checksums`` are by original expert id."""
        layer = self.source
        pieces = tuple(
            PieceEntry(p.name, offset, p.nbytes, p.dtype, p.shape)
            for p, offset in zip(layer.pieces, self.piece_offsets, strict=True)
        )
        return LayerEntry(
            layer=layer.layer,
            module=layer.module,
            experts=layer.experts,
            block_bytes=self.block_bytes,
            offsets=self.starts,
            checksums=tuple(checksums),
            pieces=pieces,
            heat=self.heat,
            tier_hint=self.tier_hint,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A whole side-file: ``size`` and ``data_start`` in bytes."""

    layers: tuple[PlannedLayer, ...]
    data_start: int
    size: int
    source_stamp: str

    @property
    def alignment(self) -> Alignment:
        """The alignment that holds in every layer."""
        return Alignment(BLOCK_ALIGN, min(layer.piece_align for layer in self.layers))

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(layer.source.experts for layer in self.layers)

    def header(self, entries: Sequence[LayerEntry] | None = None) -> bytes:
        """All bytes before the data, equally many with and without the finished ``entries``."""
        digest = layers_digest(entries) if entries is not None else _NO_DIGEST
        return _header(self.layers, self.data_start, self.source_stamp, digest)

    def stamp(self) -> str:
        """SHA-256 over all that decides the bytes of the side-file, the source apart."""
        digest = hashlib.sha256(self.header())
        for layer in self.layers:
            known = [layer.source.module, layer.piece_offsets, layer.source.pieces]
            digest.update(json.dumps(known, default=str).encode())
            digest.update(np.ascontiguousarray(layer.starts, "<i8").tobytes())
        return digest.hexdigest()


def make_plan(
    layers: Sequence[ExpertLayer],
    source_stamp: str,
    order: Mapping[int, Sequence[int]] | None = None,
    hints: Mapping[int, Hints] | None = None,
) -> Plan:
    """Lay ``layers`` out one after the other.

    Args:
        layers: what ``find_experts`` gave.
        source_stamp: the stamp of the source, kept in the side-file's header.
        order: by layer number, the expert ids in the order in which their blocks lie; a layer
            that is absent keeps the order of the ids.
        hints: by layer number, what a profile says of its experts.

    Raises:
        UsageError: when an order or a hint is not one of the layer's experts.
    """
    sequences = [_sequence(layer, order) for layer in layers]
    shapes = [_block(layer) for layer in layers]
    relative = 0
    planned = []
    for layer, sequence, (offsets, align, block) in zip(layers, sequences, shapes, strict=True):
        starts = np.empty(layer.experts, np.int64)
        starts[sequence] = relative + block * np.arange(layer.experts, dtype=np.int64)
        planned.append(
            PlannedLayer(layer, offsets, align, block, relative, starts, np.asarray(sequence))
        )
        relative += layer.experts * block
    # The header names no absolute offsets, so its length is known before data_start is.
    data_start = len(_header(planned, 0, source_stamp, _NO_DIGEST))
    placed = []
    for p in planned:
        starts = p.starts + data_start
        starts.setflags(write=False)
        found = (hints or {}).get(p.source.layer)
        if found is not None and len(found.heat) != p.source.experts:
            raise UsageError(
                f"the heat of layer {p.source.layer} is not that of its {p.source.experts} experts"
            )
        placed.append(
            replace(
                p,
                start=p.start + data_start,
                starts=starts,
                heat=found and found.heat,
                tier_hint=found and found.tier_hint,
            )
        )
    return Plan(tuple(placed), data_start, data_start + relative, source_stamp)


def side_file_bytes(layers: Sequence[ExpertLayer]) -> int:
    """Size in bytes of the side-file of ``layers``."""
    return make_plan(layers, _NO_DIGEST).size


def _block(layer: ExpertLayer) -> tuple[tuple[int, ...], int, int]:
    """(offset of each piece, their alignment, bytes of a block) for one layer."""
    sizes = [piece.nbytes for piece in layer.pieces]
    padded = sum(-(-n // PIECE_ALIGN) * PIECE_ALIGN for n in sizes)
    cheap = padded - sum(sizes) < PIECE_PADDING_MAX * sum(sizes)
    align = PIECE_ALIGN if cheap else PIECE_ALIGN_SMALL
    offsets, position = [], 0
    for n in sizes:
        position = -(-position // align) * align
        offsets.append(position)
        position += n
    return tuple(offsets), align, -(-position // BLOCK_ALIGN) * BLOCK_ALIGN


def _sequence(layer: ExpertLayer, order: Mapping[int, Sequence[int]] | None) -> np.ndarray:
    ids = np.arange(layer.experts)
    if order is None or layer.layer not in order:
        return ids
    given = np.asarray(order[layer.layer])
    if not np.array_equal(np.sort(given), ids):
        raise UsageError(
            f"the order of layer {layer.layer} does not name each of its {layer.experts} experts "
            "once"
        )
    return given


def _header(
    layers: Sequence[PlannedLayer], data_start: int, source_stamp: str, digest: str
) -> bytes:
    known: dict[str, object] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "source_stamp": source_stamp,
            "layers_sha256": digest,
        }
    }
    for layer in layers:
        begin = layer.start - data_start
        known[layer.source.module + TENSOR_SUFFIX] = {
            "dtype": "U8",
            "shape": [layer.source.experts, layer.block_bytes],
            "data_offsets": [begin, begin + layer.nbytes],
        }
    text = json.dumps(known, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // BLOCK_ALIGN) * BLOCK_ALIGN - 8
    return length.to_bytes(8, "little") + text.ljust(length)
