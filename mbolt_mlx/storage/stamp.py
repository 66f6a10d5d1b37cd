"""What is remembered of a model's files, to tell later whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from mbolt_mlx.core import files
from mbolt_mlx.storage.checkpoint import Checkpoint, Shard

SAMPLED_PAGES = 64
SAMPLED_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ShardStamp:
    """What is remembered of a source file; ``sample_sha256`` is over 64 pages spread over it."""

    file: str
    size: int
    mtime_ns: int
    header_sha256: str
    sample_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The model that a side-file was made of."""

    name: str | None
    revision: str | None
    shards: tuple[ShardStamp, ...]
    stamp: str


def source_of(
    checkpoint: Checkpoint,
    name: str | None = None,
    revision: str | None = None,
    *,
    sample: bool = False,
) -> Source:
    """The stamp of ``checkpoint``; with ``sample``, 64 pages of each shard are read and hashed.

    Raises:
        ReadError: when a page cannot be read.
    """
    shards = tuple(
        ShardStamp(s.file, s.size, s.mtime_ns, s.header_sha256, sample_of(s) if sample else None)
        for s in checkpoint.shards
    )
    return Source(name, revision, shards, stamp_of(shards))


def stamp_of(shards: Sequence[ShardStamp]) -> str:
    """SHA-256 over the shards' names, sizes and header hashes, whatever their order."""
    known = sorted([s.file, s.size, s.header_sha256] for s in shards)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def sample_of(shard: Shard) -> str:
    """SHA-256 over 64 pages spread evenly over the data of ``shard``, the last bytes included.

    Raises:
        ReadError: when a page cannot be read.
    """
    span = shard.size - shard.data_start
    length = min(SAMPLED_PAGE_BYTES, span)
    page = memoryview(bytearray(length))
    digest = hashlib.sha256()
    fd = files.open_read(shard.path)
    try:
        files.advise_random(fd)
        for i in range(SAMPLED_PAGES):
            offset = shard.data_start + (span - length) * i // (SAMPLED_PAGES - 1)
            files.pread_into(fd, [page], offset, path=str(shard.path))
            digest.update(page)
    finally:
        files.close(fd)
    return digest.hexdigest()
