"""The manifest of a side-file: what it holds, where, and of which source it was made.

It lies beside the side-file as ``SIDEFILE.manifest.json``. The side-file's own header carries the
digest of the manifest's layers, so neither is trusted without the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError, SideFileError
from mbolt_mlx.storage.experts import DTYPE_BYTES
from mbolt_mlx.storage.header import parse_json
from mbolt_mlx.storage.stamp import ShardStamp, Source, source_of, stamp_of

__all__ = [
    "Alignment",
    "LayerEntry",
    "Manifest",
    "PieceEntry",
    "ShardStamp",
    "Source",
    "layers_digest",
    "manifest_path",
    "source_of",
]

FORMAT = "mbolt-side-file"
VERSION = 1
SUFFIX = ".manifest.json"
MANIFEST_MAX = 1 << 30
_HEX64 = re.compile(r"[0-9a-f]{64}")
_NO_HEX = re.compile(r"[^0-9a-f]")


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A piece: ``offset`` counts from the start of its block; key ``bytes`` is ``nbytes`` here."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """The piece as the manifest has it."""
        return {
            "name": self.name,
            "offset": self.offset,
            "bytes": self.nbytes,
            "dtype": self.dtype,
            "shape": list(self.shape),
        }


@dataclass(frozen=True, eq=False, slots=True)
class LayerEntry:
    """A layer: ``offsets`` (int64) are absolute and, like ``checksums``, by original expert id.

    A checksum is the XXH3-128 of the whole block as stored, padding included, in hexadecimal.
    """

    layer: int
    module: str
    experts: int
    block_bytes: int
    offsets: np.ndarray
    checksums: tuple[str, ...]
    pieces: tuple[PieceEntry, ...]
    heat: tuple[float, ...] | None = None
    tier_hint: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Alignment:
    """Bytes to which the data and blocks are aligned, and pieces at the least in every layer."""

    block: int
    piece: int


@dataclass(frozen=True, eq=False, slots=True)
class Manifest:
    """Everything that is known of a side-file. ``read`` checks all that a reader relies on."""

    tool: str
    created: str
    source: Source
    alignment: Alignment
    order: dict[str, Any]
    layers: tuple[LayerEntry, ...]
    computed: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read and check the manifest file ``path``; unknown keys are ignored.

        Raises:
            SideFileError: when it is absent, malformed, of a newer version, or contradicts itself.
        """
        path = Path(path)
        try:
            raw = files.read_whole(path, limit=MANIFEST_MAX)
        except ReadError as error:
            raise SideFileError(error.message, path=path) from error
        return _Reader(path).manifest(parse_json(raw, path, SideFileError, "the manifest"))

    def as_dict(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "tool": self.tool,
            "created": self.created,
            "source": {
                "name": self.source.name,
                "revision": self.source.revision,
                "shards": [
                    {key: getattr(shard, key) for key in ShardStamp.__slots__}
                    for shard in self.source.shards
                ],
                "stamp": self.source.stamp,
            },
            "alignment": {"block": self.alignment.block, "piece": self.alignment.piece},
            "computed": self.computed,
            "order": self.order,
            "layers": [_layer_dict(layer) for layer in self.layers],
        }

    def encode(self) -> bytes:
        """The manifest as the bytes of its file."""
        return json.dumps(self.as_dict(), separators=(",", ":")).encode() + b"\n"

    def write(self, path: str | Path) -> None:
        """Write the manifest whole: under another name first, then renamed.

        Raises:
            OutputError: when it cannot be written.
        """
        from mbolt_mlx.core.output import write_whole

        write_whole(path, self.encode())


def manifest_path(side_file: str | Path) -> Path:
    """Where the manifest of ``side_file`` lies."""
    return Path(f"{side_file}{SUFFIX}")


def layers_digest(layers: Sequence[LayerEntry]) -> str:
    """SHA-256 over all that says where which expert's bytes lie and what they are."""
    digest = hashlib.sha256()
    for layer in layers:
        known = [layer.layer, layer.module, layer.experts, layer.block_bytes]
        known += [[p.name, p.offset, p.nbytes, p.dtype, list(p.shape)] for p in layer.pieces]
        digest.update(json.dumps(known).encode())
        digest.update(np.ascontiguousarray(layer.offsets, "<i8").tobytes())
        digest.update("".join(layer.checksums).encode())
    return digest.hexdigest()


