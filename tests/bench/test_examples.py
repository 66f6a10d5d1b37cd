"""The scripts of examples/bench, as far as they can be checked without timing anything."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbolt_mlx.bench.plan import environment

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
