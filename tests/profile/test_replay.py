"""Replays: the public traces row by row, the optimum by brute force, counts by hand."""

import itertools
import lzma
from pathlib import Path

import numpy as np
import pytest

from mbolt_mlx.core.errors import MemoryLimitError, UsageError
from mbolt_mlx.profile.belady import belady
from mbolt_mlx.profile.counts import bootstrap, paired_bootstrap
from mbolt_mlx.profile.layout import LAYOUTS, lay_out, reads_of
from mbolt_mlx.profile.pool import Pool
from mbolt_mlx.profile.replay import Setup, replay, shapes_of, slots_of
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace, read_trace

PUBLIC = Path(__file__).resolve().parents[2] / "examples" / "traces"
RECORDED = [("qwen3-30b-a3b", 29597, 36864), ("gemma4-26b-a4b", 18872, 23040)]


@pytest.fixture(scope="module", params=RECORDED, ids=lambda r: r[0])
def recorded(request):
    name, hits, total = request.param
    path = PUBLIC / f"{name}.route.csv.xz"
    return path, read_trace(path), hits, total


def test_global_lru_of_4000_mib_hits_what_the_recording_engine_hit(recorded):
    """80.3 % and 81.9 %: exactly the counts in the traces."""
    _, trace, hits, total = recorded
    decode = replay(trace, Setup("lru", "global", budget=4000 << 20)).decode
    assert (decode.hits, decode.hits + decode.misses) == (hits, total)
    assert round(100 * decode.hit_rate, 1) in (80.3, 81.9)


def test_and_row_by_row(recorded):
    path, trace, _, _ = recorded
    found = {}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        if line[0].isdigit():
            _, phase, step, layer, _, expert, _, residency, _ = line.split(",")
            if phase == "1":
                found[int(step), int(layer), int(expert)] = residency == "1"
    pool = Pool(shapes_of(trace), "lru", by_size=False, budget=4000 << 20)
    first = min(step for step, _, _ in found)
    step, right = first, 0
    for one in trace.passes:
        for layer, tokens in one.chosen.items():
            for row in tokens:
                hits, _, _ = pool.call(layer, row)
                if one.phase == "decode":
                    right += sum(found[step, layer, e] == (e in hits) for e in row.tolist())
        step += one.phase == "decode"
    assert right == len(found)


def test_global_lru_hits_nothing_below_one_tokens_experts(recorded):
    _, trace, _, _ = recorded
    one_token = sum(i.top_k * i.expert_bytes for i in trace.layers.values())
    decode = replay(trace, Setup("lru", "global", budget=int(0.9 * one_token))).decode
    assert decode.hit_rate == 0


def test_policies_keep_their_rank_at_small_residency(recorded):
    _, trace, _, _ = recorded
    for resident in (0.1, 0.2):
        rates = [
            replay(trace, Setup(policy, resident=resident)).decode.hit_rate
            for policy in ("lru", "decayed", "markov", "belady")
        ]
        assert rates == sorted(rates)
        assert (rates[2] - rates[0]) / (rates[3] - rates[0]) > 0.25


def brute(calls, slots):
    """Fewest misses over all choices of residents, current experts kept where they fit."""
    states = {frozenset(): 0}
    for wanted in calls:
        after = {}
        for held, misses in states.items():
            there = held | set(wanted)
            cost = misses + len(set(wanted) - held)
            must = set(wanted) if len(wanted) <= slots else set()
            rest = sorted(there - must)
            for extra in itertools.combinations(rest, min(len(rest), slots - len(must))):
                state = frozenset(must | set(extra))
                after[state] = min(after.get(state, 10**9), cost)
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_optimum(seed):
    rng = np.random.default_rng(seed)
    calls = [rng.permutation(6)[: rng.integers(1, 5)] for _ in range(12)]
    slots = 3
    assert belady(calls, 6, slots)[:, 1].sum() == brute([c.tolist() for c in calls], slots)


