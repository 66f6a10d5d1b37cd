"""Plans: the arithmetic, and the words that follow from it."""

import numpy as np
import pytest

from mbolt_mlx.core.budget import Geometry, LayerShape, slot_bytes
from mbolt_mlx.core.errors import TraceError
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.perms import make_perms
from mbolt_mlx.profile.plan import (
    LAUNCH_S,
    MISS_S,
    READBACK_S,
    Assumptions,
    Model,
    curve_hit_rate,
    make_plan,
    speed,
)
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace

MB = 10**6


def model(layers=4, experts=64, top_k=4, nbytes=2 * MB, vocabulary=0):
    shapes = {n: LayerShape(experts, top_k, nbytes) for n in range(layers)}
    total = layers * experts * nbytes
    return Model("m", shapes, 9, 100 * MB, total + 65536, Geometry(1000, 1000, 64, vocabulary))


def assume(law=None, **kwargs):
    law = law or Law(1e-4, 1e9)
    return Assumptions(law=lambda depth: law, compute_s=0.01, context=1024, **kwargs)


def routed(layers=4, experts=64, top_k=4, tokens=60):
    rng = np.random.default_rng(0)
    passes = []
    for _ in range(tokens):
        chosen = {}
        for n in range(layers):
            ids = list(dict.fromkeys((rng.zipf(1.3, 400) % experts).tolist()))[:top_k]
            chosen[n] = np.array([ids])
        passes.append(Pass("decode", chosen))
    return make_trace(passes, {n: LayerInfo(experts, top_k) for n in range(layers)})


def test_the_curve_goes_through_its_points():
    for resident, hit in ((0, 0), (0.05, 0.34), (0.2, 0.74), (0.45, 0.93), (1, 1)):
        assert curve_hit_rate(resident) == pytest.approx(hit)


def test_a_row_by_hand():
    found = make_plan(model(), assume(), residents=[0.2])
    (row,) = found["rows"]
    slots = 13
    hit = curve_hit_rate(slots / 64)
    misses = 4 * 4 * (1 - hit)
    assert row["slots_per_layer"] == slots
    assert row["hit_rate"] == pytest.approx(hit, abs=1e-4)
    assert row["reads_per_token"] == pytest.approx(misses, abs=1e-3)
    assert row["bytes_per_token"] == pytest.approx(misses * 2 * MB, rel=1e-6)
    assert row["slot_bytes"] == 4 * slots * 2 * MB
    # A token goes through 100 MB and 4 x 4 experts; a quarter ms a layer waits for the choice.
    experts = 0.01 * 32 / 132
    assert row["compute_s"] == pytest.approx(0.01 + 4 * READBACK_S)
    own, none = experts / 4, hit**4
    for name, reads in (("tps_shards", 9), ("tps_side_file", 1)):
        reading = misses * (reads * 1e-4 + 2 * MB / 1e9)
        longest = reading + 4 * (1 - none) * own / 4  # 2 ms a read, and more than own
        seconds = 0.01 - experts + 4 * READBACK_S + misses * MISS_S + 4 * none * own + longest
        assert row[name] == pytest.approx(1 / seconds, abs=1e-3)
    assert set(row) >= {"resident", "memory_bytes", "dense_bytes"}


def test_all_in_memory_is_what_was_measured():
    (row,) = make_plan(model(), assume(), residents=[1.0])["rows"]
    assert row["tps_shards"] == row["tps_side_file"] == pytest.approx(100)
    assert row["hit_rate"] == 1.0 and row["compute_s"] == 0.01


def test_a_limit_on_the_drive_is_kept_and_said():
    free = make_plan(model(), assume(), residents=[0.2])["rows"][0]
    found = make_plan(model(), assume(limit=50 * MB), residents=[0.2])
    (row,) = found["rows"]
    assert row["tps_side_file"] < free["tps_side_file"]
    assert row["tps_side_file"] == pytest.approx(50 * MB / row["bytes_per_token"], rel=1e-3)
    assert "held to 50.0 MB/s" in " ".join(found["assumed"])


def test_memory_is_the_engines_budget():
    few, many = make_plan(model(), assume(), residents=[0.1, 0.5])["rows"]
    shapes = list(model().layers.values())
    grown = slot_bytes(shapes, [32] * 4) - slot_bytes(shapes, [6] * 4)
    assert many["memory_bytes"] - few["memory_bytes"] == grown
    longer = make_plan(model(), Assumptions(context=4096), residents=[0.1])["rows"][0]
    shorter = make_plan(model(), Assumptions(context=1024), residents=[0.1])["rows"][0]
    geometry = model().geometry
    assert longer["memory_bytes"] - shorter["memory_bytes"] == 3072 * geometry.kv_bytes + (
        geometry.transient(512, 4096) - geometry.transient(512, 1024)
    )


def test_memory_gets_a_row_of_its_own_that_keeps_within_it():
    found = make_plan(model(), assume(), memory=600 * MB, residents=[0.2])
    (fits,) = [row for row in found["rows"] if "memory_limit" in row]
    # The loader keeps 100 MB of working space free, of which a plan expects less to be used.
    assert 510 * MB < fits["memory_bytes"] <= 600 * MB
    assert "600.0 MB have room for" in found["verdict"]


