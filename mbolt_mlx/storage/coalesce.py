"""The rewriter: experts that are scattered over shards become one block each in a side-file."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mbolt_mlx import __version__
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import OutputError, ReadError
from mbolt_mlx.core.output import Output, check_space, open_output
from mbolt_mlx.core.progress import Progress
from mbolt_mlx.core.scatter import aligned_buffer
from mbolt_mlx.core.workers import work_through
from mbolt_mlx.storage.checkpoint import Checkpoint, Shard
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.gather import (
    WINDOW_BYTES,
    Computer,
    Filler,
    Gatherer,
    Window,
    windows_of,
)
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from mbolt_mlx.storage.plan import Hints, Plan, make_plan, side_file_bytes
from mbolt_mlx.storage.stamp import Source, source_of
from mbolt_mlx.storage.target import check_target, existing

THREADS = 3
CHECKPOINT_BYTES = 256 << 20


@dataclass(frozen=True)
class Report:
    """What a rewrite did. ``resumed_from`` counts blocks that an earlier run had finished.

    ``already`` is True when a matching side-file was there and nothing was written;
    ``write_seconds`` includes bringing every byte to the drive.
    """

    path: Path
    bytes: int
    blocks: int
    write_seconds: float
    verify_seconds: float
    resumed_from: int
    already: bool = False


def estimate(layers: Sequence[ExpertLayer]) -> int:
    """Bytes of the side-file that ``coalesce`` would write."""
    return side_file_bytes(layers)


def coalesce(
    checkpoint: Checkpoint,
    layers: Sequence[ExpertLayer],
    output: str | Path,
    *,
    progress: bool = True,
    resume: bool = True,
    order: Mapping[int, Sequence[int]] | None = None,
    order_note: Mapping[str, Any] | None = None,
    hints: Mapping[int, Hints] | None = None,
    verify: bool = True,
    force: bool = False,
    name: str | None = None,
    revision: str | None = None,
    before: Callable[[int, int], None] | None = None,
    computer: Computer | None = None,
) -> Report:
    """Write the side-file ``output`` and its manifest.

    An interrupted run leaves a hidden partial file that the next run continues. Memory is bounded
    by a few windows of 16 MiB. With ``verify`` every block is read back from the drive and
    compared before the file gets its name.

    Args:
        order: by layer number, expert ids in the order in which their blocks shall lie; without
            one, a side-file that matches is kept in the order that it has.
        order_note: what the manifest says of it (``kind``, ``profile_sha256``).
        hints: by layer number, what a profile says of its experts, for the manifest.
        force: replace the side-file of another source, or rewrite one that matches.
        name, revision: of the model, for the manifest.
        before: called with the bytes of the side-file and the bytes free on its drive, when all
            else has been checked and nothing has been written; it may raise to stop.
        computer: gives the blocks of layers that are computed; needed where there are such.

    Raises:
        OutputError: when it cannot be written here, does not read back, or the source changes
            meanwhile.
        ReadError: when a shard cannot be read.
    """
    target = Path(output)
    check_target(target, checkpoint)
    plan = make_plan(layers, source_of(checkpoint).stamp, order, hints)
    found = existing(target, checkpoint, layers, plan, force=force, any_order=order is None)
    if found is not None:
        return Report(target, plan.size, plan.blocks, 0.0, 0.0, plan.blocks, already=True)
    check_space(target, plan.size)
    if before is not None:
        before(plan.size, files.free_space(target.parent))
    source = source_of(checkpoint, name, revision, sample=True)
    computed = computer.note if computer is not None else None
    stamp = _resume_stamp(plan, source, computed)
    with open_output(target, plan.size, stamp, resume=resume, direct=True) as out:
        rewrite = _Rewrite(plan, checkpoint.shards, out, computer)
        started = time.perf_counter()
        resumed = rewrite.write(progress)
        written = time.perf_counter()
        _check_unchanged(checkpoint, out)
        if verify:
            rewrite.read_back(progress)
        verified = time.perf_counter()
        manifest = Manifest(
            tool=f"mbolt-mlx {__version__}",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            source=source,
            alignment=plan.alignment,
            order=dict(order_note or _order_note(order)),
            layers=tuple(rewrite.entries()),
            computed=computed,
        )
        out.commit([(manifest_path(target), manifest.encode())])
    return Report(target, plan.size, plan.blocks, written - started, verified - written, resumed)


class _Rewrite:
    """One run over the blocks of a plan. A block's unit is its number, layers in order."""

    def __init__(
        self, plan: Plan, shards: Sequence[Shard], out: Output, computer: Computer | None
    ) -> None:
        self.plan = plan
        self.computer = computer
        self.paths = [shard.path for shard in shards]
        self.out = out
        self.sums: dict[int, str] = dict(out.done)
        counts = [layer.source.experts for layer in plan.layers]
        self.first_unit = dict(
            zip((id(y) for y in plan.layers), np.cumsum([0, *counts]).tolist(), strict=False)
        )
        self._since = 0
        self._lock = threading.Lock()

    def write(self, progress: bool) -> int:
        """Write all blocks that are not done, and the header; returns how many were done."""
        resumed = len(self.sums)
        total = self.plan.size - self.plan.data_start
        with Progress("writing", total, shown=progress) as bar:
            bar.skip(total - sum(w.nbytes for job in self._jobs(self.sums) for w in job))
            try:
                threads = THREADS if self.computer is None else self.computer.threads
                work_through(self._jobs(self.out.done), lambda: self._writer(bar), threads)
            except BaseException:
                self._keep()
                raise
        header = self.plan.header(self.entries())
        buffer = aligned_buffer(len(header))
        buffer[:] = np.frombuffer(header, np.uint8)
        self.out.write(memoryview(buffer), 0)
        self.out.checkpoint()
        return resumed

    def _keep(self) -> None:
        """Save what is done for a later run, whatever stopped this one."""
        try:
            self.out.checkpoint()
        except OutputError:
            pass  # the reason that stopped the run is already on its way

    def _jobs(self, done: Mapping[int, str]) -> Iterator[tuple[Window, ...]]:
        done = dict(done)
        for layer in self.plan.layers:
            base = self.first_unit[id(layer)]
            yield from windows_of(
                layer, [e for e in layer.sequence.tolist() if base + e not in done]
            )

    def _writer(self, bar: Progress):
        filler: Filler = self.computer or Gatherer(self.paths)
        buffer = aligned_buffer(WINDOW_BYTES)

        def do(job: tuple[Window, ...]) -> None:
            hasher = xxhash.xxh3_128()
            for window in job:
                part = buffer[: window.nbytes]
                filler.fill(window, part)
                sums = _sums(window, part, hasher)
                self.out.write(memoryview(part), window.offset)
                bar.advance(window.nbytes)
            self._record(job[0], sums)
            self._maybe_checkpoint(sum(window.nbytes for window in job))

        return do

    def _record(self, window: Window, sums: list[str]) -> None:
        base = self.first_unit[id(window.layer)]
        for expert, checksum in zip(window.experts, sums, strict=True):
            self.sums[base + expert] = checksum
            self.out.record(base + expert, checksum)

    def _maybe_checkpoint(self, written: int) -> None:
        with self._lock:
            self._since += written
            if self._since < CHECKPOINT_BYTES:
                return
            self._since = 0
        self.out.checkpoint()

    def read_back(self, progress: bool) -> None:
        """Read every block from the drive and compare its checksum, and compare the header.

        Raises:
            OutputError: naming the block that came back different; nothing is kept then.
        """
        path = self.out.partial
        try:
            with Progress("checking", self.plan.size - self.plan.data_start, shown=progress) as bar:
                work_through(self._jobs({}), lambda: self._checker(bar, path), THREADS)
            header = self.plan.header(self.entries())
            if read_range(path, 0, len(header)).tobytes() != header:
                raise OutputError("the header came back different from the drive", path=path)
        except (OutputError, ReadError):
            self.out.discard()
            raise

    def _checker(self, bar: Progress, path: Path):
        buffer = aligned_buffer(WINDOW_BYTES)

        def do(job: tuple[Window, ...]) -> None:
            hasher = xxhash.xxh3_128()
            fd, _ = files.open_cold(path)
            try:
                for window in job:
                    part = buffer[: window.nbytes]
                    files.pread_into(fd, [memoryview(part)], window.offset, path=str(path))
                    sums = _sums(window, part, hasher)
                    bar.advance(window.nbytes)
            finally:
                files.close(fd)
            layer = job[0].layer
            for expert, checksum in zip(job[0].experts, sums, strict=True):
                if checksum != self.sums[self.first_unit[id(layer)] + expert]:
                    raise OutputError(
                        f"layer {layer.source.layer}, expert {expert} came back different from the "
                        "drive",
                        path=self.out.target, offset=int(layer.starts[expert]),
                        hint="the drive or its cable may be failing",
                    )  # fmt: skip

        return do

    def entries(self):
        """The manifest's layers, from the checksums of all blocks."""
        for layer in self.plan.layers:
            base = self.first_unit[id(layer)]
            yield layer.entry([self.sums[base + e] for e in range(layer.source.experts)])


