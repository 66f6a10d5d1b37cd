"""The rows of one call, in groups by expert, and back in order.

An expert container computes one row for each token and expert of it. Rows do not depend on each
other, so they can be computed in any groups and put back in order, bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

#: A stock container: rows ``[..., D]`` and slot numbers ``[..., K]`` to ``[..., K, D]``.
Compute = Callable[[mx.array, mx.array], mx.array]


class Rows:
    """The rows of one call, computed expert by expert and put back in order."""

    count: int

    def compute(self, experts: Sequence[int]) -> mx.array:
        """Compute the rows of ``experts``, which are in memory."""
        raise NotImplementedError

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        """All rows ``[*shape, D]`` in the order of the router's choice."""
        raise NotImplementedError


class OneToken(Rows):
    count = 1

    def __init__(
        self, compute: Compute, x: mx.array, experts: list[int], slot_of: list[int]
    ) -> None:
        self._compute = compute
        self._x = x
        self._experts = experts
        self._slot_of = slot_of
        self._parts: list[mx.array] = []
        self._order: list[int] = []

    def compute(self, experts: Sequence[int]) -> mx.array:
        if len(experts) == len(self._experts):
            places = list(range(len(experts)))
        else:
            wanted = set(experts)
            places = [k for k, e in enumerate(self._experts) if e in wanted]
        slots = mx.array([self._slot_of[self._experts[k]] for k in places], dtype=mx.uint32)
        slots = slots.reshape(*self._x.shape[:-1], len(places))
        y = self._compute(self._x, slots)
        self._parts.append(y)
        self._order += places
        return y

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        if len(self._parts) == 1:
            return self._parts[0]
        back = np.argsort(np.array(self._order)).astype(np.uint32)
        return mx.take(mx.concatenate(self._parts, axis=-2), mx.array(back), axis=-2)


class ManyTokens(Rows):
    def __init__(
        self, compute: Compute, x: mx.array, tokens: np.ndarray, slot_of: list[int]
    ) -> None:
        self.count, self._k = tokens.shape
        self._compute = compute
        self._x = x.reshape(-1, x.shape[-1])
        self._slot_of = slot_of
        self._flat = tokens.reshape(-1)
        self._by_expert = np.argsort(self._flat, kind="stable")
        values, starts = np.unique(self._flat[self._by_expert], return_index=True)
        ends = np.append(starts[1:], len(self._flat))
        self._range = {
            int(e): (int(a), int(b)) for e, a, b in zip(values, starts, ends, strict=True)
        }
        self._parts: list[mx.array] = []
        self._order: list[np.ndarray] = []

    def compute(self, experts: Sequence[int]) -> mx.array:
        # In the order of slots, as the sorted kernels want it.
        experts = sorted(experts, key=self._slot_of.__getitem__)
        ranges = [self._range[e] for e in experts]
        places = np.concatenate([self._by_expert[a:b] for a, b in ranges])
        slots = np.repeat(
            np.array([self._slot_of[e] for e in experts], dtype=np.uint32),
            [b - a for a, b in ranges],
        )
        rows = self._x[mx.array((places // self._k).astype(np.uint32))]
        y = self._compute(rows, mx.array(slots)[:, None]).squeeze(-2)
        self._parts.append(y)
        self._order.append(places)
        return y

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        order = np.concatenate(self._order)
        back = np.empty(len(order), dtype=np.uint32)
        back[order] = np.arange(len(order), dtype=np.uint32)
        y = self._parts[0] if len(self._parts) == 1 else mx.concatenate(self._parts, axis=0)
        self._parts = []
        return y[mx.array(back)].reshape(*shape, y.shape[-1])
