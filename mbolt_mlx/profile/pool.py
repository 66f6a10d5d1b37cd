"""Memory that all layers share, in replay only: the engine gives each layer its own slots.

A prompt goes through a pool token by token within each layer, as the engine did that recorded the
public traces: its counts come out row by row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mbolt_mlx.core.budget import LayerShape
from mbolt_mlx.core.residency import LRU, make_policy


class Pool:
    """Residents of all layers under one budget of bytes, or under one for each size of expert.

    Args:
        shapes: layer → experts, top_k and bytes of an expert.
        policy: of `core.residency`; LRU orders all layers' experts by their last use, the others
            compare the layers' scores.
        by_size: a budget for each size of expert.
        budget: bytes in all.
        slots: layer → slots that it brings into its budget, instead of ``budget``.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        policy: str,
        *,
        by_size: bool,
        budget: int | None = None,
        slots: Mapping[int, int] | None = None,
    ) -> None:
        self._shapes = dict(shapes)
        widths = [shape.experts for shape in shapes.values()]
        starts = np.cumsum([0, *widths]).tolist()
        self._start = dict(zip(shapes, starts, strict=False))
        self._size = np.repeat([s.expert_bytes for s in shapes.values()], widths)
        classes = sorted({s.expert_bytes for s in shapes.values()}) if by_size else [0]
        self._class = {
            layer: classes.index(s.expert_bytes) if by_size else 0 for layer, s in shapes.items()
        }
        self._class_of = np.repeat([self._class[layer] for layer in shapes], widths)
        self._room = [0] * len(classes)
        for layer, shape in shapes.items():
            own = slots[layer] * shape.expert_bytes if slots is not None else 0
            self._room[self._class[layer]] += own
        if budget is not None:
            total = sum(s.experts * s.expert_bytes for s in shapes.values())
            for number in range(len(classes)):
                part = sum(
                    s.experts * s.expert_bytes
                    for layer, s in shapes.items()
                    if self._class[layer] == number
                )
                self._room[number] = budget * part // total
        self._resident = np.zeros(starts[-1], bool)
        self._scores = np.zeros(starts[-1])
        self._lru = [LRU(starts[-1]) for _ in classes] if policy == "lru" else None
        self._policies = {layer: make_policy(policy, s.experts) for layer, s in shapes.items()}

    def renew(self) -> None:
        """Another conversation begins."""
        for policy in self._policies.values():
            policy.renew()

    def call(self, layer: int, row: np.ndarray) -> tuple[list[int], list[int], int]:
        """One token in one layer: (hits, misses, evictions), experts in the router's order."""
        start, number = self._start[layer], self._class[layer]
        experts = list(dict.fromkeys(row.tolist()))
        hits = [e for e in experts if self._resident[start + e]]
        misses = [e for e in experts if not self._resident[start + e]]
        keep = {start + e for e in experts}
        if self._lru is None:
            self._policies[layer].use(row[None])
            width = self._shapes[layer].experts
            self._scores[start : start + width] = self._policies[layer].worth()
        evicted = 0
        size = self._shapes[layer].expert_bytes
        for expert in experts:
            place = start + expert
            if self._resident[place]:
                if self._lru is not None:
                    self._lru[number].use(np.array([[place]]))
                continue
            while self._room[number] < size:
                victim = self._victim(number, keep)
                if victim is None:
                    break
                self._resident[victim] = False
                self._room[number] += int(self._size[victim])
                if self._lru is not None:
                    self._lru[number].drop(victim)
                evicted += 1
            if self._room[number] < size:
                continue  # the current token's experts alone fill the budget: it passes through
            self._room[number] -= size
            self._resident[place] = True
            if self._lru is not None:
                self._lru[number].admit(place)
        return hits, misses, evicted

    def _victim(self, number: int, keep: set[int]) -> int | None:
        if self._lru is not None:
            found = self._lru[number].victims(1, keep)
            return found[0] if found else None
        held = self._resident & (self._class_of == number)
        held[list(keep)] = False
        scores = np.where(held, self._scores, np.inf)
        best = int(scores.argmin())
        return best if scores[best] < np.inf else None
