"""The table of ``--stats``: what a run read, what it waited for, and the speed law."""

from __future__ import annotations

import mmap
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import MboltError
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.law import Law, speedup

if TYPE_CHECKING:
    from mbolt_mlx.engine.stats import PhaseStats, Stats
    from mbolt_mlx.storage.store import Store

_SMALL = mmap.PAGESIZE
_LARGE = 4 << 20


@dataclass(frozen=True)
class SpeedLaw:
    """speedup = 1 / ((1 − s) + s / g), of decoding from a side-file instead of the model's files.

    Args:
        share: s, the share of decode spent waiting for the drive.
        before, after: reads an expert without and with a side-file.
        expert_bytes: of one expert.
        drive: measured; None when it could not be.
        has_side_file: whether the run had one, so that ``after`` is measured, else ``before`` is.
    """

    share: float
    before: float
    after: float
    expert_bytes: int
    drive: Law | None
    has_side_file: bool

    @property
    def gain(self) -> float | None:
        """g: how many times faster an expert is read with a side-file."""
        if self.drive is None:
            return None
        return self.drive.gain(self.before, self.after, self.expert_bytes)


def print_stats(model: Any) -> None:
    """Print the table for ``model``, which `mbolt_mlx.load` loaded, to stderr."""
    import mlx.core as mx

    import mbolt_mlx
    from mbolt_mlx.bench.counters import peak_rss_bytes
    from mbolt_mlx.engine.runtime import engine_of

    stats = mbolt_mlx.stats(model)
    peak = {"process": peak_rss_bytes(), "MLX": mx.get_peak_memory()}
    lines = table(stats, peak)
    law = speed_law(stats, engine_of(model).store)
    if law is not None:
        lines.append(law_line(law))
    print("\n".join(lines), file=sys.stderr)


def table(stats: Stats, peak: dict[str, int]) -> list[str]:
    """The lines of the table: a row a figure, prefill and decode side by side."""

    def waited(phase: PhaseStats, seconds: float) -> str:
        share = seconds / phase.seconds if phase.seconds else 0.0
        return f"{seconds:.3f} s ({share:.0%})"

    phases = (stats.prefill, stats.decode)
    rows = [
        ("", ["prefill", "decode"]),
        ("tokens", [f"{p.tokens}" for p in phases]),
        ("tok/s", [f"{p.tps:.2f}" for p in phases]),
        ("hit rate", [f"{p.hit_rate:.1%}" for p in phases]),
        ("misses", [f"{p.misses}" for p in phases]),
        ("misses a token", [f"{p.misses_per_token:.2f}" for p in phases]),
        ("reads", [f"{p.reads}" for p in phases]),
        ("reads a token", [f"{p.reads_per_token:.2f}" for p in phases]),
        ("bytes a token", [format_size(round(p.bytes_per_token)) for p in phases]),
        ("waiting for reads", [waited(p, p.read_wait_s) for p in phases]),
        ("waiting for readback", [waited(p, p.readback_wait_s) for p in phases]),
        ("evictions", [f"{p.evictions}" for p in phases]),
    ]
    lines = [f"{name:<21}{a:>18}{b:>18}" for name, (a, b) in rows]
    lines.append("(waiting for readback includes computing what the router needs; a prompt's last")
    lines.append(" token is computed as the first of decode)")
    return [*lines, *_set_up(stats, peak)]


def _set_up(stats: Stats, peak: dict[str, int]) -> list[str]:
    slots = sorted(set(stats.slots.values()))
    span = f"{slots[0]} to {slots[-1]}" if len(slots) > 1 else f"{slots[0] if slots else 0}"
    peaks = ", ".join(f"{name} {format_size(size)}" for name, size in peak.items())
    how = "past the page cache" if stats.direct else "through the page cache"
    rows = [
        ("peak memory", peaks),
        (
            "experts in memory",
            f"{stats.resident:.1%}: {span} a layer in {stats.offloaded_layers} of {stats.layers} "
            f"layers, {format_size(stats.slot_bytes)} of {format_size(stats.expert_bytes)} "
            f"(policy {stats.policy})",
        ),
        ("everything else", format_size(stats.dense_bytes)),
        ("read from", stats.side_file or "the model's own files (no side-file)"),
        ("", f"{how}, {stats.read_threads} at a time"),
    ]
    if stats.shrinks:
        rows.append(("slots given up", f"{stats.shrinks} times, to keep within the limit"))
    return [f"{name:<21}  {value}" for name, value in rows]


def speed_law(stats: Stats, store: Store) -> SpeedLaw | None:
    """Work out s and g for a run's decode; None when it missed nothing.

    g needs the drive's two constants, which a few dozen reads of the run's own file measure.
    """
    decode = stats.decode
    if not decode.misses or not store.layers:
        return None
    measured = decode.reads / decode.misses
    layer = store.layers[len(store.layers) // 2]
    side_file = store.side_file is not None
    try:
        drive = measure_drive(max(store.files, key=_size), direct=stats.direct)
    except (MboltError, OSError):
        drive = None
    return SpeedLaw(
        share=decode.cold_read_share,
        before=float(len(layer.pieces)) if side_file else measured,
        after=measured if side_file else 1.0,
        expert_bytes=layer.expert_bytes,
        drive=drive,
        has_side_file=side_file,
    )


def law_line(law: SpeedLaw) -> str:
    """The speed law in words."""
    name = f"{'speed law':<21}  "
    start = f"{name}s = {law.share:.2f} of decode waits for reads"
    if law.drive is None or law.gain is None:
        return f"{start}; g is not known: the drive could not be measured"
    if law.has_side_file:
        gained = f"{law.before:.0f} pieces an expert became {law.after:.2f} reads"
    else:
        faster = speedup(law.share, law.gain)
        gained = f"a side-file would turn {law.before:.2f} reads an expert into 1: {faster:.2f}x"
    return (
        f"{start}, g = {law.gain:.2f} ({gained}; {format_size(law.expert_bytes)} an expert, "
        f"{law.drive.t_op * 1e6:.0f} µs a read, {law.drive.bandwidth / 1e9:.2f} GB/s)"
    )


def measure_drive(path: Path, *, direct: bool, small: int = 24, large: int = 6) -> Law:
    """Time random reads of one page and of 4 MiB in ``path``, the way the run read it.

    Raises:
        ReadError: the file cannot be read.
        OSError: it is smaller than a page.
    """
    rng = random.Random(0)
    buffer = memoryview(mmap.mmap(-1, _LARGE))
    fd = files.open_read(path, direct=direct)
    try:
        pages = files.size_and_mtime(fd)[0] // _SMALL
        if pages < 2:
            raise OSError(f"{path} is too small to be measured")
        big = min(_LARGE // _SMALL, pages // 2) * _SMALL

        def timed(nbytes: int) -> float:
            offset = rng.randrange(pages - nbytes // _SMALL + 1) * _SMALL
            start = time.perf_counter()
            files.pread_into(fd, [buffer[:nbytes]], offset, path=str(path))
            return time.perf_counter() - start

        one = statistics.median(timed(_SMALL) for _ in range(small))
        many = statistics.median(timed(big) for _ in range(large))
    finally:
        files.close(fd)
    # A file that is in memory can be so fast that the two are the same within the clock.
    rate = (big - _SMALL) / max(many - one, 1e-9)
    return Law(max(one - _SMALL / rate, 1e-9), rate)


def _size(path: Path) -> int:
    return path.stat().st_size
