"""Residency against plain models of it, and the table of slots under random use."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.residency import (
    ABSENT,
    DEFAULT_POLICY,
    LRU,
    POLICIES,
    DecayedCount,
    ResidentSet,
    make_policy,
    prompt_worth,
    slots_for,
)


def choices(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Expert ids ``[tokens, top_k]``, distinct in a row, some far more often than others."""
    liking = rng.normal(0.0, 2.0, experts)
    noise = rng.gumbel(size=(tokens, experts))
    return np.argsort(-(liking + noise), axis=1, kind="stable")[:, :top_k]


class PlainLRU:
    """When each expert was last used, and nothing else."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.clock = 0

    def touch(self, expert: int) -> None:
        self.clock += 1
        self.last[expert] = self.clock

    def victims(self, count: int, keep: set[int]) -> list[int]:
        order = sorted((e for e in self.last if e not in keep), key=self.last.__getitem__)
        return order[:count]


@pytest.mark.parametrize("seed", range(6))
def test_lru_is_the_brute_force_lru(seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(4, 40))
    policy, plain = LRU(experts), PlainLRU()
    for _ in range(400):
        action = rng.integers(4)
        expert = int(rng.integers(experts))
        if action == 0 and expert not in plain.last:
            policy.admit(expert)
            plain.touch(expert)
        elif action == 1 and expert in plain.last:
            policy.drop(expert)
            del plain.last[expert]
        elif action == 2:
            tokens = choices(rng, int(rng.integers(1, 6)), experts, min(3, experts))
            policy.use(tokens)
            for e in tokens.reshape(-1).tolist():
                if e in plain.last:
                    plain.touch(e)
        else:
            keep = set(rng.choice(experts, int(rng.integers(experts)), replace=False).tolist())
            count = int(rng.integers(experts + 2))
            assert policy.victims(count, keep) == plain.victims(count, keep)


def test_one_row_and_a_batch_of_rows_leave_the_same_order():
    rng = np.random.default_rng(1)
    tokens = choices(rng, 50, 16, 4)
    one, many = LRU(16), LRU(16)
    for e in range(16):
        one.admit(e)
        many.admit(e)
    for row in tokens:
        one.use(row[None])
    many.use(tokens)
    assert one.victims(16, ()) == many.victims(16, ())


def plain_counts(tokens: np.ndarray, experts: int, half_life: float) -> np.ndarray:
    counts = np.zeros(experts)
    for row in tokens:
        counts *= 0.5 ** (1.0 / half_life)
        counts[row] += 1.0
    return counts


def assert_order(policy: DecayedCount, counts: np.ndarray) -> None:
    """The order is by count; counts that are as good as equal may stand either way."""
    order = policy.victims(len(counts), ())
    assert sorted(order) == list(range(len(counts)))
    ordered = counts[order]
    assert np.all(ordered[1:] >= ordered[:-1] * (1 - 1e-9) - 1e-250)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("half_life", [3.0, 12.0])
def test_decayed_count_is_the_plain_formula_over_a_long_trace(chunk, half_life):
    rng = np.random.default_rng(chunk)
    experts, length = 32, 6000  # passes the point where the weights are scaled back, many times
    tokens = choices(rng, length, experts, 4)
    policy = DecayedCount(experts, half_life)
    for e in range(experts):
        policy.admit(e)
    counts = np.zeros(experts)
    for start in range(0, length, chunk):
        part = tokens[start : start + chunk]
        policy.use(part)
        for row in part:
            counts *= 0.5 ** (1.0 / half_life)
            counts[row] += 1.0
        if start % (chunk * 11) == 0:
            assert_order(policy, counts)
    assert_order(policy, counts)


@pytest.mark.parametrize("length", [3000, 5000, 13_000, 40_000])
def test_decayed_count_survives_a_prompt_whose_weights_pass_the_largest_float(length):
    rng = np.random.default_rng(length)
    first = rng.integers(0, 24, (length, 1))
    tokens = np.concatenate([first, (first + rng.integers(1, 24, (length, 1))) % 24], axis=1)
    policy = DecayedCount(24)
    for e in range(24):
        policy.admit(e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in tokens[:100]:
            policy.use(row[None])
        policy.use(tokens)
        policy.use(tokens[:1])
    counts = plain_counts(np.concatenate([tokens[-500:], tokens[:1]]), 24, 12.0)
    order = policy.victims(24, ())
    assert np.all(np.diff(counts[order]) >= -1e-6)


def test_decayed_count_remembers_experts_that_are_away():
    policy = DecayedCount(4)
    for e in (0, 1):
        policy.admit(e)
    for _ in range(5):
        policy.use(np.array([[2]]))
    policy.use(np.array([[0]]))
    policy.use(np.array([[1]]))
    policy.admit(2)
    assert policy.victims(3, ()) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_victims_are_resident_distinct_and_none_of_keep(name, seed):
    rng = np.random.default_rng(seed)
    experts = 24
    policy = make_policy(name, experts)
    resident: set[int] = set()
    for _ in range(300):
        expert = int(rng.integers(experts))
        if expert in resident and rng.random() < 0.4:
            policy.drop(expert)
            resident.discard(expert)
        elif expert not in resident:
            policy.admit(expert)
            resident.add(expert)
        policy.use(choices(rng, int(rng.integers(1, 4)), experts, 4))
        keep = set(rng.choice(experts, int(rng.integers(experts)), replace=False).tolist())
        count = int(rng.integers(0, experts + 3))
        victims = policy.victims(count, keep)
        assert len(set(victims)) == len(victims) == min(count, len(resident - keep))
        assert set(victims) <= resident - keep
        assert all(isinstance(v, int) for v in victims)


def check(table: ResidentSet, experts: int, slots: int) -> None:
    """Slot and expert point at each other, and nothing is lost or counted twice."""
    assert table.slots == slots and len(table.slot_of) == experts
    held = [e for e in table.holder if e != ABSENT]
    assert len(held) == len(set(held))
    assert table.free == slots - len(held)
    for slot, expert in enumerate(table.holder):
        if expert != ABSENT:
            assert table.slot_of[expert] == slot
    assert sum(s != ABSENT for s in table.slot_of) == len(held)
    assert sorted(table.policy.victims(experts, ())) == sorted(held)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(5))
def test_resident_set_keeps_its_invariants_whatever_happens(name, seed):
    pick = random.Random(seed)
    rng = np.random.default_rng(seed)
    experts = pick.randint(3, 40)
    slots = pick.randint(1, experts)
    table = ResidentSet(experts, slots, make_policy(name, experts))
    for _ in range(300):
        what = pick.random()
        if what < 0.6:
            wanted = pick.sample(range(experts), pick.randint(1, slots))
            hits, misses = table.split(wanted)
            assert sorted(hits + misses) == sorted(wanted)
            assert [e for e in wanted if e in set(hits)] == hits
            before = {e: table.slot_of[e] for e in hits}
            evictions, free = table.evictions, table.free
            places = table.place_all(misses, {*hits, *misses})
            assert table.evictions - evictions == max(0, len(misses) - free)
            assert [table.slot_of[e] for e in misses] == places
            assert all(table.slot_of[e] == s for e, s in before.items())
            table.policy.use(np.array([wanted]))
        elif what < 0.75 and table.residents():
            table.forget(pick.choice(table.residents()))
        elif what < 0.85:
            table.policy.use(choices(rng, pick.randint(1, 5), experts, min(3, experts)))
        elif what < 0.9 and slots > 1:
            slots = pick.randint(1, slots)
            table.shrink(slots)
        else:
            absent = [e for e in range(experts) if table.slot_of[e] == ABSENT]
            if absent:
                table.place_all([pick.choice(absent)], keep=())
        check(table, experts, slots)


def test_too_many_at_once_is_refused_and_changes_nothing():
    table = ResidentSet(8, 3, LRU(8))
    table.place_all([0, 1, 2], keep=())
    before = list(table.holder)
    with pytest.raises(ValueError, match="too few"):
        table.place_all([4, 5], keep={0, 1})
    assert table.holder == before and table.evictions == 0
    check(table, 8, 3)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_shrink_keeps_the_most_wanted_and_says_where_they_went(name):
    rng = np.random.default_rng(3)
    table = ResidentSet(20, 12, make_policy(name, 20))
    table.place_all(list(range(12)), keep=())
    table.policy.use(choices(rng, 40, 20, 4))
    wanted = table.policy.victims(20, ())[-5:]
    before = list(table.holder)
    moves = table.shrink(5)
    assert sorted(table.residents()) == sorted(wanted)
    assert len(moves) == 5 and sorted(new for _, new in moves) == list(range(5))
    assert all(before[old] == table.holder[new] for old, new in moves)
    # A copy in this order never overwrites what is still to be moved.
    assert all(new <= old for old, new in moves)
    assert [old for old, _ in moves] == sorted(old for old, _ in moves)
    check(table, 20, 5)


def test_shrink_of_a_set_that_is_not_full_gives_up_no_one():
    table = ResidentSet(10, 8, LRU(10))
    table.place_all([3, 4, 5], keep=())
    table.forget(4)
    assert table.shrink(2) == [(0, 0), (2, 1)]
    assert table.residents() == [3, 5] and table.evictions == 0
    check(table, 10, 2)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_clear_repairs_what_an_interrupt_has_left(name):
    table = ResidentSet(10, 6, make_policy(name, 10))
    table.place_all([1, 2, 3, 4, 5, 6], keep=())
    table.slot_of[2] = ABSENT
    table._free.append(3)
    table.policy.drop(5)
    table.clear(4)
    check(table, 10, 4)
    assert table.place_all([2, 7, 8, 9], keep=()) == [0, 1, 2, 3]
    check(table, 10, 4)


def test_prompt_worth_is_the_plain_formula():
    rng = np.random.default_rng(0)
    tokens = choices(rng, 200, 30, 4)
    assert np.allclose(prompt_worth(tokens, 30, 24.0), plain_counts(tokens, 30, 24.0))
    assert prompt_worth(tokens[:0], 30).tolist() == [0.0] * 30


def test_prompt_worth_of_a_prompt_longer_than_floats_reach():
    tokens = np.zeros((60_000, 1), dtype=np.int64)
    tokens[-1] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worth = prompt_worth(tokens, 3)
    assert np.isfinite(worth).all() and worth[0] > worth[1] > worth[2] == 0


@pytest.mark.parametrize(
    ("experts", "top_k", "resident", "slots"),
    [
        (64, 8, 0.2, 13),
        (64, 8, 1e-9, 8),
        (64, 8, 0.0, 8),
        (64, 8, 1.0, 64),
        (64, 8, 7.0, 64),
        (4, 8, 0.1, 4),
        (128, 8, 0.0625, 8),
        (3, 1, 0.5, 2),
    ],
)
def test_slots_have_a_floor_and_a_ceiling(experts, top_k, resident, slots):
    assert slots_for(experts, top_k, resident) == slots


def test_an_unknown_policy_is_named_with_the_ones_there_are():
    with pytest.raises(UsageError, match="'fifo'.*default or lru or decayed"):
        make_policy("fifo", 8)
    assert make_policy("default", 8).name == DEFAULT_POLICY
