"""Who is wanted least, given a score for each expert."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def least_wanted(score: np.ndarray, count: int, keep: Collection[int]) -> list[int]:
    """Up to ``count`` experts of the lowest ``score``, the lowest first.

    Args:
        score: ``[experts]``, infinite for those that are not to be had. It is used up.
        count: how many.
        keep: experts that are not to be had either.
    """
    score[list(keep)] = np.inf
    if count == 1:
        best = int(score.argmin())
        return [best] if score[best] < np.inf else []
    order = np.argsort(score, kind="stable")[:count]
    return [int(e) for e in order if score[e] < np.inf]
