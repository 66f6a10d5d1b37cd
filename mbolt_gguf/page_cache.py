"""Which pages of a model's files Linux keeps in memory, in its two lists.

A page that is read comes to the head of the inactive list; memory is made free at its tail. What is
used through an ordinary memory map is spared at the tail once, and the second time becomes active.
The experts' part of the map is advised random, and there Linux (6.3 and later) takes no notice of
use (``vma_has_recency``): their pages leave in the order in which they came. But a page that comes
back soon, after fewer pages left than are active, becomes active at once (mm/workingset.c). Active
pages become inactive again when they are more than the inactive ones, or, in proportion, when pages
have come back so since memory was last made free.

Not here: the multi-generational lists (``lru_gen``), and that a control group's counters, by which
Linux decides, are up to two seconds old.
"""

from __future__ import annotations

from collections import deque

import numpy as np

BATCH = 32


class PageCache:
    """Pages by number.

    Args:
        pages: in all.
        room: pages that memory holds.
        steady: numbers of the pages that every token uses through an ordinary memory map.
        kept: share of the pages at the tail that are spared as if they had been used; what watches
            memory, as DAMON does, has that effect.
        seed: of the choice of those.
    """

    def __init__(
        self, pages: int, room: int, steady: np.ndarray, *, kept: float = 0.0, seed: int = 0
    ) -> None:
        self.room, self.steady, self.kept = room, steady, kept
        self.read_in = 0
        self._held = np.zeros(pages, bool)
        self._left_at = np.full(pages, -(1 << 60))
        self._used, self._spared = np.zeros(pages, bool), np.zeros(pages, bool)
        self._inactive: deque[np.ndarray] = deque()
        self._active: deque[np.ndarray] = deque()
        self._counts = [0, 0]
        self._clock = 0
        self._came_back, self._owed = False, 0.0
        self._random = np.random.default_rng(seed)

    def missing(self, first: int, end: int) -> np.ndarray:
        """The pages from ``first`` to before ``end`` that are not in memory."""
        return np.flatnonzero(~self._held[first:end]) + first

    def use_steady(self) -> None:
        """A token goes by: its steady pages are used, and read where they are missing."""
        self.read(self.steady[~self._held[self.steady]])
        self._used[self.steady] = True

    def read(self, pages: np.ndarray) -> None:
        """Bring missing ``pages`` in, in this order."""
        self.read_in += len(pages)
        for at in range(0, len(pages), BATCH):
            some = pages[at : at + BATCH]
            soon = self._clock - self._left_at[some] <= self._counts[1]
            self._held[some] = True
            if soon.any():
                self._came_back = True
                self._activate(some[soon])
            self._push(self._inactive, 0, some[~soon])
            while sum(self._counts) > self.room:
                self._make_free()

    def _push(self, pages_of: deque[np.ndarray], which: int, pages: np.ndarray) -> None:
        if len(pages):
            pages_of.append(pages)
            self._counts[which] += len(pages)

    def _pop(self, pages_of: deque[np.ndarray], which: int, most: int) -> np.ndarray:
        """At most ``most`` pages from the tail."""
        found = pages_of.popleft()
        if len(found) > most:
            pages_of.appendleft(found[most:])
            found = found[:most]
        self._counts[which] -= len(found)
        return found

    def _activate(self, pages: np.ndarray) -> None:
        self._push(self._active, 1, pages)
        self._clock += len(pages)

    def _make_free(self) -> None:
        """Drop a batch of pages."""
        inactive, active = self._counts
        low = active > inactive
        if low or self._came_back:
            self._owed += BATCH * active / max(1, inactive)
            whole = int(self._owed)
            self._owed -= whole
            self._deactivate(max(whole, BATCH) if low else whole)
        self._came_back = False
        left = BATCH
        while left > 0 and self._inactive:
            tail = self._pop(self._inactive, 0, left)
            if self.kept:
                self._used[tail[self._random.random(len(tail)) < self.kept]] = True
            used, spared = self._used[tail], self._spared[tail]
            again, once, gone = tail[used & spared], tail[used & ~spared], tail[~used]
            self._used[tail] = False
            self._spared[tail] = False
            self._spared[once] = True
            if len(again):
                self._activate(again)
            self._push(self._inactive, 0, once)
            self._held[gone] = False
            self._left_at[gone] = self._clock + np.arange(len(gone))
            self._clock += len(gone)
            left -= len(gone)

    def _deactivate(self, count: int) -> None:
        while count > 0 and self._active:
            pages = self._pop(self._active, 1, count)
            self._used[pages] = False
            self._push(self._inactive, 0, pages)
            count -= len(pages)
