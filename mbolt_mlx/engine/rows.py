"""The rows of one call, in groups by expert, and back in order.

An expert container computes one row for each token and expert of it. Rows do not depend on each
other, so they can be computed in any groups and put back in order, bit for bit the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from mbolt_mlx.engine.lanes import bounds, shares, side_by_side
from mbolt_mlx.engine.slots import windows_alias

# Results this large are put in order as they come, and so are in memory once, not three times.
_IN_PLACE_BYTES = 1 << 20
# Groups that may be on their way meanwhile: one being computed, one behind it.
_AHEAD = 2

#: A stock container: rows ``[..., D]`` and slot numbers ``[..., K]`` to ``[..., K, D]``.
Compute = Callable[[mx.array, mx.array], mx.array]


class Rows:
    """The rows of one call, computed expert by expert and put back in order."""

    count: int

    def compute(self, experts: Sequence[int]) -> list[mx.array]:
        """The rows of ``experts``, which are in memory, in one or more parts to be evaluated."""
        raise NotImplementedError

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        """All rows ``[*shape, D]`` in the order of the router's choice."""
        raise NotImplementedError


class OneToken(Rows):
    count = 1

    def __init__(
        self,
        compute: Compute,
        x: mx.array,
        experts: list[int],
        slot_of: list[int],
        row_bytes: int,
    ) -> None:
        self._compute = compute
        self._row_bytes = row_bytes
        self._x = x
        self._experts = experts
        self._slot_of = slot_of
        self._parts: list[mx.array] = []
        self._order: list[int] = []

    def compute(self, experts: Sequence[int]) -> list[mx.array]:
        if len(experts) == len(self._experts):
            places = list(range(len(experts)))
        else:
            wanted = set(experts)
            places = [k for k, e in enumerate(self._experts) if e in wanted]
        slots = [self._slot_of[self._experts[k]] for k in places]
        ranges = bounds(len(slots), shares(len(slots), self._row_bytes))
        parts = side_by_side([partial(self._rows, slots[a:b]) for a, b in ranges])
        self._parts += parts
        self._order += places
        return parts

    def _rows(self, slots: list[int]) -> mx.array:
        shape = *self._x.shape[:-1], len(slots)
        return self._compute(self._x, mx.array(slots, dtype=mx.uint32).reshape(shape))

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        if len(self._parts) == 1:
            return self._parts[0]
        back = np.argsort(np.array(self._order)).astype(np.uint32)
        return mx.take(mx.concatenate(self._parts, axis=-2), mx.array(back), axis=-2)


class ManyTokens(Rows):
    def __init__(
        self,
        compute: Compute,
        x: mx.array,
        tokens: np.ndarray,
        slot_of: list[int],
        row_bytes: int,
    ) -> None:
        self.count, self._k = tokens.shape
        self._compute = compute
        self._row_bytes = row_bytes
        self._x = x.reshape(-1, x.shape[-1])
        self._slot_of = slot_of
        self._flat = tokens.reshape(-1)
        self._by_expert = np.argsort(self._flat, kind="stable")
        values, starts = np.unique(self._flat[self._by_expert], return_index=True)
        ends = np.append(starts[1:], len(self._flat))
        self._range = {
            int(e): (int(a), int(b)) for e, a, b in zip(values, starts, ends, strict=True)
        }
        self._groups: deque[list[tuple[mx.array, np.ndarray]]] = deque()
        self._dtype = x.dtype
        self._whole = _Whole(len(self._flat)) if _in_place(self._x, len(self._flat)) else None

    def compute(self, experts: Sequence[int]) -> list[mx.array]:
        self._settle(_AHEAD - 1)
        # In the order of slots, as the sorted kernels want it.
        experts = sorted(experts, key=self._slot_of.__getitem__)
        ranges = [self._range[e] for e in experts]
        places = np.concatenate([self._by_expert[a:b] for a, b in ranges])
        slots = np.repeat(
            np.array([self._slot_of[e] for e in experts], dtype=np.uint32),
            [b - a for a, b in ranges],
        )
        shared = [slice(a, b) for a, b in bounds(len(places), shares(len(places), self._row_bytes))]
        parts = side_by_side([partial(self._rows, places[s], slots[s]) for s in shared])
        self._groups.append(list(zip(parts, (places[s] for s in shared), strict=True)))
        return parts

    def _rows(self, places: np.ndarray, slots: np.ndarray) -> mx.array:
        rows = self._x[mx.array((places // self._k).astype(np.uint32))]
        y = self._compute(rows, mx.array(slots)[:, None]).squeeze(-2)
        self._dtype = y.dtype
        # As bytes here, on the stream that computes them, so that nothing else is waited for.
        return y if self._whole is None else y.view(mx.uint8)

    def _settle(self, ahead: int) -> None:
        """Where rows are put in place as they come, do so for all but the last ``ahead`` groups."""
        while self._whole is not None and len(self._groups) > ahead:
            self._whole.put(self._groups.popleft())

    def combine(self, shape: tuple[int, ...]) -> mx.array:
        if self._whole is not None:
            self._settle(0)
            y = self._whole.array.view(self._dtype)
        else:
            parts, places = zip(*itertools.chain(*self._groups), strict=True)
            self._groups.clear()
            order = np.concatenate(places)
            back = np.empty(len(order), dtype=np.uint32)
            back[order] = np.arange(len(order), dtype=np.uint32)
            y = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0))[mx.array(back)]
        return y.reshape(*shape, y.shape[-1])


def _in_place(x: mx.array, rows: int) -> bool:
    """Whether a result of ``rows`` rows as wide as ``x`` is put in order by the processor.

    A GPU does it in one go, rather than be waited for at each group.
    """
    large = rows * x.shape[-1] * x.itemsize >= _IN_PLACE_BYTES
    return large and mx.default_device().type == mx.DeviceType.cpu and windows_alias()


class _Whole:
    """All rows of a call as bytes, written in place through a window onto the array's memory."""

    array: mx.array

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._window: np.ndarray | None = None

    def put(self, group: Iterable[tuple[mx.array, np.ndarray]]) -> None:
        """Wait for the parts of ``group``, ``[rows, bytes]``, and copy each to its places."""
        for part, places in group:
            mx.eval(part)
            if self._window is None:
                self.array = mx.zeros((self._rows, part.shape[-1]), dtype=mx.uint8)
                mx.eval(self.array)
                self._window = np.array(self.array, copy=False)
            self._window[places] = np.array(part, copy=False)


def all_rows(compute: Compute, x: mx.array, indices: mx.array, row_bytes: int) -> mx.array:
    """``compute(x, indices)`` where every expert has its own slot: nothing to wait for or to map.

    Args:
        row_bytes: weights that a row goes through.
    """
    parts = shares(indices.size, row_bytes)
    k = indices.shape[-1]
    if parts == 1:
        return compute(x, indices)
    if indices.size == k:
        ranges = bounds(k, parts)
        ys = side_by_side([partial(compute, x, indices[..., a:b]) for a, b in ranges])
        return mx.concatenate(ys, axis=-2)
    rows, chosen = x.reshape(-1, x.shape[-1]), indices.reshape(-1, k)
    ranges = bounds(len(chosen), min(parts, len(chosen)))
    ys = side_by_side([partial(compute, rows[a:b], chosen[a:b]) for a, b in ranges])
    y = mx.concatenate(ys, axis=0)
    return y.reshape(*indices.shape, y.shape[-1])
