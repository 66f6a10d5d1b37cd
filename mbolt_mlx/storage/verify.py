"""Proves a side-file against its source, byte for byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import SideFileError, VerifyError
from mbolt_mlx.core.progress import Progress
from mbolt_mlx.core.scatter import aligned_buffer
from mbolt_mlx.core.workers import work_through
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.gather import (
    WINDOW_BYTES,
    Computer,
    Filler,
    Gatherer,
    Window,
    windows_of,
)
from mbolt_mlx.storage.locate import SideFile, check_is_side_file, open_side_file
from mbolt_mlx.storage.manifest import LayerEntry, Manifest, manifest_path
from mbolt_mlx.storage.plan import PlannedLayer

THREADS = 3
SAMPLED_BLOCKS = 64


@dataclass(frozen=True)
class VerifyReport:
    """What was compared: ``blocks`` of ``of_blocks``, ``bytes`` of the side-file."""

    path: Path
    full: bool
    blocks: int
    of_blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Difference:
    """One place where the side-file is not what it should be, by its byte in the file."""

    offset: int
    error: VerifyError


class _Stop(Exception):
    """A difference was found; no more work is needed."""


def verify(
    checkpoint: Checkpoint,
    layers: Sequence[ExpertLayer],
    side_file: str | Path | SideFile,
    *,
    full: bool = True,
    progress: bool = True,
    computer: Computer | None = None,
) -> VerifyReport:
    """Compare a side-file with the shards it was made of.

    Always: manifest, source stamp, header and geometry. ``full``: every byte of every piece, the
    padding, all checksums, and the manifest against its schema; otherwise 64 blocks spread evenly.
    ``computer`` computes the layers that are no ranges of the shards once more.

    Raises:
        VerifyError: with the first difference: layer, expert, piece and byte of the side-file.
        SideFileError: when there is no such file, or it is no side-file.
        ReadError: when either cannot be read.
    """
    path = side_file.path if isinstance(side_file, SideFile) else Path(side_file)
    check_is_side_file(path)
    try:
        opened = open_side_file(path, checkpoint, layers)
    except SideFileError as error:
        raise VerifyError(
            error.message, path=error.path, tensor=error.tensor, offset=error.offset,
            expected=error.expected, found=error.found, hint=error.hint,
        ) from error  # fmt: skip
    if full:
        check_schema(manifest_path(path))
    planned = [_planned(layer, opened.manifest) for layer in layers]
    started = time.perf_counter()
    comparison = _Comparison(path, planned, opened.manifest, checkpoint, full, computer)
    comparison.run(progress)
    return VerifyReport(
        path=path,
        full=full,
        blocks=comparison.blocks,
        of_blocks=sum(layer.experts for layer in layers),
        bytes=comparison.bytes,
        seconds=time.perf_counter() - started,
    )


def check_schema(path: Path) -> None:
    """Check a manifest file against ``manifests/schemas/side-file.schema.json``.

    Raises:
        VerifyError: naming the key that breaks it.
    """
    import json

    from jsonschema import Draft202012Validator

    from mbolt_mlx.resources import resource

    schema = json.loads(resource("manifests/schemas/side-file.schema.json").read_bytes())
    found = json.loads(files.read_whole(path, limit=1 << 30))
    error = next(Draft202012Validator(schema).iter_errors(found), None)
    if error is not None:
        raise VerifyError(f"breaks the schema at {error.json_path}: {error.message}", path=path)


class _Comparison:
    def __init__(
        self,
        path: Path,
        planned: Sequence[PlannedLayer],
        manifest: Manifest,
        checkpoint: Checkpoint,
        full: bool,
        computer: Computer | None,
    ) -> None:
        self.path = path
        self.computer = computer
        self.planned = planned
        self.entries = {entry.layer: entry for entry in manifest.layers}
        self.paths = [shard.path for shard in checkpoint.shards]
        self.chosen = None if full else _spread(planned)
        self.blocks = self.bytes = 0
        self._found: list[_Difference] = []
        self._lock = threading.Lock()

    def jobs(self) -> Iterator[tuple[Window, ...]]:
        first = 0
        for layer in self.planned:
            experts = layer.sequence.tolist()
            if self.chosen is not None:
                experts = [e for i, e in enumerate(experts, first) if i in self.chosen]
            first += layer.source.experts
            yield from windows_of(layer, experts)

    def run(self, progress: bool) -> None:
        total = sum(window.nbytes for job in self.jobs() for window in job)
        with Progress("comparing", total, shown=progress) as bar:
            try:
                threads = THREADS if self.computer is None else self.computer.threads
                work_through(self.jobs(), lambda: self.worker(bar), threads)
            except _Stop:
                # Jobs are handed out in order, so the first difference is among those found.
                raise min(self._found, key=lambda d: d.offset).error from None

    def worker(self, bar: Progress):
        filler: Filler = self.computer or Gatherer(self.paths)
        wanted, stored = aligned_buffer(WINDOW_BYTES), aligned_buffer(WINDOW_BYTES)

        def do(job: tuple[Window, ...]) -> None:
            fd, _ = files.open_cold(self.path)
            hasher = xxhash.xxh3_128()
            try:
                for window in job:
                    want, have = wanted[: window.nbytes], stored[: window.nbytes]
                    filler.fill(window, want)
                    files.pread_into(fd, [memoryview(have)], window.offset, path=str(self.path))
                    self.compare(window, want, have)
                    if window.nbytes < window.layer.block_bytes:
                        hasher.update(have)
                    bar.advance(window.nbytes)
            finally:
                files.close(fd)
            self.check_sums(job, stored, hasher)
            with self._lock:
                self.blocks += len(job[0].experts)
                self.bytes += sum(window.nbytes for window in job)

        return do

    def compare(self, window: Window, want: np.ndarray, have: np.ndarray) -> None:
        if np.array_equal(want, have):
            return
        at = int(np.flatnonzero(want != have)[0])
        width = window.hi - window.lo
        expert = window.experts[at // width]
        inside = window.lo + at % width
        layer = window.layer
        what = "the padding"
        for piece, start in zip(layer.source.pieces, layer.piece_offsets, strict=True):
            if start <= inside < start + piece.nbytes:
                what = f"{piece.name} (its byte {inside - start})"
        entry = self.entries[layer.source.layer]
        self.differ(
            window.offset + at,
            f"layer {entry.layer}, expert {expert}, {what} differs from the source: "
            f"{self.blame(entry, expert)}",
            expected=f"0x{int(want[at]):02x}",
            found=f"0x{int(have[at]):02x}",
        )

    def blame(self, entry: LayerEntry, expert: int) -> str:
        """Which of the two changed, by the checksum from when the block was written."""
        hasher = xxhash.xxh3_128()
        part = np.empty(min(WINDOW_BYTES, entry.block_bytes), np.uint8)
        fd = files.open_read(self.path)
        try:
            for lo in range(0, entry.block_bytes, len(part)):
                view = part[: min(len(part), entry.block_bytes - lo)]
                start = int(entry.offsets[expert]) + lo
                files.pread_into(fd, [memoryview(view)], start, path=str(self.path))
                hasher.update(view)
        finally:
            files.close(fd)
        if hasher.hexdigest() == entry.checksums[expert]:
            return "the source changed after the side-file was written"
        return "the side-file is damaged"

    def check_sums(
        self, job: tuple[Window, ...], stored: np.ndarray, hasher: xxhash.xxh3_128
    ) -> None:
        first = job[0]
        entry = self.entries[first.layer.source.layer]
        block = entry.block_bytes
        for i, expert in enumerate(first.experts):
            if len(job) > 1:
                found = hasher.hexdigest()
            else:
                found = xxhash.xxh3_128_hexdigest(stored[i * block : (i + 1) * block])
            if found != entry.checksums[expert]:
                self.differ(
                    int(entry.offsets[expert]),
                    f"layer {entry.layer}, expert {expert}: its bytes are the source's, but its "
                    "checksum is not theirs",
                    expected=entry.checksums[expert],
                    found=found,
                )

    def differ(self, offset: int, message: str, *, expected: str, found: str) -> None:
        error = VerifyError(
            message, path=self.path, offset=offset, expected=expected, found=found,
            hint="write it again with mbolt-mlx coalesce --force",
        )  # fmt: skip
        with self._lock:
            self._found.append(_Difference(offset, error))
        raise _Stop


def _planned(layer: ExpertLayer, manifest: Manifest) -> PlannedLayer:
    """The places of ``layer`` in a side-file as its manifest tells them."""
    entry = next(e for e in manifest.layers if e.layer == layer.layer)
    offsets = {piece.name: piece.offset for piece in entry.pieces}
    return PlannedLayer(
        source=layer,
        piece_offsets=tuple(offsets[piece.name] for piece in layer.pieces),
        piece_align=manifest.alignment.piece,
        block_bytes=entry.block_bytes,
        start=int(entry.offsets.min()),
        starts=entry.offsets,
        sequence=np.argsort(entry.offsets),
    )


def _spread(planned: Sequence[PlannedLayer]) -> set[int]:
    """64 blocks spread evenly over all layers, the first and the last included."""
    count = sum(layer.source.experts for layer in planned)
    return {i * (count - 1) // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)}
