"""MBPF, the map of a model's experts that the patched llama.cpp prefetches by.

All little-endian, a record for each tensor that a token reads from the drive, in that order.

Version 2, of the first implementation, for one file: u32 0x4650424D, 2, n_layers, n_expert,
n_expert_used, entries a layer (3, or 1 when interleaved), path length; the path; then for each
layer from 0 on and each entry (up, gate, down) u64 base, slice bytes, stride.

Version 3, for whatever version 2 cannot say (several files, dense layers, layers that differ, two
entries): u32 0x4650424D, 3, n_files, n_records, 0 (flags); for each file u64 size, u64 mtime in
nanoseconds, u32 path length, path (absolute, UTF-8); for each record u32 layer, file, n_expert,
n_expert_used, u64 base, slice bytes, stride.

Expert e's bytes are the slice bytes at base + e · stride.

The prefetcher joins neighbouring ranges of a layer in one file of the map. It reads file by file in
the order of the map, and a file by rising place. Where blocks of interleaved experts are read slice
by slice (blocks.py), version 3 therefore names the model's files once for each slice of a block:
the first slices of all chosen experts are read before the second ones, and not joined with them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from mbolt_gguf.blocks import BLOCKS, SLICES, WHOLE, ranges_in
from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.model import Model
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import (
    GgufError,
    MboltError,
    OutputError,
    ReadError,
    UnsupportedError,
    UsageError,
)
from mbolt_mlx.core.head import read_head
from mbolt_mlx.core.output import check_not_pipe, write_whole
from mbolt_mlx.core.places import cache_folder

MAGIC = 0x4650424D
_HEAD_2 = struct.Struct("<7I")
_HEAD_3 = struct.Struct("<5I")
_ENTRY = struct.Struct("<3Q")
_FILE = struct.Struct("<2QI")
_RECORD = struct.Struct("<4I3Q")
_SIZE_MAX = 1 << 30
_COUNT_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file of the model; ``size`` and ``mtime_ns`` are None in version 2."""

    path: str
    size: int | None
    mtime_ns: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of one layer: expert e's ``nbytes`` bytes are at ``base + e * stride``."""

    layer: int
    file: int
    experts: int
    top_k: int
    base: int
    nbytes: int
    stride: int


@dataclass(frozen=True)
class PrefetchMap:
    """A decoded map."""

    version: int
    files: tuple[MappedFile, ...]
    records: tuple[Record, ...]