def small(passes, *, experts=8, top_k=2, nbytes=1000, layers=(0,), session=None):
    known = {layer: LayerInfo(experts, top_k, nbytes, 3) for layer in layers}
    return make_trace(
        [
            Pass(
                "decode" if len(rows) == 1 else "prefill",
                {layer: np.array(rows) for layer in layers},
                session[n] if session else 0,
            )
            for n, rows in enumerate(passes)
        ],
        known,
    )


def test_counts_by_hand():
    trace = small([[[0, 1]], [[1, 2]], [[0, 1]]])
    counts = replay(trace, Setup("lru", slots={0: 2}))
    decode = counts.decode
    assert (decode.tokens, decode.hits, decode.misses, decode.evictions) == (3, 2, 4, 2)
    assert (decode.reads, decode.bytes) == (4, 4000)
    assert counts.prefill.tokens == 0 and counts.prefill.hit_rate == 1.0
    assert decode.per_token("bytes") == pytest.approx(4000 / 3)
    assert counts.hits_by_pass().tolist() == [[0, 2], [1, 1], [1, 1]]


@pytest.mark.parametrize("scope", ["global", "class"])
@pytest.mark.parametrize("policy", ["lru", "decayed", "markov"])
def test_a_pool_that_holds_everything_misses_each_expert_once(policy, scope):
    rng = np.random.default_rng(0)
    trace = small([[rng.permutation(8)[:2]] for _ in range(60)], layers=(0, 4))
    decode = replay(trace, Setup(policy, scope, budget=16000)).decode
    assert decode.misses == 16 and decode.evictions == 0
    tight = replay(trace, Setup(policy, scope, resident=0.5)).decode
    assert 16 < tight.misses < tight.hits + tight.misses


def test_a_pool_of_one_layer_is_that_layers_slots():
    """The policies count each token once, here as there."""
    rng = np.random.default_rng(3)
    often = 1.0 / np.arange(1, 33)
    trace = small(
        [[rng.choice(32, 4, replace=False, p=often / often.sum())] for _ in range(400)],
        experts=32,
        top_k=4,
    )
    for policy in ("lru", "markov"):
        alone = replay(trace, Setup(policy, slots={0: 8})).decode
        pooled = replay(trace, Setup(policy, "class", budget=8000)).decode
        assert (pooled.hits, pooled.evictions) == (alone.hits, alone.evictions), policy


def test_a_pool_gives_up_none_of_the_current_token():
    trace = small([[[0, 1]], [[2, 3]], [[0, 3]]])
    for policy in ("lru", "decayed", "markov"):
        pool = Pool(shapes_of(trace), policy, by_size=False, budget=2000)
        for tokens in ([0, 1], [2, 3], [0, 3]):
            pool.call(0, np.array(tokens))
            assert pool._resident[tokens].all()


def test_heat_fills_the_slots_before_the_first_token():
    trace = small([[[5, 6]]])
    assert replay(trace, Setup(slots={0: 2})).decode.hits == 0
    heat = {0: [0, 0, 0, 0, 0, 3, 4, 1]}
    assert replay(trace, Setup(slots={0: 2}, heat=heat)).decode.hits == 2


def test_another_conversation_starts_with_the_residents_of_the_last():
    trace = small([[[0, 1]], [[0, 1]]], session=[0, 1])
    for policy in ("lru", "decayed", "markov"):
        assert replay(trace, Setup(policy, slots={0: 2})).decode.hits == 2


def test_slots_are_those_of_the_engine():
    trace = small([[[0, 1]]], layers=(0, 1))
    assert slots_of(trace, Setup(resident=0.5)) == {0: 4, 1: 4}
    assert slots_of(trace, Setup(resident=0.01)) == {0: 2, 1: 2}
    assert slots_of(trace, Setup(budget=9000)) == {0: 5, 1: 4}
    assert slots_of(trace, Setup(slots={0: 99, 1: 3})) == {0: 8, 1: 3}


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        (Setup(), UsageError),
        (Setup(resident=0.5, budget=1000), UsageError),
        (Setup(resident=1.5), UsageError),
        (Setup(resident=0.0), UsageError),
        (Setup(budget=10), MemoryLimitError),
        (Setup(slots={1: 2}), UsageError),
        (Setup("nonsense", resident=0.5), UsageError),
        (Setup(scope="nonsense", resident=0.5), UsageError),
        (Setup("belady", "global", resident=0.5), UsageError),
        (Setup(scope="global", slots={0: 2}), UsageError),
    ],
)
def test_setups_without_meaning(setup, error):
    with pytest.raises(error):
        replay(small([[[0, 1]]]), setup)


