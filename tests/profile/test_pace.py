"""How long a token takes: what is missed in each layer, and what reading hides behind computing."""

import numpy as np
import pytest

from mbolt_mlx.core.budget import LayerShape
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.pace import CALL_BYTES, THREADS, Misses, Pace, hit_rate, misses_at, misses_of
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace

MIB = 1 << 20


def routed(tokens=40, experts=16, top_k=4, layers=3):
    rng = np.random.default_rng(1)

    def chosen(count):
        return {n: np.stack([rng.permutation(experts)[:top_k] for _ in range(count)])
                for n in range(layers)}  # fmt: skip

    passes = [Pass("prefill", chosen(5)), *(Pass("decode", chosen(1)) for _ in range(tokens))]
    return make_trace(passes, {n: LayerInfo(experts, top_k) for n in range(layers)})


def pace(shape, *, dense=0.001, experts=0.008, law=None, layers=2, **more):
    law = law or Law(1e-4, 1e9)
    return Pace(dict.fromkeys(range(layers), shape), dense, experts, lambda depth: law, **more)


def each(*calls, layers=2):
    return dict.fromkeys(range(layers), Misses(4.0, np.array(calls)))


def test_misses_of_a_hit_rate():
    one = misses_at(0.75, 4)
    assert one.calls.sum() == pytest.approx(1) and one.per_token == pytest.approx(1.0)
    assert one.calls[0] == pytest.approx(0.75**4)
    assert misses_at(1.0, 4).calls.tolist() == [1, 0, 0, 0, 0]
    assert hit_rate([one, misses_at(0.25, 4)]) == pytest.approx(0.5)
    assert hit_rate([]) == 1.0


def test_misses_of_a_trace_are_the_replays():
    trace, slots = routed(), {0: 4, 1: 8, 2: 16}
    missed, whole = misses_of(trace, slots), replay(trace, Setup(slots=slots)).decode
    assert sum(m.per_token for m in missed.values()) == pytest.approx(whole.per_token("misses"))
    assert hit_rate(missed.values()) == pytest.approx(whole.hit_rate)
    assert missed[0].calls.sum() == pytest.approx(1)
    assert missed[2].per_token == 0 and missed[2].wanted == 0


def test_reading_hides_behind_the_experts_that_are_there():
    """Two layers of four experts, 4 ms of computing a layer: 1 ms each."""
    big = pace(LayerShape(16, 4, 2 * MIB))
    read = 1e-4 + 2 * MIB / 1e9  # 2.2 ms
    assert big.seconds(each(1.0), 1) == pytest.approx(0.009)
    # One is read in 2.2 ms, while three are computed in 3: nothing is added.
    assert big.seconds(each(0.0, 1.0), 1) == pytest.approx(0.009)
    # Three take 6.6 ms; all but the last to arrive are computed meanwhile.
    assert big.seconds(each(0.0, 0.0, 0.0, 1.0), 1) == pytest.approx(0.001 + 2 * (3 * read + 0.001))
    half = big.seconds(each(0.5, 0.0, 0.0, 0.5), 1)
    assert half == pytest.approx(0.001 + 2 * (0.5 * 0.004 + 0.5 * (3 * read + 0.001)))


def test_small_experts_wait_for_all_that_are_missing():
    small = pace(LayerShape(16, 4, CALL_BYTES - 1))
    read = 3e-4 + CALL_BYTES / 1e9
    assert small.seconds(each(0.0, 1.0), 3) == pytest.approx(0.001 + 2 * (0.004 + read), rel=1e-4)


def test_what_an_expert_costs_before_it_is_read_is_never_hidden():
    shape = LayerShape(16, 4, 2 * MIB)
    free, dear = pace(shape), pace(shape, miss_s=1e-3)
    for calls in ((1.0,), (0.0, 1.0), (0.5, 0.0, 0.5)):
        missed = each(*calls)
        more = 1e-3 * sum(one.per_token for one in missed.values())
        assert dear.seconds(missed, 1) - free.seconds(missed, 1) == pytest.approx(more)


def test_more_bytes_than_were_missed_take_longer():
    big = pace(LayerShape(16, 4, 2 * MIB), experts=0.0)
    once, twice = (big.seconds(each(0, 1.0), 1, stretch=s) for s in (1.0, 2.0))
    assert twice - once == pytest.approx(2 * 2 * MIB / 1e9)


def test_a_limit_holds_for_the_token_as_a_whole():
    shape = LayerShape(16, 4, 2 * MIB)
    free, tight = pace(shape), pace(shape, limit=100e6)
    few, many = each(0.9, 0.1), each(0.0, 0.0, 0.0, 1.0)
    assert tight.seconds(few, 1) == free.seconds(few, 1)  # computing leaves enough time
    assert tight.seconds(many, 1) == pytest.approx(2 * 3 * 2 * MIB / 100e6)


def test_the_law_is_that_of_the_reads_under_way():
    asked = []

    def law(depth):
        asked.append(depth)
        return Law(1e-4, 1e9)

    Pace({0: LayerShape(16, 4, 2 * MIB)}, 0, 0, law).seconds(each(0, 0.5, 0.25, layers=1), 1)
    Pace({0: LayerShape(16, 4, 2 * MIB)}, 0, 0, law).seconds(each(0, 1.0, layers=1), 9)
    assert asked == [1, 2, THREADS]


def test_the_constants_are_the_engines():
    import mlx.core as mx

    import mbolt_mlx
    from mbolt_mlx.core import budget, reads
    from mbolt_mlx.engine import layer
    from mbolt_mlx.profile import pace, plan

    assert layer.CALL_BYTES is pace.CALL_BYTES
    assert plan.BOUNCE_BYTES is reads.BOUNCE_BYTES and plan.FREED_BYTES is budget.FREED_BYTES
    model, _ = mbolt_mlx.load("demo", resident=0.5)
    assert mbolt_mlx.stats(model).read_threads == THREADS
    assert mx.set_cache_limit(budget.FREED_BYTES) == budget.FREED_BYTES
