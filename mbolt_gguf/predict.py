"""What the prefetcher of the patched llama.cpp will read, from a trace and a file's layout.

Its rule: of the chosen experts of a layer, ranges that lie less than a page apart are one read;
what is in memory is not read. Which ranges are wanted depends on trace and layout alone. What is in
memory is replayed as one pool of all layers' experts, the least recently used out first, or page by
page, as Linux keeps them (page_cache.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mbolt_gguf.blocks import WHOLE, ranges_in
from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.page_cache import PageCache
from mbolt_gguf.permute import stored_orders
from mbolt_mlx.profile.layout import Range
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, LayerInfo, Trace

PAGE = 4096
LARGEST_READ = 4 << 20


@dataclass(frozen=True)
class Prediction:
    """Reads and bytes a decoded token: ``wanted`` whether in memory or not, ``issued`` to the
    drive; ``hit_rate`` of experts."""

    wanted_reads: float
    wanted_bytes: float
    issued_reads: float
    issued_bytes: float
    hit_rate: float


def ranges_of(model: Model, blocks: str = WHOLE) -> dict[int, tuple[Range, ...]]:
    """Layer → where its experts lie, by original expert id, as the prefetcher reads them.

    ``blocks`` (of `BLOCKS`) is how the map says that blocks are read. The slices of a block then
    have numbers of files of their own, as in the map, since they are not joined with one another.
    """
    layers = find_experts(model)
    orders = stored_orders(model, layers)
    out = {}
    for y in layers:
        place = np.argsort(orders[y.layer])
        out[y.layer] = tuple(
            Range(
                (number,),
                r.nbytes,
                (r.file,) * y.experts,
                tuple(r.base + int(p) * r.stride for p in place),
            )
            for number, r in enumerate(ranges_in(y, blocks, len(model.files)))
        )
    return out


def predict(
    trace: Trace, model: Model, budget: int, *, skip: int = 0, blocks: str = WHOLE
) -> Prediction:
    """Reads of the decoded tokens of ``trace`` on ``model``, by experts.

    Args:
        trace: what the original chose, by original expert id.
        model: of any layout.
        budget: bytes of memory for experts.
        skip: decoded tokens at the start that fill the memory and are not counted.
        blocks: as `ranges_of`.
    """
    ranges = ranges_of(model, blocks)
    size = {y.layer: y.expert_bytes for y in find_experts(model)}
    layers = {
        n: LayerInfo(i.experts, i.top_k, expert_bytes=size[n], pieces=len(ranges[n]))
        for n, i in trace.layers.items()
    }
    setup = Setup("lru", "global", budget=budget, merge_gap=PAGE - 1)
    found = replay(replace(trace, layers=layers), setup, ranges)
    decoded = [c for p, c in zip(found.phases, found.passes, strict=True) if p == DECODE][skip:]
    hits, misses = (sum(getattr(c, name) for c in decoded) for name in ("hits", "misses"))
    count = max(1, len(decoded))
    wanted_reads, wanted_bytes = _wanted(trace, ranges, skip)
    return Prediction(
        wanted_reads=wanted_reads,
        wanted_bytes=wanted_bytes,
        issued_reads=sum(c.reads for c in decoded) / count,
        issued_bytes=sum(c.bytes for c in decoded) / count,
        hit_rate=hits / max(1, hits + misses),
    )


def predict_pages(
    trace: Trace,
    model: Model,
    memory: int,
    *,
    skip: int = 0,
    blocks: str = WHOLE,
    kept: float = 0.0,
) -> Prediction:
    """As `predict`, page by page, under Linux with experts advised random.

    Args:
        trace, model, skip, blocks: as `predict`.
        memory: bytes for the pages of all of the model's files.
        kept: as `PageCache`.
    """
    ranges, whole = ranges_of(model, blocks), ranges_of(model)
    starts = np.cumsum([0, *(-(-file.size // PAGE) for file in model.files)])
    steady = _others(whole, starts)
    cache = PageCache(int(starts[-1]), memory // PAGE, steady, kept=kept)
    decoded = reads = nbytes = hits = chosen = 0
    for one in trace.passes:
        decoded += one.phase == DECODE
        counts = one.phase == DECODE and decoded > skip
        for n, ids in one.chosen.items():
            experts = np.unique(ids).tolist()
            own = [[_pages(file, b, e, starts) for file, b, e in _joined(whole[n], [x])]
                   for x in experts]  # fmt: skip
            cache.use_steady()
            if counts:
                chosen += len(experts)
                hits += sum(not any(len(cache.missing(*p)) for p in pages) for pages in own)
            jobs = []
            for file, begin, end in _joined(ranges[n], experts):
                first, after = _pages(file, begin, end, starts)
                missing = cache.missing(first, after)
                if not len(missing):
                    continue
                jobs.append((int(missing[0]), int(missing[-1]) + 1))
                if counts:
                    skipped = begin // PAGE - first  # from pages of all files to those of its own
                    begin = max(begin, (jobs[-1][0] + skipped) * PAGE)
                    end = min(end, (jobs[-1][1] + skipped) * PAGE)
                    reads += -(-(end - begin) // LARGEST_READ)
                    nbytes += end - begin
            # What the reads push out before it is used is faulted in.
            for first, after in [*jobs, *(p for pages in own for p in pages)]:
                cache.read(cache.missing(first, after))
    count = max(1, decoded - skip)
    wanted_reads, wanted_bytes = _wanted(trace, ranges, skip)
    return Prediction(
        wanted_reads=wanted_reads,
        wanted_bytes=wanted_bytes,
        issued_reads=reads / count,
        issued_bytes=nbytes / count,
        hit_rate=hits / max(1, chosen),
    )


def _wanted(trace: Trace, ranges: Mapping[int, Sequence[Range]], skip: int) -> tuple[float, float]:
    """(reads, bytes) that a decoded token wants."""
    counted = [one for one in trace.passes if one.phase == DECODE][skip:]
    found = [
        end - begin
        for one in counted
        for n, ids in one.chosen.items()
        for _, begin, end in _joined(ranges[n], np.unique(ids).tolist())
    ]
    count = max(1, len(counted))
    return len(found) / count, sum(found) / count


def _joined(ranges: Sequence[Range], experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(file, begin, end) of what is read for ``experts``, in order."""
    out: list[tuple[int, int, int]] = []
    for file, begin, end in sorted(
        (r.files[e], r.offsets[e], r.offsets[e] + r.nbytes) for r in ranges for e in experts
    ):
        if out and out[-1][0] == file and begin < out[-1][2] + PAGE:
            out[-1] = (file, out[-1][1], max(out[-1][2], end))
        else:
            out.append((file, begin, end))
    return out


def _pages(file: int, begin: int, end: int, starts: np.ndarray) -> tuple[int, int]:
    """First page, and the one after the last, of bytes of a file, among the pages of all files."""
    first = int(starts[file % (len(starts) - 1)])
    return first + begin // PAGE, first + -(-end // PAGE)


def _others(whole: Mapping[int, Sequence[Range]], starts: np.ndarray) -> np.ndarray:
    """The pages that hold nothing of an expert."""
    out = np.ones(int(starts[-1]), bool)
    for ranges in whole.values():
        for r in ranges:
            for file, offset in zip(r.files, r.offsets, strict=True):
                first, after = _pages(file, offset, offset + r.nbytes, starts)
                out[first:after] = False
    return np.flatnonzero(out)
