"""Which experts of a layer stay in memory. Pure: no I/O, no MLX.

The engine and the simulator run the same classes. A *policy* orders the experts by worth; a
`ResidentSet` keeps the table of slots and asks its policy whom to give up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from mbolt_mlx.core.decayed import DecayedCount
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.markov import Markov

ABSENT = -1


class Policy(Protocol):
    """The order in which the residents of one layer are given up."""

    name: str

    def expect(self, tokens: np.ndarray) -> None:
        """A forward begins with these choices: expert ids ``[tokens, top_k]``, first token first.

        Called before ``victims`` is, for policies whose order depends on the current choices.
        """

    def use(self, tokens: np.ndarray) -> None:
        """The forward with these choices has ended."""

    def renew(self) -> None:
        """Another conversation begins; who is resident stays."""

    def admit(self, expert: int) -> None:
        """``expert`` has become resident."""

    def drop(self, expert: int) -> None:
        """``expert`` is not resident, or no longer."""

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """Up to ``count`` residents to give up, the least wanted first, none of ``keep``."""


class LRU:
    """Least recently used first."""

    name = "lru"

    def __init__(self, experts: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def expect(self, tokens: np.ndarray) -> None:
        """Nothing: the order is that of the forwards that have ended."""

    def renew(self) -> None:
        """Nothing: what was used last stays so."""

    def use(self, tokens: np.ndarray) -> None:
        if len(tokens) == 1:
            recent = tokens[0].tolist()
        else:
            # Experts by their last use, the oldest first.
            flat = tokens.reshape(-1)[::-1]
            values, first = np.unique(flat, return_index=True)
            recent = values[np.argsort(-first)].tolist()
        for expert in recent:
            if expert in self._order:
                self._order.move_to_end(expert)

    def admit(self, expert: int) -> None:
        self._order[expert] = None

    def drop(self, expert: int) -> None:
        self._order.pop(expert, None)

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        chosen: list[int] = []
        for expert in self._order:
            if len(chosen) == count:
                break
            if expert not in keep:
                chosen.append(expert)
        return chosen


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "decayed": DecayedCount,
    "markov": Markov,
}
DEFAULT_POLICY = "markov"


def make_policy(name: str, experts: int) -> Policy:
    """A new policy for a layer of ``experts`` experts; "default" is `DEFAULT_POLICY`.

    Raises:
        UsageError: if there is no policy of that name.
    """
    name = DEFAULT_POLICY if name == "default" else name
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r}", expected=" or ".join(["default", *POLICIES]))
    return POLICIES[name](experts)


class ResidentSet:
    """The slots of one layer: which expert each holds, and who leaves when one is needed.

    Args:
        experts: experts of the layer.
        slots: how many of them fit in memory.
        policy: whom to give up.
    """

    def __init__(self, experts: int, slots: int, policy: Policy) -> None:
        self.policy = policy
        self.slot_of: list[int] = [ABSENT] * experts
        self.holder: list[int] = [ABSENT] * slots
        self._free = list(range(slots - 1, -1, -1))
        self.evictions = 0

    @property
    def slots(self) -> int:
        """Slots of the layer."""
        return len(self.holder)

    @property
    def free(self) -> int:
        """Slots that hold no expert."""
        return len(self._free)

    def residents(self) -> list[int]:
        """The experts in memory, by slot."""
        return [e for e in self.holder if e != ABSENT]

    def split(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """``experts`` as (in memory, missing), each in the given order."""
        slot_of = self.slot_of
        hits = [e for e in experts if slot_of[e] != ABSENT]
        misses = [e for e in experts if slot_of[e] == ABSENT]
        return hits, misses

    def place_all(self, experts: Sequence[int], keep: Collection[int]) -> list[int]:
        """Give each of ``experts``, all absent, a slot; evict none of ``keep``.

        Raises:
            ValueError: if there are not that many slots to be had.
        """
        short = len(experts) - len(self._free)
        if short > 0:
            victims = self.policy.victims(short, keep)
            if len(victims) < short:
                raise ValueError(f"{len(experts)} slots asked for, too few can be given up")
            for victim in victims:
                self.forget(victim)
            self.evictions += short
        slots = []
        for expert in experts:
            slot = self._free.pop()
            self.slot_of[expert] = slot
            self.holder[slot] = expert
            self.policy.admit(expert)
            slots.append(slot)
        return slots

    def forget(self, expert: int) -> None:
        """Free the slot of ``expert``."""
        slot = self.slot_of[expert]
        self.slot_of[expert] = ABSENT
        self.holder[slot] = ABSENT
        self._free.append(slot)
        self.policy.drop(expert)

    def clear(self, slots: int) -> None:
        """Hold nothing, in ``slots`` slots, whatever an interrupted change has left."""
        for expert in range(len(self.slot_of)):
            self.policy.drop(expert)
            self.slot_of[expert] = ABSENT
        self.holder = [ABSENT] * slots
        self._free = list(range(slots - 1, -1, -1))

    def shrink(self, slots: int) -> list[tuple[int, int]]:
        """Reduce to ``slots`` slots, giving up the least wanted.

        Returns:
            (old slot, new slot) of each expert that stays.
        """
        surplus = len(self.residents()) - slots
        if surplus > 0:
            for victim in self.policy.victims(surplus, ()):
                self.forget(victim)
            self.evictions += surplus
        stay = [(slot, expert) for slot, expert in enumerate(self.holder) if expert != ABSENT]
        self.holder = [ABSENT] * slots
        moves = []
        for new, (old, expert) in enumerate(stay):
            self.holder[new] = expert
            self.slot_of[expert] = new
            moves.append((old, new))
        self._free = list(range(slots - 1, len(stay) - 1, -1))
        return moves


def prompt_worth(tokens: np.ndarray, experts: int, half_life: float = 24.0) -> np.ndarray:
    """What a prompt says about the experts that its answer will need.

    Args:
        tokens: expert ids ``[tokens, top_k]`` of a prefill chunk.
        experts: experts of the layer.
        half_life: age in tokens at which a use counts half.

    Returns:
        ``[experts]`` decayed use counts as of the last token.
    """
    age = np.arange(len(tokens) - 1, -1, -1, dtype=np.float64)
    weight = np.repeat(0.5 ** (age / half_life), tokens.shape[1])
    return np.bincount(tokens.reshape(-1), weights=weight, minlength=experts)


def slots_for(experts: int, top_k: int, resident: float) -> int:
    """Slots of a layer at the fraction ``resident``: at least top_k, at most all."""
    return min(experts, max(top_k, round(resident * experts)))
