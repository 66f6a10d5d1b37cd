"""The plan of a call: what must hold whatever the router says."""

import numpy as np
import pytest

from mbolt_mlx.core.residency import POLICIES, ResidentSet, make_policy, prompt_worth
from mbolt_mlx.core.schedule import by_place, carry_out, plan_call


def run(resident, tokens, **kwargs):
    """Carry a plan out as an engine would, checking each step; returns it."""
    experts = set(np.unique(tokens).tolist())
    plan = plan_call(resident, tokens, **kwargs)
    assert sorted([*plan.hits, *plan.misses]) == sorted(experts)
    assert [e for step in plan.steps for e in step.read] == plan.misses
    computed = set()
    arrived = set(plan.hits)
    for step in plan.steps:
        for e in step.evict:
            assert resident.slot_of[e] >= 0
            if e in experts:
                # Its rows are computed before its slot goes.
                assert e in arrived
                computed.add(e)
        slots = carry_out(resident, step)
        assert len(set(slots)) == len(step.read)
        arrived |= set(step.read)
    assert arrived == experts
    assert len(resident.residents()) <= resident.slots
    resident.policy.use(tokens)
    return plan


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [4, 5, 8, 13, 31])
def test_any_row_of_calls(policy, slots):
    rng = np.random.default_rng(slots)
    resident = ResidentSet(32, slots, make_policy(policy, 32))
    for _ in range(200):
        count = int(rng.choice([1, 1, 1, 2, 5, 40]))
        tokens = np.stack([rng.permutation(32)[:4] for _ in range(count)])
        before = set(resident.residents())
        plan = run(resident, tokens)
        assert set(plan.hits) == before & set(tokens.ravel().tolist())


def test_a_token_reads_all_it_lacks_at_once_and_gives_up_no_more_than_needed():
    resident = ResidentSet(8, 4, make_policy("lru", 8))
    assert run(resident, np.array([[3, 1]])).steps[0].evict == []
    run(resident, np.array([[5, 6]]))
    plan = run(resident, np.array([[1, 7]]))
    assert (plan.hits, plan.misses) == ([1], [7])
    assert [(s.read, s.evict) for s in plan.steps] == [([7], [3])]
    assert plan_call(resident, np.array([[1, 7]])).steps == []


def test_a_prompt_ends_with_the_experts_that_its_answer_will_want():
    rng = np.random.default_rng(0)
    for policy in POLICIES:
        resident = ResidentSet(64, 16, make_policy(policy, 64))
        for _ in range(5):
            tokens = np.stack([rng.permutation(64)[:4] for _ in range(60)])
            run(resident, tokens)
            worth = prompt_worth(tokens, 64)
            best = sorted(range(64), key=lambda e: -worth[e])[:16]
            # As long as half the slots are free to read through, exactly these.
            assert len(set(resident.residents()) & set(best)) >= 12
        fresh = ResidentSet(64, 16, make_policy(policy, 64))
        run(fresh, tokens)
        assert set(fresh.residents()) == set(best)


def test_a_prompt_reads_in_file_order_twice_over():
    resident = ResidentSet(64, 8, make_policy("decayed", 64))
    offsets = list(np.random.default_rng(1).permutation(64))
    tokens = np.arange(64).reshape(16, 4)
    plan = run(resident, tokens, file_order=by_place([0] * 64, offsets))
    places = [offsets[e] for e in plan.misses]
    turns = sum(a > b for a, b in zip(places, places[1:], strict=False))
    assert turns <= 1


def test_a_prompt_streams_in_several_steps_so_that_reading_and_computing_overlap():
    resident = ResidentSet(64, 16, make_policy("decayed", 64))
    plan = run(resident, np.arange(64).reshape(16, 4))
    assert plan.staging == 16
    sizes = [len(step.read) for step in plan.steps]
    assert sizes[0] == 16 and set(sizes[1:]) == {plan.staging // 4}
