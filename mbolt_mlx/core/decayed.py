"""Whom the next tokens call, judged by how often and how lately each was called."""

from __future__ import annotations

import math

import numpy as np

from mbolt_mlx.core.ranking import Ranked

# Power of two up to which the weight of a use may grow; float64 ends at 1024.
_LARGEST = 332
# What a conversation leaves to the next: an order, for as long as nothing else is known.
_TRACES = 1e-9


class DecayedCount(Ranked):
    """Lowest exponentially decayed use count first; absent experts are counted too.

    ``count[e] = sum over uses of 0.5 ** (age in tokens / half_life)``. Instead of decaying every
    count at each token, the weight of a new use grows, so a token costs O(top_k).
    """

    name = "decayed"

    def __init__(self, experts: int, half_life: float = 12.0) -> None:
        super().__init__(experts)
        self.growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._count = np.zeros(experts)

    def expect(self, tokens: np.ndarray) -> None:
        """Nothing: the current experts are kept anyway, and all others fade alike."""

    def renew(self) -> None:
        """Counts start again, because the next conversation may be about something else."""
        self._count *= _TRACES / self._weight
        self._weight = 1.0

    def score(self, experts: np.ndarray) -> np.ndarray:
        """The count of each of ``experts`` as of the last token."""
        return self.scaled(experts, 1.0)

    def scaled(self, experts: np.ndarray, factor: float) -> np.ndarray:
        """``factor`` times `score`."""
        return self._count[experts] * (factor / self._weight)

    def use(self, tokens: np.ndarray) -> None:
        """Count the choices ``[tokens, top_k]`` of a forward that has ended."""
        tokens = np.asarray(tokens, np.intp)
        if len(tokens) == 1:
            self._weight *= self.growth
            self._count[tokens[0]] += self._weight
        else:
            # Over a long prompt the weights would pass the largest float; then they end at 1.
            last = math.log2(self._weight) + len(tokens) * math.log2(self.growth)
            if last > _LARGEST:
                self._count *= 0.5**last
                weights = self.growth ** np.arange(1.0 - len(tokens), 1.0)
            else:
                weights = self._weight * self.growth ** np.arange(1, len(tokens) + 1)
            np.add.at(self._count, tokens, weights[:, None])
            self._weight = float(weights[-1])
        if self._weight > 2.0**_LARGEST:
            self._count /= self._weight
            self._weight = 1.0