def test_a_budget_needs_to_know_the_bytes():
    trace = make_trace([Pass("decode", {0: np.array([[0, 1]])})], {0: LayerInfo(8, 2)})
    for scope in ("layer", "global"):
        with pytest.raises(UsageError, match="layer 0"):
            replay(trace, Setup(scope=scope, budget=5000))
    assert replay(trace, Setup(resident=0.5)).decode.misses == 2


def test_reads_of_each_layout():
    layers = {0: LayerInfo(8, 2, 3 * 70000, 3)}
    orders = {
        "chain": {0: [4, 0, 1, 2, 3, 5, 6, 7]},
        "heat": {0: range(8)},
        "clique": {0: range(8)},
    }

    def reads(name, experts):
        return reads_of(lay_out(name, layers, orders)[0], experts)

    assert reads("stock", [4, 0]) == (6, 6 * 70000)
    assert reads("stock", [1, 0]) == (3, 6 * 70000)
    assert reads("coalesced", [4, 0]) == (2, 2 * 210000)
    # Neighbours in a side-file are apart by the padding of a block, which is read too.
    assert reads("coalesced", [1, 0]) == (1, 2 * 210000 + 2992)
    assert reads("chain", [4, 0]) == (3, 6 * 70000)
    assert reads("interleave", [4, 0])[0] == reads("coalesced+chain", [0, 4])[0] == 1
    # A gap is read over when it is small, or as the caller says.
    ranges = lay_out("stock", layers)[0]
    assert reads_of(ranges, [0, 2])[0] == 6
    assert reads_of(ranges, [0, 2], gap=70000) == (3, 9 * 70000)
    for name in LAYOUTS:
        assert reads(name, [3])[0] == (1 if LAYOUTS[name][1] else 3)


def test_layouts_without_meaning():
    layers = {0: LayerInfo(4, 2, 100)}
    with pytest.raises(UsageError, match="unknown layout"):
        lay_out("nonsense", layers)
    with pytest.raises(UsageError, match="needs an order"):
        lay_out("chain", layers)
    with pytest.raises(UsageError, match="once"):
        lay_out("chain", layers, {"chain": {0: [0, 1, 2, 2]}})


def test_layouts_change_reads_and_nothing_else(recorded):
    _, trace, _, _ = recorded
    found = {
        name: replay(trace, Setup("lru", resident=0.2), lay_out(name, trace.layers)).decode
        for name in ("stock", "coalesced")
    }
    assert found["stock"].misses == found["coalesced"].misses
    assert found["coalesced"].reads <= found["coalesced"].misses
    assert found["stock"].reads > 2.5 * found["coalesced"].reads
    plain = replay(trace, Setup("lru", resident=0.2)).decode
    assert plain.reads == plain.misses
    wanted = found["stock"].bytes
    assert plain.bytes <= wanted < 1.02 * plain.bytes


def test_bootstrap_ranges_hold_the_rate_and_see_a_difference():
    rng = np.random.default_rng(0)
    hits = rng.integers(60, 90, 128)
    rows = np.stack([hits, 100 - hits], axis=1)
    low, high = bootstrap(rows)
    assert low < hits.mean() / 100 < high
    better = np.stack([hits + 5, 95 - hits], axis=1)
    assert paired_bootstrap(better, rows) == pytest.approx((0.05, 0.05))
    assert bootstrap(np.zeros((0, 2))) == (1.0, 1.0)