def test_memory_knows_of_a_large_tokenizer():
    small, large = (
        make_plan(model(vocabulary=n), assume(), memory=700 * MB, residents=[0.1])["rows"]
        for n in (0, 150_000)
    )
    assert large[0]["memory_bytes"] - small[0]["memory_bytes"] > 150 * MB
    # Its bytes are taken from the slots of a limit.
    assert large[1]["slot_bytes"] <= small[1]["slot_bytes"] - 150 * MB
    assert all(row["memory_bytes"] <= 700 * MB for row in (small[1], large[1]))


@pytest.mark.parametrize("vocabulary", [0, 150_000])
def test_the_slots_of_a_limit_are_the_loaders(vocabulary):
    from mbolt_mlx.core import budget
    from mbolt_mlx.engine.load import _slots
    from mbolt_mlx.profile.plan import PROCESS_BEFORE

    one = model(layers=5, experts=60, vocabulary=vocabulary)
    for limit in (700 * MB, 800 * MB, 900 * MB):
        used = PROCESS_BEFORE + one.dense_bytes
        theirs = _slots(list(one.layers.values()), None, limit, used, one.geometry)
        found = make_plan(one, Assumptions(), memory=limit, residents=[])
        assert found["rows"][0]["slots_per_layer"] == pytest.approx(sum(theirs) / 5, abs=0.01)
        assert found["rows"][0]["slot_bytes"] == budget.slot_bytes(
            list(one.layers.values()), theirs
        )


def test_too_little_memory_is_said_with_the_least():
    found = make_plan(model(), assume(), memory=300 * MB)
    least = found["model"]["least_memory_bytes"]
    assert "too little" in found["verdict"] and least > 300 * MB
    assert "have room for" in make_plan(model(), assume(), memory=least)["verdict"]


def test_the_verdict_on_coalescing_follows_the_drive():
    slow = make_plan(model(), assume(Law(1e-3, 1e9)))["verdict"]
    assert "coalescing pays" in slow
    fast = make_plan(model(), assume(Law(1e-7, 1e8)))["verdict"]
    assert "hardly pays" in fast
    whole = make_plan(model(), assume(), memory=10**12, residents=[1.0])["verdict"]
    assert "gains nothing" in whole


def test_one_tokens_working_set_is_named():
    found = make_plan(model(experts=16), assume(), residents=[0.05])
    assert "one token's working set" in found["verdict"]


def test_disk_that_is_lacking_is_named():
    found = make_plan(model(), assume(Law(1e-3, 1e9)), free_bytes=5 * MB)
    assert "only 5.00 MB are free" in found["verdict"]


def test_a_trace_gives_the_hit_rates():
    trace = routed()
    found = make_plan(model(), assume(), residents=[0.2], trace=trace)
    row = found["rows"][0]
    decode = replay(trace, Setup(resident=0.2)).decode
    assert row["hit_rate"] == pytest.approx(decode.hit_rate, abs=1e-4)
    assert row["reads_per_token"] == pytest.approx(decode.per_token("misses"), abs=1e-3)
    assert row["bytes_per_token"] == pytest.approx(decode.per_token("misses") * 2 * MB)
    assert "needs a trace and a profile" in found["verdict"]


def test_a_profile_order_is_weighed():
    trace = routed()
    found = make_plan(model(), assume(), residents=[0.2], trace=trace, perms=make_perms(trace))
    row = found["rows"][0]
    assert row["reads_per_token_chain"] <= row["reads_per_token_ids"] <= row["reads_per_token"]
    assert row["tps_chain"] >= row["tps_side_file"]
    assert "a profile order" in found["verdict"]


def test_a_trace_of_another_model_is_refused():
    with pytest.raises(TraceError, match="another model"):
        make_plan(model(layers=2), trace=routed())


def test_what_is_assumed_is_said():
    text = " ".join(make_plan(model(), assume(notes=("drive: mine",)))["assumed"])
    assert "drive: mine" in text and "Qwen3-235B" in text and "compute:" not in text
    assert "time:" in text and "held to" not in text
    assert "compute:" in " ".join(make_plan(model())["assumed"])


@pytest.mark.parametrize("nbytes", [100, 2 * MB])
def test_computing_that_was_not_measured_takes_time_to_start_each_layer(nbytes):
    one = model(layers=5, nbytes=nbytes)
    law = Law(1e-4, 1e9)
    for resident in (0.2, 1.0):
        guess = Assumptions(law=lambda depth: law, context=1024)
        (row,) = make_plan(one, guess, residents=[resident])["rows"]
        touched = (one.dense_bytes + one.token_bytes) / guess.memory_rate
        waits = 5 * READBACK_S if resident < 1 else 0.0
        assert row["compute_s"] == pytest.approx(touched + 5 * LAUNCH_S + waits)
        assert row["tps_side_file"] <= 1 / (5 * LAUNCH_S)
    said = " ".join(make_plan(one, guess)["assumed"])
    assert "0.1 ms a layer to start its kernels" in said
    assert "kernels" not in " ".join(make_plan(one, assume())["assumed"])


def test_speeds_are_never_powers_of_ten():
    assert [speed(x) for x in (0.01234, 9.876, 123.4, 999.6, 31999.0)] == [
        *("0.0123", "9.88", "123", "1000", "31999")
    ]
