"""The scripts of examples/bench, as far as they can be checked without timing anything."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbolt_mlx.bench.plan import environment
from mbolt_mlx.core.errors import ReadError

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"
LIMITED = BENCH / "limited.sh"
linux = pytest.mark.skipif(sys.platform != "linux", reason="direct reads and control groups")


@pytest.fixture
def script(monkeypatch):
    """A function that imports a script of the folder."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["x"])
    return importlib.import_module


def test_made_model_runs_in_stock_mlx_lm(script, tmp_path):
    make_model = script("make_model")
    small = (64, 2, 2, 1, 32, 8, 2, 64)
    make_model.PRESETS["test"] = small
    options = {"preset": "test", "mode": "affine8", "emb_scale": 10.0, "vocab": 300}
    total = make_model.make(tmp_path / "a", **options, shard_bytes=100_000)
    make_model.make(tmp_path / "b", **options, shard_bytes=100_000)
    shards = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 1
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and set(index["weight_map"].values()) == {
        *shards
    }
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(tmp_path / "a"))
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert mlx_lm.generate(model, tokenizer, "abc", max_tokens=2) is not None


def test_limit_of_a_run(script):
    limit = script("limit")
    runs = [
        {"engine": "mlx-lm", "round": 0, "decode_tps": 10.0},
        {"engine": "mbolt", "round": 0, "decode_tps": 2.5, "decode_bytes_per_token": 60e6},
        {"engine": "mbolt", "round": 1, "decode_tps": 2.0, "decode_bytes_per_token": 60e6},
        {"engine": "mbolt", "round": 2, "error": "failed"},
    ]
    found = limit.ratios({"runs": runs, "drive": {"bytes_per_s": 200e6}})
    assert found["compute_s"] == 0.1 and found["read_s"]["median"] == pytest.approx(0.3)
    assert found["ratio"]["max"] == pytest.approx(1.0) and found["ratio"]["count"] == 2
    assert found["ratio"]["min"] == pytest.approx(0.8)


def test_ratio_of_pairs_skips_rounds_that_failed(script):
    common = script("common")
    runs = [
        {"engine": "mbolt", "round": 0, "decode_tps": 4.0},
        {"engine": "mlx-vlm", "round": 0, "decode_tps": 2.0},
        {"engine": "mbolt", "round": 1, "decode_tps": 9.0},
        {"engine": "mlx-vlm", "round": 1, "error": "x"},
    ]
    ratio = common.pair_ratio(runs, "decode_tps")
    assert ratio == {"median": 2.0, "min": 2.0, "max": 2.0, "count": 1}
    assert common.pair_ratio(runs[2:], "decode_tps") is None


def test_a_trace_is_of_other_tokens_than_the_runs(script, tiny_model, tmp_path):
    record = script("record")
    from mbolt_mlx.profile.traces import read_trace

    trace = read_trace(record.record(tiny_model, tmp_path / "t", 5, 7))
    # The last token of a prompt goes through by itself, as a decoded one does.
    assert (trace.tokens("prefill"), trace.tokens("decode")) == (4, 8)
    args = argparse.Namespace(model=tiny_model, prefill=5, decode=7)
    common = script("common")
    theirs = common.tokens.forced_tokens(12, common.tokens.vocabulary(tiny_model))
    assert record.held_out(args) != theirs and len(record.held_out(args)) == 12


def test_a_plan_beside_its_runs(script):
    check = script("plan_check")
    keys = {"memory_bytes": 105, "hit_rate": 0.5, "tps_side_file": 8.0, "tps_shards": 4.0}
    rows = [{"resident": r, **keys} for r in (0.2, 0.5)]
    rows.insert(1, {"resident": 0.2, "memory_limit": 1, **keys, "tps_shards": 99.0})
    faster = [{**row, "tps_shards": 12.0} for row in rows]
    plans = {"before": {"rows": rows}, "limited": {"rows": rows}, "compute_ms": 50.0}
    plans["after"] = {"rows": faster}
    runs = [
        {
            **{"setting": setting, "peak_rss_bytes": peak, "decode_hit_rate": 0.5, "cold": True},
            "decode_tps": 10.0,
        }
        for setting in range(5)
        for peak in (90, 100)
    ]
    found = check.compared(argparse.Namespace(resident=[0.2, 0.5]), "m", runs, plans)
    assert [(r["resident"], r["source"]) for r in found] == [
        *((0.2, "side_file"), (0.2, "shards"), (0.5, "side_file"), (0.5, "shards"))
    ]
    assert found[0]["tps_error"] == pytest.approx(-0.2)
    assert found[1]["tps_error"] == pytest.approx(-0.4)  # the mean of 250 and 83 ms
    assert found[1]["tps_error_limited"] == pytest.approx(-0.6)
    assert found[0]["memory_error"] == pytest.approx(0.05)  # against the highest peak
    assert found[0]["predicted_ms_per_token"] == 125 and found[0]["measured_ms_per_token"] == 100


