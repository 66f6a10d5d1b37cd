"""Predict a replay's reading time, then read the same ranges from a real drive and compare.

One scratch file of random bytes stands for all layouts, because a layout is only a set of places.
What is read together in the engine is read together here, with the engine's own reader, past the
page cache; nothing is computed in between. Each round is foretold from a probe of its own, made
just before it, because a shared drive is another one some minutes later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.core import files, reads
from mbolt_mlx.core.errors import OutputError, UsageError
from mbolt_mlx.core.scratch import remove_left, scratch
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.layout import Readable
from mbolt_mlx.profile.probe import Probe, probe
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, Trace

# A prediction this near the measurement counts as right; a gain this large is worth a rewrite.
WITHIN, _WORTH = 0.10, 1.05
_ALIGN = 4096
_BASE = 1 << 20
_SCRATCH = ".mbolt-gate-"


@dataclass(frozen=True)
class Work:
    """What one layout reads while decoding: ranges ``(offset, bytes)``, those of a start together.

    ``reads`` and ``nbytes`` are the replay's own counts, before ranges are widened to whole pages.
    """

    name: str
    starts: tuple[tuple[tuple[int, int], ...], ...]
    tokens: int
    reads: int
    nbytes: int
    end: int


def work_of(
    name: str, trace: Trace, setup: Setup, ranges: Mapping[int, Sequence[Readable]]
) -> Work:
    """The reads of the decoded tokens of ``trace`` under a layout."""
    base, end = _bases(ranges)
    starts: list[tuple[tuple[int, int], ...]] = []

    def note(phase: str, requests: list[reads.Request]) -> None:
        if phase == DECODE:
            starts.append(tuple(_widened(base[r.fd] + r.offset, r.nbytes) for r in requests))

    counts = replay(trace, setup, ranges, note).decode
    return Work(name, tuple(starts), counts.tokens, counts.reads, counts.bytes, end)


def gate(
    works: Sequence[Work],
    folder: str | Path,
    *,
    rounds: int = 3,
    tokens: int | None = None,
    seconds: float = 15.0,
    step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Predict and measure ``works`` on the drive of ``folder``; the result as JSON values.

    Args:
        works: one a layout.
        folder: where the scratch file goes; it is removed in the end.
        rounds: measurements of each, in alternating order; the median counts.
        tokens: decoded tokens to replay (default: all).
        seconds: about how long to probe the drive, before each round and after the last.
        step: told what happens.

    Raises:
        UsageError: when a layout reads nothing in these tokens, or there is no such folder.
        OutputError: when the drive has too little space.
    """
    for work in works:
        _check_reads(work, tokens)
    say = step or (lambda text: None)
    place = Path(folder)
    if not place.is_dir():
        raise UsageError("no such folder", path=place)
    size = -(-max(work.end for work in works) // _BASE) * _BASE
    remove_left(place, _SCRATCH)
    free = files.free_space(place)
    if size + (1 << 30) > free:
        raise OutputError(
            "the drive has too little space for files of the right sizes",
            path=place,
            expected=f"{format_size(size)} and 1 GB more",
            found=f"{format_size(free)} free",
        )
    say(f"writing {format_size(size)} of random bytes")
    with scratch(place, _SCRATCH) as (fd, path):
        _fill(fd, size, path)
        probes: list[Probe] = []
        times: dict[str, list[float]] = {work.name: [] for work in works}
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: probing the drive")
            probes.append(probe(path, seconds=seconds))
            for work in works if number % 2 == 0 else list(reversed(works)):
                say(f"round {number + 1} of {rounds}: {work.name}")
                times[work.name].append(_measure(path, _cut(work, tokens)))
        say("probing the drive once more")
        probes.append(probe(path, seconds=seconds))
    rows = [_row(work, tokens, probes, times[work.name]) for work in works]
    return {
        "rows": rows,
        "verdict": verdict(rows),
        "drive": probes[0].document(),
        "probes": [one.document() for one in probes],
        "threads": reads.THREADS,
        "rounds": rounds,
    }


def _check_reads(work: Work, tokens: int | None) -> None:
    """Refuse what gives nothing to measure, before it costs a scratch file."""
    if not work.tokens:
        raise UsageError("nothing is read while decoding: the trace has no decoded token")
    if not work.starts:
        raise UsageError(
            "nothing is read while decoding: every expert that is wanted is in memory",
            hint="give a smaller --resident or --budget",
        )
    if not _cut(work, tokens):
        raise UsageError(
            f"nothing is read in the first {tokens} decoded tokens",
            hint="give more --tokens, or a smaller --resident or --budget",
        )


def _row(
    work: Work, tokens: int | None, probes: Sequence[Probe], took: Sequence[float]
) -> dict[str, Any]:
    """What was foretold and measured of ``work``; the last probe has no round after it."""
    part = _cut(work, tokens)
    count = max(1, min(work.tokens, tokens or work.tokens))
    foretold = [_seconds(one, part) for one in probes]
    return {
        "layout": work.name,
        "tokens": count,
        "reads_per_token": sum(map(len, part)) / count,
        "bytes_per_token": sum(n for one in part for _, n in one) / count,
        "replayed_reads": work.reads,
        "replayed_bytes": work.nbytes,
        "predicted_ms_per_token": 1e3 * statistics.median(foretold[: len(took)]) / count,
        "measured_ms_per_token": 1e3 * statistics.median(took) / count,
        "all_predicted_ms_per_token": [1e3 * t / count for t in foretold],
        "all_ms_per_token": [1e3 * t / count for t in took],
        "error": statistics.median(p / t for p, t in zip(foretold, took, strict=False)) - 1.0,
        "drift": max(foretold) / min(foretold) - 1.0,
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """In words: whether the law foretold the times, and which layout is worth it here."""
    worst = max(abs(row["error"]) for row in rows)
    drift = max(row["drift"] for row in rows)
    if worst <= WITHIN:
        says = f"the law holds here: within {worst:.0%}"
    elif drift > WITHIN:
        says = (
            f"the law is off by up to {worst:.0%}, but the drive itself changed meanwhile: what "
            f"its probes foretell is up to {drift:.0%} apart"
        )
    else:
        says = f"the law does not hold here: it is off by up to {worst:.0%}"
    first = rows[0]
    best = min(rows, key=lambda row: row["measured_ms_per_token"])
    gain = first["measured_ms_per_token"] / best["measured_ms_per_token"]
    if best is first or gain < _WORTH:
        return f"{says}; no layout reads clearly faster than {first['layout']}"
    return f"{says}; {best['layout']} reads {gain:.2f} times as fast as {first['layout']}"


def _seconds(drive: Probe, starts: Sequence[Sequence[tuple[int, int]]]) -> float:
    """By the law of ``drive``, each start's reads at once."""
    return sum(
        drive.law(min(reads.THREADS, len(one))).seconds(len(one), sum(n for _, n in one))
        for one in starts
    )


def _cut(work: Work, tokens: int | None) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The starts of the first ``tokens`` tokens, by their share of all."""
    if tokens is None or tokens >= work.tokens:
        return work.starts
    return work.starts[: round(len(work.starts) * tokens / work.tokens)]


def _measure(path: Path, starts: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Seconds to read ``starts``, one after the other, each one's ranges at once."""
    fd, direct = files.open_cold(path)
    reader = reads.Reader(reads.THREADS, direct=direct)
    most = max((n for one in starts for _, n in one), default=0)
    width = max((len(one) for one in starts), default=0)
    buffers = reads.slot_buffers(width, most)
    try:
        if not direct:
            files.drop_cached(fd)
            files.advise_random(fd)
        begin = time.perf_counter()
        for one in starts:
            batch = reads.Batch()
            requests = [
                reads.Request(fd, offset, [buffers[k][:nbytes]], nbytes, (k,))
                for k, (offset, nbytes) in enumerate(one)
            ]
            try:
                reader.start(requests, batch)
                while batch.left:
                    batch.take()
            finally:
                batch.drain()
        return time.perf_counter() - begin
    finally:
        reader.close()
        files.close(fd)


def _bases(ranges: Mapping[int, Sequence[Readable]]) -> tuple[dict[int, int], int]:
    """Where each file of a layout begins in the scratch file, and where the last one ends."""
    ends: dict[int, int] = {}
    for some in ranges.values():
        for one in some:
            for file, offset in zip(one.files, one.offsets, strict=True):
                ends[file] = max(ends.get(file, 0), offset + one.nbytes)
    base, position = {}, 0
    for file, end in sorted(ends.items()):
        base[file] = position
        position += -(-end // _BASE) * _BASE
    return base, position


def _widened(offset: int, nbytes: int) -> tuple[int, int]:
    """The whole pages around a range, as a direct read needs them."""
    start = offset // _ALIGN * _ALIGN
    return start, -(-(offset + nbytes) // _ALIGN) * _ALIGN - start


def _fill(fd: int, size: int, path: Path) -> None:
    rng = np.random.default_rng()
    chunk = bytearray(rng.bytes(min(size, 64 << 20)))
    position = 0
    while position < size:
        # Each chunk differs from the others, so that no drive can fold them into one.
        chunk[:8] = position.to_bytes(8, "little")
        part = memoryview(chunk)[: size - position]
        files.pwrite_all(fd, part, position, path=str(path))
        position += len(part)
    files.sync(fd, path=str(path))
    files.drop_cached(fd)
