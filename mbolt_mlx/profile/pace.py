"""How long a decoded token takes: computing, and what of the reading is not hidden behind it.

Layers follow one another. In each the router's choice is waited for; then the missing experts are
read while those in memory are computed, and each that arrives is computed while others still come.
Small experts are computed together once all are there, so their reading hides nothing::

    a layer that misses   max(reading + own / top_k, own)     own: computing its top_k experts
    of small experts      reading + own
    a token               max(dense + Σ layers, bytes / limit)

Each expert that is brought in also costs the processor a little before it can be read.

A limit on bytes a second, as control groups and cloud volumes have it, saves up what computing
leaves unused, so it holds for the token as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mbolt_mlx.core.budget import LayerShape
from mbolt_mlx.core.reads import THREADS
from mbolt_mlx.core.schedule import CALL_BYTES
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, Pass, Trace


@dataclass(frozen=True, eq=False)
class Misses:
    """What one layer misses in decoding.

    Args:
        wanted: experts a token, those in memory too; 0 where nothing is known of the layer.
        calls: ``calls[m]``: calls a token that miss ``m`` experts, ``m`` from 0.
    """

    wanted: float
    calls: np.ndarray

    @property
    def per_token(self) -> float:
        """Experts missed a token."""
        return float(self.calls @ np.arange(len(self.calls)))


def hit_rate(missed: Iterable[Misses]) -> float:
    """Share of all wanted experts that are in memory; 1 where none is wanted."""
    rows = [(one.wanted, one.per_token) for one in missed]
    wanted = sum(one for one, _ in rows)
    return 1.0 - sum(misses for _, misses in rows) / wanted if wanted else 1.0


def misses_at(hit_rate: float, top_k: int) -> Misses:
    """Of a layer whose ``top_k`` experts a token hit at ``hit_rate``, each for itself."""
    miss = 1.0 - hit_rate
    calls = [math.comb(top_k, m) * miss**m * hit_rate ** (top_k - m) for m in range(top_k + 1)]
    return Misses(float(top_k), np.array(calls))


def misses_of(trace: Trace, slots: Mapping[int, int]) -> dict[int, Misses]:
    """Layer → what it misses when ``trace`` is replayed with ``slots`` slots a layer."""
    tokens = max(1, trace.tokens(DECODE))
    out = {}
    for layer, info in trace.layers.items():
        passes = tuple(
            Pass(p.phase, {layer: p.chosen[layer]}, p.session)
            for p in trace.passes
            if layer in p.chosen
        )
        rows = np.zeros((0, 2), np.int64)
        if passes:
            alone = Trace(passes, {layer: info})
            rows = replay(alone, Setup(slots={layer: slots[layer]})).hits_by_pass()
        calls = np.bincount(rows[:, 1], minlength=1) / tokens
        out[layer] = Misses(float(rows.sum() / tokens), calls)
    return out


@dataclass(frozen=True)
class Pace:
    """What does not depend on how much is missed.

    Args:
        layers: layer → its experts.
        dense_s: seconds a token that are not computing experts.
        experts_s: seconds a token for computing experts, all in memory.
        law: reads at a time → the drive's constants.
        miss_s: seconds that the processor spends on bringing an expert in.
        limit: bytes a second that the drive is held to; None where it is not.
    """

    layers: Mapping[int, LayerShape]
    dense_s: float
    experts_s: float
    law: Callable[[float], Law]
    miss_s: float = 0.0
    limit: float | None = None

    def seconds(self, missed: Mapping[int, Misses], reads: float, *, stretch: float = 1.0) -> float:
        """Seconds a token.

        Args:
            missed: layer → what it misses.
            reads: of the drive, for a missed expert.
            stretch: bytes read ÷ bytes missed.
        """
        wanted = sum(s.top_k * s.expert_bytes for s in self.layers.values())
        total, nbytes = self.dense_s, 0.0
        for layer, shape in self.layers.items():
            own = self.experts_s * shape.top_k * shape.expert_bytes / wanted
            one = missed[layer]
            nbytes += one.per_token * shape.expert_bytes * stretch
            total += own * (1.0 - float(one.calls[1:].sum()))
            for count, calls in enumerate(one.calls[1:].tolist(), start=1):
                if calls:
                    total += calls * self._layer(shape, own, count, reads, stretch)
        return max(total, nbytes / self.limit) if self.limit else total

    def _layer(
        self, shape: LayerShape, own: float, count: int, reads: float, stretch: float
    ) -> float:
        """Seconds of a layer's experts when ``count`` of them are missing."""
        reads *= count
        law = self.law(min(THREADS, max(1.0, reads)))
        reading = law.seconds(reads, count * shape.expert_bytes * stretch)
        before = count * self.miss_s
        if shape.expert_bytes < CALL_BYTES:
            return before + reading + own
        return before + max(reading + own / shape.top_k, own)