def _sums(window: Window, data: np.ndarray, hasher: xxhash.xxh3_128) -> list[str]:
    """Checksums of the blocks in ``window``; of a part of a block, of all parts so far."""
    if len(window.experts) == 1:
        hasher.update(data)
        return [hasher.hexdigest()]
    width = window.hi - window.lo
    return [
        xxhash.xxh3_128_hexdigest(data[i * width : (i + 1) * width])
        for i in range(len(window.experts))
    ]


def read_range(path: Path, offset: int, size: int) -> np.ndarray:
    """``size`` bytes of ``path`` from ``offset`` on, as uint8.

    Raises:
        ReadError: when they cannot be read.
    """
    buffer = aligned_buffer(size)
    fd = files.open_read(path)
    try:
        files.pread_into(fd, [memoryview(buffer)], offset, path=str(path))
    finally:
        files.close(fd)
    return buffer


def _check_unchanged(checkpoint: Checkpoint, out: Output) -> None:
    """The rewrite is worth nothing when the source changed under it."""
    for shard in checkpoint.shards:
        fd = files.open_read(shard.path)
        try:
            same = files.size_and_mtime(fd) == (shard.size, shard.mtime_ns)
        finally:
            files.close(fd)
        if not same:
            out.discard()
            raise OutputError("the source changed while it was read", path=shard.path)


def _resume_stamp(plan: Plan, source: Source, computed: Mapping[str, Any] | None) -> str:
    """SHA-256 over all that decides the bytes, the source's times and samples included."""
    digest = hashlib.sha256(plan.stamp().encode())
    if computed is not None:
        digest.update(json.dumps(computed, sort_keys=True).encode())
    known = [[s.file, s.size, s.mtime_ns, s.header_sha256, s.sample_sha256] for s in source.shards]
    digest.update(json.dumps(known).encode())
    return digest.hexdigest()


def _order_note(order: Mapping[int, Sequence[int]] | None) -> dict[str, Any]:
    return {"kind": "file" if order is None else "given", "profile_sha256": None}
