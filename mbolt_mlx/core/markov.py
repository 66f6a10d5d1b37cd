"""Whom a token's experts call next: use counts that decay, and a table of who follows whom."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

# Only the end of a long prompt is counted pair by pair: a row's half-life is 64 of its visits.
_PAIRS_MAX = 512


class Markov:
    """Lowest score first, of two decayed use counts and a Markov term; absent experts count too.

    With b the experts of the current token, p those of the token before::

        fast = fast / 2                   (+ 1/2 on b)
        slow = d · slow                   (+ 1 − d on b)         d = 0.5 ** (1 / half_life)
        M[p] = M[p] · r  (+ 1 at M[p, b]),  N[p] = N[p] · r + 1   r = 0.5 ** (1 / row_half_life)
        m[e] = mean over i in b of (M[i, e] + 2 slow[e]) / (N[i] + 2)
        score = 0.2 fast + 0.8 slow + m

    Equal scores: the one whose last use is older goes first. Costs O(top_k · experts) a token and
    experts² · 4 bytes of memory.
    """

    name = "markov"

    def __init__(self, experts: int, half_life: float = 12.0, row_half_life: float = 64.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._row_decay = 0.5 ** (1.0 / row_half_life)
        self._fast = np.zeros(experts)
        self._slow = np.zeros(experts)
        self._pairs = np.zeros((experts, experts), np.float32)
        self._visits = np.zeros(experts, np.float32)
        self._last_use = np.zeros(experts)
        self._time = 0
        self._now: np.ndarray | None = None
        self._counted: np.ndarray | None = None
        self._away = np.full(experts, np.inf)

    def expect(self, tokens: np.ndarray) -> None:
        """Count the choices ``[tokens, top_k]`` of the forward that begins."""
        self._counted = tokens
        if len(tokens) == 1:
            self._count_one(tokens[0])
        elif len(tokens):
            self._count_many(tokens)

    def use(self, tokens: np.ndarray) -> None:
        """Count the choices of a forward that has ended, unless ``expect`` has."""
        if tokens is not self._counted:
            self.expect(tokens)
        self._counted = None

    def renew(self) -> None:
        """Another conversation begins: who follows whom stays, how often does not."""
        self._fast[:] = 0.0
        self._slow[:] = 0.0
        self._now = None

    def admit(self, expert: int) -> None:
        """``expert`` has become resident."""
        self._away[expert] = 0.0

    def drop(self, expert: int) -> None:
        """``expert`` is not resident, or no longer."""
        self._away[expert] = np.inf

    def worth(self) -> np.ndarray:
        """The score of each expert, comparable between layers."""
        score = 0.2 * self._fast + 0.8 * self._slow
        now = self._now
        if now is not None:
            weight = 1.0 / (self._visits[now] + 2.0)
            score += (weight @ self._pairs[now] + 2.0 * weight.sum() * self._slow) / len(now)
        return score + 1e-12 * self._last_use

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """Up to ``count`` residents to give up, the least wanted first, none of ``keep``."""
        score = self.worth() + self._away
        score[list(keep)] = np.inf
        if count == 1:
            best = int(score.argmin())
            return [best] if score[best] < np.inf else []
        order = np.argsort(score, kind="stable")[:count]
        return [int(e) for e in order if score[e] < np.inf]

    def _count_one(self, chosen: np.ndarray) -> None:
        before, now = self._now, chosen
        self._fast *= 0.5
        self._fast[now] += 0.5
        self._slow *= self._decay
        self._slow[now] += 1.0 - self._decay
        if before is not None:
            rows = self._pairs[before] * np.float32(self._row_decay)
            rows[:, now] += 1.0
            self._pairs[before] = rows
            self._visits[before] = self._visits[before] * np.float32(self._row_decay) + 1.0
        self._time += 1
        self._last_use[now] = self._time
        self._now = now.copy()

    def _count_many(self, tokens: np.ndarray) -> None:
        """The same as one after the other, but for pairs before the last `_PAIRS_MAX` tokens."""
        experts, count = len(self._slow), len(tokens)
        age = np.repeat(np.arange(count - 1.0, -1.0, -1.0), tokens.shape[1])
        flat = tokens.reshape(-1)
        for name, decay in (("_fast", 0.5), ("_slow", self._decay)):
            added = np.bincount(flat, weights=(1.0 - decay) * decay**age, minlength=experts)
            setattr(self, name, getattr(self, name) * decay**count + added)
        np.maximum.at(self._last_use, flat, self._time + count - age)
        self._time += count
        recent = tokens[-_PAIRS_MAX - 1 :]
        if self._now is not None and len(recent) == count:
            if len(self._now) == recent.shape[1]:
                recent = np.concatenate([self._now[None], recent])
        chosen = np.zeros((len(recent), experts), np.float32)
        np.put_along_axis(chosen, recent.astype(np.intp), 1.0, axis=1)
        left, entered = chosen[:-1], chosen[1:]
        # A row decays at each later visit of its expert.
        later = left[::-1].cumsum(axis=0)[::-1] - left
        weight = left * np.float32(self._row_decay) ** later
        fade = np.float32(self._row_decay) ** left.sum(axis=0)
        self._pairs = self._pairs * fade[:, None] + weight.T @ entered
        self._visits = self._visits * fade + weight.sum(axis=0)
        self._now = tokens[-1].copy()