def make_map(model: Model, *, version: int | None = None, blocks: str = WHOLE) -> bytes:
    """The map of ``model``, in version 2 where that can say it and else in version 3.

    Args:
        model: of any layout.
        version: 2 or 3.
        blocks: of `BLOCKS`: how the blocks of interleaved experts are read. Other experts are read
            slice by slice whatever it says.

    Raises:
        UnsupportedError: when the model has no experts, or ``version`` 2 was asked for and cannot
            say what it has.
        GgufError: when its experts are malformed.
    """
    layers = find_experts(model)
    if version not in (None, 2, 3):
        raise UnsupportedError("no such prefetch map", expected="version 2 or 3", found=version)
    if blocks not in BLOCKS:
        raise UsageError(f"unknown blocks {blocks!r}", expected=" or ".join(BLOCKS))
    reason = _not_in_version_2(model, layers, blocks)
    if version == 2 and reason:
        raise UnsupportedError(
            f"version 2 of the prefetch map cannot hold this model: {reason}", path=model.path
        )
    if version != 3 and not reason:
        return _version_2(model, layers)
    found = [(layer, r) for layer in layers for r in ranges_in(layer, blocks, len(model.files))]
    records = [
        _RECORD.pack(layer.layer, r.file, layer.experts, layer.top_k, r.base, r.nbytes, r.stride)
        for layer, r in found
    ]
    named = model.files * (1 + max(r.file for _, r in found) // len(model.files))
    parts = [_HEAD_3.pack(MAGIC, 3, len(named), len(records), 0)]
    for file in named:
        path = _path_bytes(file.path)
        parts += [_FILE.pack(file.size, file.mtime_ns, len(path)), path]
    return b"".join(parts + records)


def _not_in_version_2(model: Model, layers: tuple[MoeLayer, ...], blocks: str) -> str | None:
    """Why version 2 cannot hold the map of ``model``, if it cannot."""
    if blocks == SLICES and any(y.interleaved for y in layers):
        return "its blocks are read slice by slice"
    if model.split:
        return "the model is split"
    if [y.layer for y in layers] != list(range(len(layers))):
        return "some layers have no experts"
    if len({(y.experts, y.top_k, y.interleaved, len(y.weights)) for y in layers}) > 1:
        return "its layers differ"
    if [s.role for s in layers[0].weights] not in (["up", "gate", "down"], ["ilv"]):
        return "an expert has two tensors"
    return None


def _version_2(model: Model, layers: tuple[MoeLayer, ...]) -> bytes:
    path, first = _path_bytes(model.path), layers[0]
    counts = (len(layers), first.experts, first.top_k, len(first.weights), len(path))
    entries = [
        _ENTRY.pack(s.offset(0), s.nbytes, s.stride) for layer in layers for s in layer.weights
    ]
    return b"".join([_HEAD_2.pack(MAGIC, 2, *counts), path, *entries])


def read_map(data: bytes, path: str | Path | None = None) -> PrefetchMap:
    """Decode a map of version 2 or 3; ``path`` is for the errors.

    Raises:
        GgufError: when it is malformed.
    """
    if len(data) < 8 or struct.unpack_from("<I", data)[0] != MAGIC:
        raise GgufError("not a prefetch map", path=path, offset=0)
    version = struct.unpack_from("<I", data, 4)[0]
    if version not in (2, 3):
        raise GgufError(
            "unknown version of a prefetch map",
            path=path, offset=4, expected="2 or 3", found=version,
        )  # fmt: skip
    try:
        return (_read_2 if version == 2 else _read_3)(data)
    except (struct.error, ValueError, IndexError) as error:
        raise GgufError("the prefetch map is cut short or damaged", path=path) from error


def _read_2(data: bytes) -> PrefetchMap:
    _, _, layers, experts, top_k, entries, length = _HEAD_2.unpack_from(data)
    at = _HEAD_2.size + length
    _check_length(data, at + layers * entries * _ENTRY.size)
    records = [
        Record(n // entries, 0, experts, top_k, *_ENTRY.unpack_from(data, at + n * _ENTRY.size))
        for n in range(layers * entries)
    ]
    name = os.fsdecode(data[_HEAD_2.size : at])
    return PrefetchMap(2, (MappedFile(name, None, None),), tuple(records))


def _read_3(data: bytes) -> PrefetchMap:
    _, _, n_files, n_records, _ = _HEAD_3.unpack_from(data)
    if max(n_files, n_records) > _COUNT_MAX:
        raise ValueError
    at, mapped = _HEAD_3.size, []
    for _ in range(n_files):
        size, mtime_ns, length = _FILE.unpack_from(data, at)
        at += _FILE.size
        mapped.append(MappedFile(os.fsdecode(data[at : at + length]), size, mtime_ns))
        at += length
    _check_length(data, at + n_records * _RECORD.size)
    records = [Record(*r) for r in _RECORD.iter_unpack(data[at:])]
    if any(r.file >= n_files for r in records):
        raise ValueError
    return PrefetchMap(3, tuple(mapped), tuple(records))


def _check_length(data: bytes, expected: int) -> None:
    if len(data) != expected:
        raise ValueError


def map_path(model: Model) -> Path:
    """Where the map of ``model`` lies by default: in the user's cache, under the model's stamp and
    place (a copy of a model elsewhere has a map of its own)."""
    place = hashlib.sha256(_path_bytes(model.path)).hexdigest()[:8]
    return cache_folder() / "maps" / f"{model.stamp[:16]}-{place}.mbpf"


def write_map(
    model: Model,
    path: str | Path | None = None,
    *,
    version: int | None = None,
    blocks: str = WHOLE,
) -> Path:
    """Write the map of ``model``, by default to `map_path`, whole or not at all; return its place.

    Raises:
        OutputError: when it cannot be written, or ``path`` is a pipe, in no folder, a file of the
            model, or any other but an older map.
        UnsupportedError, GgufError: as `make_map`.
    """
    target = map_path(model) if path is None else Path(path)
    if any(files.is_same_file(target, file.path) for file in model.files):
        raise OutputError("this is a file of the model itself", path=target)
    if path is not None:
        check_not_pipe(target)
        if target.is_dir():
            raise OutputError("a folder; name a file in it", path=target)
        if not target.parent.is_dir():
            raise OutputError("no such folder", path=target.parent)
    if path is not None and target.is_file() and not _may_replace(target):
        raise OutputError(
            "another file is there already, and it is not a prefetch map",
            path=target, hint="choose another name or remove it",
        )  # fmt: skip
    data = make_map(model, version=version, blocks=blocks)
    if path is None:
        files.make_folder(target.parent)
    write_whole(target, data)
    return target


def is_stale(model: Model, path: str | Path | None = None, *, blocks: str | None = None) -> bool:
    """Whether the map ``path`` (by default at `map_path`) is absent, damaged, or not what would be
    written now, in the version that it has: other files, places, and in version 3 sizes and times.

    With ``blocks``, also whether it reads blocks in another way.

    Raises:
        UnsupportedError, GgufError: as `make_map`.
    """
    target = map_path(model) if path is None else Path(path)
    try:
        found = files.read_whole(target, limit=_SIZE_MAX)
    except ReadError:
        return True
    fresh = [
        make_map(model, version=version, blocks=way)
        for way in (BLOCKS if blocks is None else (blocks,))
        for version in (None, 3)
    ]
    return found not in fresh


def _may_replace(path: Path) -> bool:
    head = read_head(path, 4)
    return not head or head == MAGIC.to_bytes(4, "little")


def _path_bytes(path: Path) -> bytes:
    found = os.fsencode(os.path.abspath(path))
    if b"\0" in found:
        raise MboltError("the path holds a zero byte", path=path)
    return found