def _layer_dict(layer: LayerEntry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "layer": layer.layer,
        "module": layer.module,
        "experts": layer.experts,
        "block_bytes": layer.block_bytes,
        "offsets": layer.offsets.tolist(),
        "checksums": list(layer.checksums),
        "pieces": [p.as_dict() for p in layer.pieces],
    }
    if layer.heat is not None:
        found["heat"] = list(layer.heat)
    if layer.tier_hint is not None:
        found["tier_hint"] = list(layer.tier_hint)
    return found


class _Reader:
    """Turns JSON values into a Manifest, naming the key that is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, message: str, **more: Any) -> SideFileError:
        return SideFileError(f"the manifest is damaged: {message}", path=self.path, **more)

    def get(self, where: Any, key: str, kind: type, place: str = "") -> Any:
        if not isinstance(where, dict):
            raise self.wrong(f"{place or 'it'} is not an object")
        if key not in where:
            raise self.wrong(f"{place}.{key} is absent".lstrip("."))
        value = where[key]
        if type(value) is not kind:
            raise self.wrong(f"{place}.{key} is not of type {kind.__name__}".lstrip("."))
        return value

    def count(self, where: Any, key: str, place: str = "", least: int = 0) -> int:
        value = self.get(where, key, int, place)
        if not least <= value < 1 << 63:
            raise self.wrong(f"{place}.{key} is out of range".lstrip("."), found=value)
        return value

    def text(self, where: dict[str, Any], key: str) -> str | None:
        value = where.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"source.{key} is not text")
        return value

    def manifest(self, found: Any) -> Manifest:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise SideFileError("not the manifest of a side-file", path=self.path)
        version = self.count(found, "version")
        if version != VERSION:
            raise SideFileError(
                "a side-file of another version", path=self.path, expected=VERSION,
                found=version, hint="use a newer mbolt-mlx, or write the side-file again",
            )  # fmt: skip
        computed = found.get("computed")
        if computed is not None:
            self.get(computed, "by", str, "computed")
        align = self.get(found, "alignment", dict)
        alignment = Alignment(
            self.count(align, "block", "alignment", 1), self.count(align, "piece", "alignment", 1)
        )
        source = self.source(self.get(found, "source", dict))
        order = self.get(found, "order", dict)
        self.get(order, "kind", str, "order")
        entries = self.get(found, "layers", list)
        layers = tuple(self.layer(entry, alignment) for entry in entries)
        self.check_blocks(layers)
        return Manifest(
            tool=self.get(found, "tool", str),
            created=self.get(found, "created", str),
            source=source,
            alignment=alignment,
            order=order,
            layers=layers,
            computed=computed,
        )

    def source(self, found: dict[str, Any]) -> Source:
        shards = []
        for i, entry in enumerate(self.get(found, "shards", list, "source")):
            place = f"source.shards[{i}]"
            header = self.get(entry, "header_sha256", str, place)
            sample = entry.get("sample_sha256")
            for value in (header, *([] if sample is None else [sample])):
                if not isinstance(value, str) or not _HEX64.fullmatch(value):
                    raise self.wrong(f"{place} has a hash that is not SHA-256")
            shards.append(
                ShardStamp(
                    self.get(entry, "file", str, place),
                    self.count(entry, "size", place),
                    self.get(entry, "mtime_ns", int, place),
                    header,
                    sample,
                )
            )
        stamp = self.get(found, "stamp", str, "source")
        if stamp != stamp_of(shards):
            raise self.wrong("source.stamp is not that of source.shards")
        return Source(self.text(found, "name"), self.text(found, "revision"), tuple(shards), stamp)

    def layer(self, found: Any, alignment: Alignment) -> LayerEntry:
        number = self.count(found, "layer", "a layer")
        place = f"layer {number}"
        experts = self.count(found, "experts", place, 1)
        block = self.count(found, "block_bytes", place, 1)
        if block % alignment.block:
            raise self.wrong(f"{place}: block_bytes is not aligned", found=block)
        offsets = self.get(found, "offsets", list, place)
        checksums = self.get(found, "checksums", list, place)
        for key, values, kind in (("offsets", offsets, int), ("checksums", checksums, str)):
            if len(values) != experts:
                raise self.wrong(
                    f"{place} has the wrong number of {key}", expected=experts, found=len(values)
                )
            if set(map(type, values)) != {kind}:
                raise self.wrong(f"{place} has {key} that are not of type {kind.__name__}")
        joined = "".join(checksums)
        if set(map(len, checksums)) != {32} or _NO_HEX.search(joined):
            raise self.wrong(f"{place} has a checksum that is not XXH3-128 in hexadecimal")
        if min(offsets) < 0 or max(offsets) >= 1 << 62:
            raise self.wrong(f"{place} has an offset out of range")
        starts = np.array(offsets, np.int64)
        if (starts % alignment.block).any():
            raise self.wrong(f"{place} has an offset that is not aligned")
        starts.setflags(write=False)
        return LayerEntry(
            layer=number,
            module=self.get(found, "module", str, place),
            experts=experts,
            block_bytes=block,
            offsets=starts,
            checksums=tuple(checksums),
            pieces=self.pieces(found, place, block, alignment),
            heat=self.numbers(found, "heat", place, experts),
            tier_hint=self.numbers(found, "tier_hint", place, experts),
        )

    def pieces(
        self, found: Any, place: str, block: int, alignment: Alignment
    ) -> tuple[PieceEntry, ...]:
        pieces = []
        end = 0
        for entry in self.get(found, "pieces", list, place):
            name = self.get(entry, "name", str, f"{place}: a piece")
            where = f"{place}, piece {name}"
            offset, nbytes = (
                self.count(entry, "offset", where),
                self.count(entry, "bytes", where, 1),
            )
            dtype, shape = (
                self.get(entry, "dtype", str, where),
                self.get(entry, "shape", list, where),
            )
            if dtype not in DTYPE_BYTES:
                raise self.wrong(f"{where} has an unknown dtype", found=dtype)
            if not all(type(n) is int and n > 0 for n in shape):
                raise self.wrong(f"{where} has a shape of no size", found=shape)
            if math.prod(shape) * DTYPE_BYTES[dtype] != nbytes:
                raise self.wrong(
                    f"{where}: bytes is not shape times dtype",
                    expected=math.prod(shape) * DTYPE_BYTES[dtype], found=nbytes,
                )  # fmt: skip
            if offset % alignment.piece:
                raise self.wrong(f"{where} is not aligned", found=offset)
            if offset < end or offset + nbytes > block:
                raise self.wrong(f"{where} lies over another piece or outside the block")
            end = offset + nbytes
            pieces.append(PieceEntry(name, offset, nbytes, dtype, tuple(shape)))
        if not pieces:
            raise self.wrong(f"{place} has no pieces")
        if len({piece.name for piece in pieces}) != len(pieces):
            raise self.wrong(f"{place} has a piece twice")
        return tuple(pieces)

    def numbers(self, found: Any, key: str, place: str, experts: int) -> tuple[Any, ...] | None:
        values = found.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != experts:
            raise self.wrong(f"{place}: {key} is not a list of {experts}")
        if not all(type(v) in (int, float) and 0 <= v < 1e300 for v in values):
            raise self.wrong(f"{place}: {key} holds something that is not a number from 0 on")
        return tuple(values)

    def check_blocks(self, layers: tuple[LayerEntry, ...]) -> None:
        """No two blocks may share a byte, no two layers a number or a name."""
        if not layers:
            raise self.wrong("it has no layers")
        for what in ("layer", "module"):
            if len({getattr(layer, what) for layer in layers}) != len(layers):
                raise self.wrong(f"two layers have the same {what}")
        starts = np.concatenate([layer.offsets for layer in layers])
        sizes = np.repeat([y.block_bytes for y in layers], [y.experts for y in layers])
        order = np.argsort(starts, kind="stable")
        starts, sizes = starts[order], sizes[order]
        over = np.flatnonzero(starts[:-1] + sizes[:-1] > starts[1:])
        if len(over):
            raise self.wrong("two blocks overlap", offset=int(starts[over[0] + 1]))
