"""Whom the next tokens call, judged by the experts of the current one."""

from __future__ import annotations

import numpy as np

from mbolt_mlx.core.decayed import DecayedCount
from mbolt_mlx.core.ranking import Ranked

# Only the end of a long prompt is counted in the table, because that costs experts² a token.
_TABLE_TOKENS = 512
# Up to this the weight of a use may grow; float32 ends at 2 ** 128.
_LARGEST = 2.0**60


class Markov(Ranked):
    """Lowest expected use in the next few tokens first; absent experts count too.

    With b the experts of the current token and p those of the token before::

        slow[e]      = d · slow[e]  (+ 1 − d on b)                 d = 0.5 ** (1 / half_life)
        lately[i]    = lately[i] / 2  (+ 1/2 on p)
        follow[i, e] = follow[i, e] + lately[i]  for e in b,       visits[i] + 1  for i in p
        score[e]     = mean over i in b of (follow[i, e] + slow[e]) / (visits[i] + 1)

    ``follow[i, e] / visits[i]`` is how much e was used in the tokens after one that used i, the
    next token counting half, the one after it a quarter, and so on. Looking so far ahead keeps
    0.2 to 0.4 points more hits than the next token alone, the usual Markov term, on either public
    trace. ``slow``, the decayed count times 1 − d, stands in for what the table does not know yet.
    The table forgets with a half-life of ``memory`` tokens.

    A token costs O(top_k · experts), and the table experts² · 4 bytes of memory.
    """

    name = "markov"

    def __init__(self, experts: int, half_life: float = 12.0, memory: float = 1000.0) -> None:
        super().__init__(experts)
        self._often = DecayedCount(experts, half_life)
        # Of an expert that every token calls, slow shall be 1.
        self._unit = 1.0 - 1.0 / self._often.growth
        # Instead of fading the table at each token, the weight of what is added grows.
        self._growth = 2.0 ** (1.0 / memory)
        self._weight = 1.0
        self._lately = np.zeros(experts, np.float32)  # times the weight of the last token
        self._follow = np.zeros((experts, experts), np.float32)  # [e, i]: a token adds whole rows
        self._visits = np.zeros(experts, np.float32)
        self._now: np.ndarray | None = None
        self._counted = False

    def expect(self, tokens: np.ndarray) -> None:
        """Count the choices ``[tokens, top_k]`` of the forward that begins."""
        self._counted = True
        if not len(tokens):
            return
        tokens = tokens.astype(np.intp)  # other integers make numpy's look-ups three times slower
        self._often.use(tokens)
        if len(tokens) == 1:
            self._enter(tokens[0])
        else:
            self._enter_many(tokens)
        if self._weight > _LARGEST:
            self._lately /= self._weight
            self._follow /= self._weight
            self._visits /= self._weight
            self._weight = 1.0

    def use(self, tokens: np.ndarray) -> None:
        """Count the choices of a forward that has ended, unless ``expect`` has."""
        if not self._counted:
            self.expect(tokens)
        self._counted = False

    def renew(self) -> None:
        """Another conversation begins: who follows whom stays, how often does not."""
        self._often.renew()
        self._lately[:] = 0.0
        self._now = None

    def score(self, experts: np.ndarray) -> np.ndarray:
        """The score of each of ``experts``."""
        now = self._now
        if now is None:
            return self._often.scaled(experts, self._unit)
        share = 1.0 / len(now) / (self._visits[now] + self._weight)
        score = self._often.scaled(experts, self._unit * self._weight * sum(share.tolist()))
        score += self._follow[experts[:, None], now].dot(share)
        return score

    def _enter(self, now: np.ndarray) -> None:
        """Enter a token's experts ``[top_k]`` in the table."""
        before, self._now = self._now, now
        self._weight *= self._growth
        if before is not None:
            lately = self._lately
            lately *= 0.5 * self._growth
            lately[before] += 0.5 * self._weight
            self._follow[now] += lately
            self._visits[before] += self._weight

    def _enter_many(self, tokens: np.ndarray) -> None:
        """The same as one after the other, but for what came before the last `_TABLE_TOKENS`."""
        count = len(tokens)
        entered = tokens[-_TABLE_TOKENS:]
        first = tokens[-len(entered) - 1 : -len(entered)] if count > len(entered) else self._now
        left = np.zeros((len(entered), len(self._visits)), np.float32)
        if first is not None and len(first):
            left[0, first] = 1.0
        np.put_along_axis(left[1:], entered[:-1], 1.0, axis=1)
        lately, rows = self._lately / np.float32(self._weight), np.empty_like(left)
        for number, row in enumerate(left):
            lately = lately * 0.5 + row * 0.5
            rows[number] = lately
        if count > len(entered):
            fade = np.float32(self._growth ** (len(entered) - count))
            self._follow *= fade
            self._visits *= fade
        weights = self._weight * self._growth ** np.arange(1, len(entered) + 1)
        weights = weights.astype(np.float32)[:, None]
        chosen = np.zeros_like(left)
        np.put_along_axis(chosen, entered, 1.0, axis=1)
        self._follow += chosen.T @ (rows * weights)
        self._visits += (left * weights).sum(axis=0)
        self._weight = float(weights[-1, 0])
        self._lately = lately * np.float32(self._weight)
        self._now = tokens[-1]
