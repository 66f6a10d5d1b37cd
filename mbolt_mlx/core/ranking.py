"""Giving up whoever scores least."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


class Ranked:
    """The residents of a layer; a policy that inherits it says what each is worth.

    Args:
        experts: experts of the layer.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._held: dict[int, None] = {}

    def score(self, experts: np.ndarray) -> np.ndarray:
        """The worth ``[n]`` of ``experts`` ``[n]`` (intp), comparable between layers."""
        raise NotImplementedError

    def worth(self) -> np.ndarray:
        """The score ``[experts]`` of each expert."""
        return self.score(np.arange(self._experts))

    def admit(self, expert: int) -> None:
        """``expert`` has become resident."""
        self._held[expert] = None

    def drop(self, expert: int) -> None:
        """``expert`` is not resident, or no longer."""
        self._held.pop(expert, None)

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """Up to ``count`` residents to give up, the least wanted first, none of ``keep``.

        Of equal ones, the one that has been resident longest.
        """
        held = [e for e in self._held if e not in keep]
        order = self.score(np.array(held, np.intp)).argsort(kind="stable")
        return [held[place] for place in order[:count].tolist()]
