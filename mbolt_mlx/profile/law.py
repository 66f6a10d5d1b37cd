"""The speed law: what a read costs, and what fewer reads gain.

    time    = reads · t_op + bytes / BW
    g       = (n0 · t_op + B / BW) / (n1 · t_op + B / BW)     n0, n1 reads an expert, B its bytes
    speedup = 1 / ((1 − s) + s / g)                           s: share of decode spent on cold reads

``t_op`` is what one more read adds when reads follow each other at the depth at which it was
measured, ``BW`` the bandwidth that very large reads reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mbolt_mlx.core.errors import UsageError


@dataclass(frozen=True)
class Law:
    """A drive: ``t_op`` in seconds a read, ``bandwidth`` in bytes a second."""

    t_op: float
    bandwidth: float

    def seconds(self, reads: float, nbytes: float) -> float:
        """Seconds for ``reads`` reads of ``nbytes`` in all."""
        return reads * self.t_op + nbytes / self.bandwidth

    def gain(self, before: float, after: float, nbytes: float) -> float:
        """g: how many times faster ``nbytes`` come in ``after`` reads than in ``before``."""
        return self.seconds(before, nbytes) / self.seconds(after, nbytes)


# An Apple SSD, as the public measurements that the design cites imply it. Probe your own.
DEFAULT_LAW = Law(100e-6, 6e9)


def speedup(share: float, gain: float) -> float:
    """Speedup of the whole when the ``share`` of it that reads gets ``gain`` times faster."""
    return 1.0 / ((1.0 - share) + share / gain)


def share_of(speedup: float, gain: float) -> float:
    """The share s that explains a measured ``speedup`` of the whole at a ``gain`` of the reads."""
    return (1.0 - 1.0 / speedup) / (1.0 - 1.0 / gain)


def fit(points: Iterable[tuple[float, float, float]]) -> Law:
    """t_op and BW from measurements ``(reads, bytes, seconds)``.

    Least squares on relative errors, with neither constant below zero, so that a small read counts
    as much as a large one.

    Raises:
        UsageError: when fewer than two different measurements are given.
    """
    rows = np.array(list(points), dtype=np.float64).reshape(-1, 3)
    rows = rows[rows[:, 2] > 0]
    if len(rows) < 2 or np.linalg.matrix_rank(rows[:, :2]) < 2:
        raise UsageError("two measurements with different bytes a read are needed for a fit")
    design = rows[:, :2] / rows[:, 2:]
    ones = np.ones(len(rows))
    (t_op, per_byte), *_ = np.linalg.lstsq(design, ones, rcond=None)
    if t_op < 0:
        t_op, per_byte = 0.0, _alone(design[:, 1])
    elif per_byte <= 0:
        t_op, per_byte = _alone(design[:, 0]), 0.0
    return Law(float(t_op), float(1.0 / per_byte) if per_byte > 0 else float("inf"))


def errors(law: Law, points: Iterable[tuple[float, float, float]]) -> list[float]:
    """Relative error of ``law`` at each of ``points``: predicted ÷ measured − 1."""
    return [law.seconds(reads, nbytes) / took - 1.0 for reads, nbytes, took in points]


def _alone(column: np.ndarray) -> float:
    """The factor of one column that comes nearest to ones."""
    return float(column.sum() / (column @ column))
