"""What one call of a layer reads, and what it gives up for that. Pure: decided before any read.

The engine carries a plan out and the simulator counts it, so both have the same residents, hits
and reads, whatever the drive does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mbolt_mlx.core.residency import ResidentSet, prompt_worth

# A call of its own (0.2 ms) pays for experts of this size, which take longer to compute. One
# token's smaller experts are computed in one call when all are there.
CALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """Experts that are read together, once those of ``evict`` are no longer needed."""

    read: list[int]
    evict: list[int]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of a layer.

    Args:
        hits: the wanted experts that are in memory; those in front are given up first.
        misses: the wanted experts that are not, in the order of ``steps``.
        steps: what is read, in order. Each needs the slots of its ``evict``: residents that
            nobody wants now, hits whose rows have been computed, or experts of earlier steps.
        staging: slots that experts pass through; all of them, where the wanted ones fit.
    """

    hits: list[int]
    misses: list[int]
    steps: list[Step]
    staging: int


def plan_call(
    resident: ResidentSet,
    tokens: np.ndarray,
    file_order: Callable[[list[int]], list[int]] = sorted,
) -> CallPlan:
    """Plan a call that needs the experts ``tokens`` ``[tokens, top_k]``.

    Tells the policy what is wanted (``expect``), and changes nothing else. Where the wanted
    experts fit, all that are missing are read at once. Where they do not (a prompt), those that
    the answer will most likely need (`prompt_worth`) are kept or read last, so that they are the
    ones in memory in the end.

    Args:
        resident: the layer's slots.
        tokens: the router's choices, first token first.
        file_order: sorts experts by where they lie on the drive.
    """
    resident.policy.expect(tokens)
    if len(tokens) == 1:
        experts = list(dict.fromkeys(tokens[0].tolist()))
    else:
        experts = np.unique(tokens).tolist()
    hits, misses = resident.split(experts)
    if not misses:
        return CallPlan(hits, misses, [], resident.slots)
    if len(misses) <= resident.slots - len(hits):
        short = len(misses) - resident.free
        evict = resident.policy.victims(short, set(hits)) if short > 0 else []
        return CallPlan(hits, misses, [Step(misses, evict)], resident.slots)
    return _stream(resident, hits, misses, tokens, file_order)


def _stream(
    resident: ResidentSet,
    hits: list[int],
    misses: list[int],
    tokens: np.ndarray,
    file_order: Callable[[list[int]], list[int]],
) -> CallPlan:
    """A call that wants more experts than there are slots: some pass through."""
    slots = resident.slots
    worth = prompt_worth(tokens, len(resident.slot_of))
    ranked = sorted([*hits, *misses], key=lambda e: -worth[e])
    best = set(ranked[:slots])
    # A stream through too few slots would wait for each read.
    least = min(slots, max(2, slots // 2))
    stay = [e for e in ranked if e in best and resident.slot_of[e] >= 0][: slots - least]
    staying = set(stay)
    staging = slots - len(stay)
    leave = [e for e in hits if e not in staying]
    wanted = set(hits)
    idle = resident.policy.victims(slots, wanted)
    ordered = file_order([e for e in misses if e not in best])
    ordered += file_order([e for e in misses if e in best])
    given_up = [*idle, *leave, *ordered]
    # All that can be had at once is read at once; then a few follow whenever as many are done.
    group = max(1, min(staging, len(misses)) // 4)
    size = resident.free + len(idle) or group
    free, start, position = resident.free, 0, 0
    steps = []
    while start < len(ordered):
        read = ordered[start : start + size]
        need = max(0, len(read) - free)
        steps.append(Step(read, given_up[position : position + need]))
        free -= len(read) - need
        start, position, size = start + len(read), position + need, group
    return CallPlan([*leave, *stay], ordered, steps, staging)


def carry_out(resident: ResidentSet, step: Step) -> list[int]:
    """Give the experts of ``step`` their slots and return these."""
    for expert in step.evict:
        resident.forget(expert)
    resident.evictions += len(step.evict)
    return resident.place_all(step.read, ())


def hottest(heat: Sequence[float], slots: int) -> list[int]:
    """The ``slots`` experts of the highest ``heat``, the coldest of them first.

    In this order the hottest counts as used last.
    """
    order = sorted(range(len(heat)), key=lambda e: -heat[e])
    return order[:slots][::-1]


def by_place(files: Sequence[int], offsets: Sequence[int]) -> Callable[[list[int]], list[int]]:
    """A sorter of experts by the file and byte where each begins."""

    def sort(experts: list[int]) -> list[int]:
        return sorted(experts, key=lambda e: (files[e], offsets[e]))

    return sort
