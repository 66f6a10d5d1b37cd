"""What the prefetcher of the patched llama.cpp will read, from a trace and a file's layout.

Its rule: of the chosen experts of a layer, ranges that lie less than a page apart are one read;
what is in memory is not read. Which ranges are wanted depends on trace and layout alone. What is in
memory is replayed as one pool of all layers, the least recently used out first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.permute import stored_orders
from mbolt_mlx.profile.layout import Range, reads_of
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, LayerInfo, Trace

PAGE = 4096


@dataclass(frozen=True)
class Prediction:
    """Reads and bytes a decoded token: ``wanted`` whether in memory or not, ``issued`` to the
    drive; ``hit_rate`` of experts."""

    wanted_reads: float
    wanted_bytes: float
    issued_reads: float
    issued_bytes: float
    hit_rate: float


def ranges_of(model: Model) -> dict[int, tuple[Range, ...]]:
    """Layer → where its experts lie, by original expert id, as the prefetcher reads them."""
    layers = find_experts(model)
    orders = stored_orders(model, layers)
    out = {}
    for y in layers:
        place = np.argsort(orders[y.layer])
        out[y.layer] = tuple(
            Range(
                (number,),
                piece.nbytes,
                (piece.tensor.file,) * y.experts,
                tuple(piece.offset(int(p)) for p in place),
            )
            for number, piece in enumerate(y.weights)
        )
    return out


def predict(trace: Trace, model: Model, budget: int, *, skip: int = 0) -> Prediction:
    """Reads of the decoded tokens of ``trace`` on ``model``.

    Args:
        trace: what the original chose, by original expert id.
        model: of any layout.
        budget: bytes of memory for experts.
        skip: decoded tokens at the start that fill the memory and are not counted.
    """
    ranges = ranges_of(model)
    size = {y.layer: y.expert_bytes for y in find_experts(model)}
    layers = {
        n: LayerInfo(i.experts, i.top_k, expert_bytes=size[n], pieces=len(ranges[n]))
        for n, i in trace.layers.items()
    }
    counted = [one for one in trace.passes if one.phase == DECODE][skip:]
    wanted = [
        reads_of(ranges[n], np.unique(ids).tolist(), PAGE - 1)
        for one in counted
        for n, ids in one.chosen.items()
    ]
    setup = Setup("lru", "global", budget=budget, merge_gap=PAGE - 1)
    found = replay(replace(trace, layers=layers), setup, ranges)
    decoded = [c for p, c in zip(found.phases, found.passes, strict=True) if p == DECODE][skip:]
    hits, misses = (sum(getattr(c, name) for c in decoded) for name in ("hits", "misses"))
    count = max(1, len(counted))
    return Prediction(
        wanted_reads=sum(reads for reads, _ in wanted) / count,
        wanted_bytes=sum(nbytes for _, nbytes in wanted) / count,
        issued_reads=sum(c.reads for c in decoded) / count,
        issued_bytes=sum(c.bytes for c in decoded) / count,
        hit_rate=hits / max(1, hits + misses),
    )