def test_a_policy_beside_lru(script):
    speed = script("policy_speed")
    runs = []
    for n, tps in enumerate((10.0, 8.0)):
        for policy, factor in (("lru", 1.0), ("decayed", 1.25), ("markov", 1.0)):
            runs.append(
                {
                    **{"round": n, "policy": policy, "decode_tps": factor * tps, "cold": True},
                    **{"decode_hit_rate": 0.5, "decode_misses_per_token": 3.0},
                    "decode_bytes_per_token": 6e6 if policy == "decayed" else 8e6,
                }
            )
    costs = {"lru": 0.001, "decayed": 0.0015, "markov": 0.003}
    lru, decayed, markov = speed.compared(runs, 0.2, costs, 200e6)
    assert lru["ratio"]["median"] == markov["ratio"]["max"] == 1.0
    assert decayed["ratio"]["min"] == decayed["ratio"]["max"] == pytest.approx(1.25)
    assert decayed["reads_ms"] == pytest.approx(10) and markov["choosing_ms"] == pytest.approx(2)
    assert decayed["saved_ms"]["median"] == pytest.approx((20 + 25) / 2)


def test_what_a_trace_costs_is_of_blocks_that_were_recorded(script, tiny_model):
    cost = script("trace_cost")
    args = argparse.Namespace(prefill=4, decode=3, pairs=2, seconds=0.0)
    found = cost.cost(args, tiny_model, 0.5)
    assert found["recorded_tokens"] == 2 * 3 and len(found["pairs"]) == 2
    assert found["trace_bytes_per_token"] > 0 and found["alone_s_per_token"] > 0
    assert found["time"]["low"] <= found["time"]["ratio"] <= found["time"]["high"]


@pytest.mark.parametrize("direct", [False, True])
def test_the_path_of_a_miss_is_the_engines_own(script, tiny_model, tmp_path, monkeypatch, direct):
    import mbolt_mlx
    from mbolt_mlx.core import aio, files
    from mbolt_mlx.engine.runtime import engine_of
    from tests.engine.kit import make_side_file

    path = script("miss_path")
    monkeypatch.setattr(files, "pread_into", files.pread_into)  # put back in the end
    monkeypatch.setattr(aio, "_CALLS", aio._CALLS)
    clock = path.ReadClock()
    side_file = make_side_file(tiny_model, tmp_path / "s")
    try:
        model, _ = mbolt_mlx.load(tiny_model, resident=0.25, side_file=side_file, direct=direct)
    except ReadError:
        pytest.skip("the file system has no direct reads")
    chosen = path.record(model, 5)
    engine = engine_of(model)
    layers = {layer.slots.store.layer: layer for _, layer, _ in engine._layers}
    assert len(chosen) == 5 * len(layers)
    counts = engine._fetcher.counts
    before = counts.reads
    with clock.running() as reading:
        _, missed = path.bring_in(layers, chosen)
    done = counts.reads - before
    assert missed > 0 and done > 0
    if engine._fetcher._reader._spare:
        assert len(reading) >= 2  # one call to start, one to wait
    elif not direct:
        assert len(reading) == done
    assert all(seconds >= 0 for seconds in reading)
    timed = len(reading)
    path.bring_in(layers, chosen)
    assert len(reading) == timed


def test_limits_as_a_command(script):
    common = script("common")
    limits = common.Limits("1300M", read_mbps=400)
    assert limits.name == "400mbps" and common.Limits().name == "bare"
    assert limits.prefix("/m")[1:] == [
        *("--memory", "1300M", "--read-mbps", "400", "--readahead-kib", "128"),
        *("--path", "/m", "--"),
    ]


def test_rival_gets_as_many_bytes_as_our_slots(script, tiny_model, tmp_path):
    common = script("common")
    model = tmp_path / "m"
    model.symlink_to(tiny_model)
    offload = tmp_path / "m-mlxvlm"
    offload.mkdir()
    (offload / "offload_index.json").write_text("{}")
    job = common.Job("mbolt", str(model), [1], [2], resident=0.3)
    theirs = common.rival(job, Path("python"))
    assert theirs.options == {"offload": str(offload), "share": 2 / 8}
    assert theirs.drop == [str(offload)] and theirs.prompt == job.prompt


@linux
def test_probe_counts_reads_and_bytes(tiny_model_q4, tmp_path):
    def probe(*arguments):
        done = subprocess.run(
            [sys.executable, str(BENCH / "probe.py"), *map(str, arguments), "--seconds", "0.1"],
            capture_output=True,
            text=True,
        )
        if "no direct reads" in done.stderr:
            pytest.skip("the file system has no direct reads")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = probe("misses", tiny_model_q4, "--misses", 2)
    assert found["reads_per_miss"] == 9 and found["misses"] >= 2
    big = tmp_path / "big"
    big.write_bytes(os.urandom(9 << 20))
    found = probe("rate", big, "--bytes", 1 << 20)
    assert found["bytes_per_s"] > 0


@linux
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--memory", "12X", "--", "true"], "600M"),
        (["--read-mbps", "fast", "--", "true"], "whole number"),
        (["--wrong", "--", "true"], "unknown option"),
        (["--memory", "1G"], "no command"),
    ],
)
def test_limited_refuses_nonsense(arguments, said):
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    done = subprocess.run([str(LIMITED), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


@linux
def test_every_script_explains_itself():
    scripts = [p for p in BENCH.glob("*.py") if p.name not in ("common.py", "sparse.py")]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    running = [subprocess.Popen([sys.executable, str(p), "--help"], **options) for p in scripts]
    for path, process in zip(scripts, running, strict=True):
        out, _ = process.communicate()
        assert process.returncode == 0 and len(out) > 200, path.name
