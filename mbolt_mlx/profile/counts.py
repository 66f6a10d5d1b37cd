"""What a replay counts, by phase and by pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mbolt_mlx.core.counts import Counts
from mbolt_mlx.profile.traces import DECODE, PREFILL


@dataclass
class PassCounts:
    """The counts of every pass of a trace, with its phase."""

    phases: list[str] = field(default_factory=list)
    passes: list[Counts] = field(default_factory=list)

    def of(self, phase: str) -> Counts:
        """The sum over the passes of ``phase``."""
        total = Counts()
        for name, one in zip(self.phases, self.passes, strict=True):
            if name == phase:
                total.add(one)
        return total

    @property
    def prefill(self) -> Counts:
        """All of prefill."""
        return self.of(PREFILL)

    @property
    def decode(self) -> Counts:
        """All of decode."""
        return self.of(DECODE)

    def hits_by_pass(self, phase: str = DECODE) -> np.ndarray:
        """``[passes, 2]``: hits and misses of each pass of ``phase``."""
        rows = [
            (one.hits, one.misses)
            for name, one in zip(self.phases, self.passes, strict=True)
            if name == phase
        ]
        return np.array(rows, np.int64).reshape(-1, 2)


def bootstrap(
    rows: np.ndarray, *, block: int = 8, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """A 95 % range of the hit rate, by drawing blocks of passes with replacement.

    Args:
        rows: ``[passes, 2]`` hits and misses.
        block: passes that are drawn together, because neighbours are alike.
        draws: how often.
        seed: of the draws.
    """
    blocks = [rows[n : n + block].sum(axis=0) for n in range(0, len(rows), block)]
    if not blocks:
        return 1.0, 1.0
    sums = np.array(blocks)
    chosen = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))
    totals = sums[chosen].sum(axis=1)
    rates = totals[:, 0] / np.maximum(1, totals.sum(axis=1))
    low, high = np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, *, block: int = 8, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """A 95 % range of (hit rate of ``a``) − (hit rate of ``b``), the same blocks drawn of both."""
    count = -(-len(a) // block)
    sums = [
        np.array([r[n * block : (n + 1) * block].sum(axis=0) for n in range(count)]) for r in (a, b)
    ]
    chosen = np.random.default_rng(seed).integers(0, count, (draws, count))
    rates = [t[:, 0] / t.sum(axis=1) for t in (s[chosen].sum(axis=1) for s in sums)]
    low, high = np.percentile(rates[0] - rates[1], [2.5, 97.5])
    return float(low), float(high)


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of ``counts``."""
    out = Counts()
    for one in counts:
        out.add(one)
    return out
