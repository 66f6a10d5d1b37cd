"""The speed law: what a read costs, and what fewer reads gain.

    time    = reads · t_op + bytes / BW
    g       = (n0 · t_op + B / BW) / (n1 · t_op + B / BW)     n0, n1 reads an expert, B its bytes
    speedup = 1 / ((1 − s) + s / g)                           s: share of decode spent on cold reads

``t_op`` is what one more read adds when reads follow each other at the depth at which it was
measured, ``BW`` the bandwidth that very large reads reach.

Some drives are limited in reads a second and in bytes a second, each for itself (a cloud volume, a
control group): there the slower of the two decides, and

    time    = max(reads · t_op, bytes / BW)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mbolt_mlx.core.errors import UsageError


@dataclass(frozen=True)
class Law:
    """A drive: ``t_op`` in seconds a read, ``bandwidth`` in bytes a second.

    ``slower`` says that the slower of the two decides, and not their sum.
    """

    t_op: float
    bandwidth: float
    slower: bool = False

    def seconds(self, reads: float, nbytes: float) -> float:
        """Seconds for ``reads`` reads of ``nbytes`` in all."""
        operations, transfer = reads * self.t_op, nbytes / self.bandwidth
        return max(operations, transfer) if self.slower else operations + transfer

    def gain(self, before: float, after: float, nbytes: float) -> float:
        """g: how many times faster ``nbytes`` come in ``after`` reads than in ``before``."""
        return self.seconds(before, nbytes) / self.seconds(after, nbytes)


# The slower of two has one more degree of freedom: where one bound ends.
_CLEARLY, _LEAST_ROWS = 0.5, 4
_FLAT_ROWS, _SAME, _MANY, _NOT_MUCH_WORSE = 3, 0.05, 16, 4.0
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

    Least squares on relative errors, so that a small read counts as much as a large one. Of the two
    forms of the law, the one that fits better; the sum, unless the other is clearly better, or
    reads of very different sizes take the same time, as only a limit on operations makes them.

    Raises:
        UsageError: when fewer than two different measurements are given.
    """
    rows = np.array(list(points), dtype=np.float64).reshape(-1, 3)
    rows = rows[rows[:, 2] > 0]
    if len(rows) < 2 or np.linalg.matrix_rank(rows[:, :2]) < 2:
        raise UsageError("two measurements with different bytes a read are needed for a fit")
    added = _fit_sum(rows)
    if len(rows) < _LEAST_ROWS:
        return added
    slower = min(_fits_slower(rows), key=lambda law: _off(law, rows))
    clearly = _NOT_MUCH_WORSE if _flat(rows) else _CLEARLY
    return slower if _off(slower, rows) < clearly * _off(added, rows) else added


def _off(law: Law, rows: np.ndarray) -> float:
    return float(np.square(errors(law, rows)).sum())


def _flat(rows: np.ndarray) -> bool:
    """Whether the smallest reads take the same time, though one has many times another's bytes."""
    sizes = rows[:, 1] / rows[:, 0]
    small = np.argsort(sizes)[:_FLAT_ROWS]
    each = rows[small, 2] / rows[small, 0]
    same = each.max() < (1.0 + _SAME) * each.min()
    return bool(same and sizes[small[-1]] >= _MANY * sizes[small[0]])


def _fit_sum(rows: np.ndarray) -> Law:
    """With neither constant below zero."""
    design = rows[:, :2] / rows[:, 2:]
    (t_op, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)
    if t_op < 0:
        t_op, per_byte = 0.0, _alone(design[:, 1])
    elif per_byte <= 0:
        t_op, per_byte = _alone(design[:, 0]), 0.0
    return Law(float(t_op), float(1.0 / per_byte) if per_byte > 0 else float("inf"))


def _fits_slower(rows: np.ndarray) -> list[Law]:
    """For each place where small reads, bound by operations, can end and large ones begin."""
    rows = rows[np.argsort(rows[:, 1] / rows[:, 0])]
    design = rows[:, :2] / rows[:, 2:]
    return [
        Law(_alone(design[:n, 0]), 1.0 / _alone(design[n:, 1]), slower=True)
        for n in range(1, len(rows))
    ]


def errors(law: Law, points: Iterable[tuple[float, float, float]]) -> list[float]:
    """Relative error of ``law`` at each of ``points``: predicted ÷ measured − 1."""
    return [law.seconds(reads, nbytes) / took - 1.0 for reads, nbytes, took in points]


def _alone(column: np.ndarray) -> float:
    """The factor of one column that comes nearest to ones."""
    return float(column.sum() / (column @ column))
