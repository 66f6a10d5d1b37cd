"""The optimum that no policy can pass: give up what is needed again last (Belady, MIN).

For a layer's own slots, with the current call's experts kept, as an engine must.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def belady(calls: Sequence[np.ndarray], experts: int, slots: int) -> np.ndarray:
    """Hits and misses of the best possible choice of residents in one layer.

    A call that wants more experts than there are slots ends with those of them, or of the
    residents, that are needed again first.

    Args:
        calls: the distinct experts of each call, in order.
        experts: experts of the layer.
        slots: how many fit.

    Returns:
        ``[calls, 2]``: (hits, misses) of each call.
    """
    never = len(calls)
    next_use = np.full(experts, never)
    upcoming: list[np.ndarray] = [np.empty(0, int)] * len(calls)
    for number in range(len(calls) - 1, -1, -1):
        upcoming[number] = next_use[calls[number]].copy()
        next_use[calls[number]] = number
    resident = np.zeros(experts, bool)
    when = np.full(experts, never)
    counts = np.zeros((len(calls), 2), np.int64)
    for number, wanted in enumerate(calls):
        hits = int(resident[wanted].sum())
        counts[number] = hits, len(wanted) - hits
        when[wanted] = upcoming[number]
        here = resident.copy()
        here[wanted] = True
        surplus = int(here.sum()) - slots
        if surplus > 0:
            key = np.where(here, when, -1)
            if len(wanted) <= slots:
                key[wanted] = -1
            here[np.argsort(-key, kind="stable")[:surplus]] = False
        resident = here
    return counts
