"""simulate, trace-stats, cluster, probe and plan, as a user types them."""

import json
from pathlib import Path

import numpy as np
import pytest

from mbolt_mlx.cli import sim
from mbolt_mlx.cli.main import main
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace

QWEN = str(Path(__file__).resolve().parents[2] / "examples/traces/qwen3-30b-a3b.route.csv.xz")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Of the tiny model: 2 layers of 8 experts, top 2."""
    rng = np.random.default_rng(0)
    layers = {n: LayerInfo(8, 2) for n in range(2)}

    def chosen(tokens):
        return {n: np.stack([rng.permutation(8)[:2] for _ in range(tokens)]) for n in layers}

    passes = [Pass("prefill", chosen(9))] + [Pass("decode", chosen(1)) for _ in range(30)]
    path = tmp_path_factory.mktemp("trace") / "tiny.trace"
    write_trace(path, make_trace(passes, layers, model="tiny"))
    return str(path)


def told(capsys, *argv, status=0):
    assert main(list(argv)) == status
    return capsys.readouterr()


def test_simulate_gives_the_recorded_hit_rate(capsys):
    argv = ("simulate", "--trace", QWEN, "--policy", "lru", "--scope", "global")
    found = json.loads(told(capsys, *argv, "--budget", "4000MiB", "--json").out)
    assert found["decode_hits"] == 29597 and found["decode_misses"] == 7267
    assert round(100 * found["decode_hit_rate"], 1) == 80.3
    assert {"reads_per_token", "bytes_per_token", "ms_per_token"} <= set(found)
    low, high = found["decode_hit_rate_range"]
    assert low < found["decode_hit_rate"] < high


def test_simulate_in_words(capsys, trace):
    out = told(capsys, "simulate", "--trace", trace, "--resident", "0.5").out
    assert "decode hit rate" in out and "optimum (Belady)" in out and "reads a token" in out


def test_simulate_on_a_models_own_files(capsys, trace, tiny_model_q4):
    argv = ("simulate", "--trace", trace, "--model", str(tiny_model_q4), "--resident", "0.5")
    argv += ("--merge-gap", "0")  # the whole model lies within a few gaps
    found = {
        layout: json.loads(told(capsys, *argv, "--layout", layout, "--json").out)
        for layout in ("stock", "coalesced")
    }
    stock, coalesced = found["stock"], found["coalesced"]
    assert stock["decode_misses"] == coalesced["decode_misses"]
    assert stock["reads_per_token"] > coalesced["reads_per_token"]
    assert stock["ms_per_token"] > coalesced["ms_per_token"]


def test_cluster_then_simulate_in_its_order(capsys, trace, tmp_path, tiny_model_q4):
    perms = str(tmp_path / "perms.json")
    assert sim.main(["cluster", trace, "-o", perms]) == 0
    assert capsys.readouterr().err.startswith(f"mbolt-sim cluster: {perms}: ")
    assert "communities a layer" in told(capsys, "cluster", trace, "-o", perms).err
    argv = ("simulate", "--trace", trace, "--perms", perms, "--resident", "0.5", "--json")
    for more in ((), ("--model", str(tiny_model_q4))):
        for layout in ("coalesced+chain", "coalesced+heat", "coalesced+clique"):
            found = json.loads(told(capsys, *argv, *more, "--layout", layout, "--seed-heat").out)
            assert found["layout"] == layout
    told(capsys, *argv, "--layout", "chain")
    told(capsys, *argv, "--layout", "chain", "--model", str(tiny_model_q4), status=2)
    argv = ("simulate", "--trace", trace, "--resident", "0.5", "--model", str(tiny_model_q4))
    err = told(capsys, *argv, "--layout", "coalesced+chain", status=2).err
    assert "the layout coalesced+chain needs an order; give --perms" in err


def test_trace_stats(capsys, trace):
    found = json.loads(told(capsys, "trace-stats", trace, "--json").out)
    assert found["layers"] == 2 and found["decode_tokens"] == 30
    out = told(capsys, "trace-stats", trace, "--layers").out
    assert "working set" in out and "belady" in out and "hottest" in out


def test_probe_and_plan_with_its_drive(capsys, tmp_path, tiny_model_q4, trace, monkeypatch):
    from mbolt_mlx.profile import probe

    monkeypatch.setattr(probe, "FILE_BYTES", 64 << 20)
    (tmp_path / "data").mkdir()
    out = told(
        capsys, "probe", str(tmp_path / "data"), "--seconds", "0.5", "-o", str(tmp_path / "p.json")
    ).out
    assert "t_op" in out and "the engine's" in out
    assert list((tmp_path / "data").iterdir()) == []
    argv = ("plan", "--model", str(tiny_model_q4), "--drive", str(tmp_path / "p.json"))
    found = json.loads(told(capsys, *argv, "--trace", trace, "--json").out)
    document = json.loads((tmp_path / "p.json").read_text())
    assert found["drive"]["t_op_s"] == document["t_op_s"]
    assert {
        *("resident", "slots_per_layer", "memory_bytes", "dense_bytes", "slot_bytes"),
        *("hit_rate", "reads_per_token", "bytes_per_token", "tps_shards", "tps_side_file"),
    } <= set(found["rows"][0])
    assert found["verdict"] and "measured" in " ".join(found["assumed"])


def test_plan_in_words(capsys, tiny_model):
    out = told(capsys, "plan", "--model", str(tiny_model), "--memory", "2GB").out
    assert "<- fits" in out and "Assumed:" in out and "an Apple SSD's" in out
    assert [y.startswith("  100.0%") for y in out.splitlines()].count(True) == 1
    out = told(capsys, "plan", "--model", str(tiny_model), "--memory", "1MB").out
    assert "too little" in out


def test_plan_of_a_model_that_is_not_here(capsys, tiny_model, monkeypatch):
    from mbolt_mlx.storage import remote
    from mbolt_mlx.storage.checkpoint import Checkpoint

    asked = []

    def headers(repository, *, revision=None):
        asked.append((repository, revision))
        return Checkpoint.open(tiny_model)

    monkeypatch.setattr(remote, "open_remote", headers)
    found = json.loads(told(capsys, "plan", "--model", "org/name", "--json").out)
    assert asked == [("org/name", None)]
    assert found["model"]["name"] == "org/name"
    assert "nothing was downloaded" in " ".join(found["assumed"])
    told(capsys, "plan", "--model", "Qwen3-30B-A3B", "--json")
    assert asked[-1] == ("mlx-community/Qwen3-30B-A3B-4bit", None)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("simulate", "--trace", "absent", "--resident", "0.2"), "absent"),
        (("simulate", "--trace", QWEN), "--resident"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--budget", "1GB"), "not allowed"),
        (("simulate", "--trace", QWEN, "--resident", "20%"), "write 0.2"),
        (("simulate", "--trace", QWEN, "--budget", "1MB"), "too little memory"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--layout", "chain"), "--perms"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--seed-heat"), "--perms"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--merge-gap", "-1"), "--merge-gap"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--t-op", "-1"), "--t-op"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--pieces", "0"), "--pieces"),
        (("simulate", "--trace", QWEN, "--resident", "0.2", "--drive", QWEN), "not JSON"),
        (("cluster", QWEN, "-o", "x", "--train", "2"), "--train"),
        (("probe", "/absent"), "no such folder"),
        (("probe", "/tmp", "--seconds", "0"), "--seconds"),
        (("plan", "--model", "absent/"), "absent"),
        (("plan", "--model", "demo", "--compute-ms", "0"), "--compute-ms is in milliseconds"),
        (("plan", "--model", "demo", "--compute-ms", "1e-300"), "from 0.001 to 1e+07"),
        (("plan", "--model", "demo", "--compute-ms", "inf"), "--compute-ms is in milliseconds"),
        (("plan", "--model", "demo", "--compute-ms", "nan"), "--compute-ms is in milliseconds"),
        (("plan", "--model", "demo", "--context", str(10**23)), "--context is from 1 to"),
        (("plan", "--model", "demo", "--context", "0"), "--context is from 1 to"),
        (("plan", "--model", "demo", "--limit", "fast"), "--limit 'fast' is not a size"),
        (("plan", "--model", "demo", "--limit", "0"), "--limit '0' is no space"),
        (("plan", "--model", "demo", "--memory", "0"), "error: --memory '0' is no space"),
        (("plan", "--model", "demo", "--bandwidth", "0"), "--bandwidth '0' is no space"),
        (("simulate", "--trace", QWEN, "--budget", "0"), "error: --budget '0' is no space"),
        (("gate", "trace", QWEN, "-o", "x", "--budget", "0"), "error: --budget '0' is no space"),
        (
            ("simulate", "--trace", QWEN, "--resident", "1", "--expert-bytes", "0"),
            "--expert-bytes '0' is no space",
        ),
    ],
)
def test_what_has_no_meaning_is_one_line(capsys, argv, says):
    err = told(capsys, *argv, status=2).err
    assert says in err and len(err.strip().splitlines()) == 1


def test_a_trace_of_another_model(capsys, trace, tiny_model):
    err = told(
        capsys, "simulate", "--trace", QWEN, "--model", str(tiny_model), "--resident", "0.2",
        status=2,
    ).err  # fmt: skip
    assert "another model" in err


def test_the_first_implementations_names(capsys, trace):
    assert sim.main(["stats", trace]) == 0
    assert "working set" in capsys.readouterr().out
    assert sim.main(["drive", "/absent"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("cluster", "{trace}", "-o"),
        ("gate", "trace", "{trace}", "-o"),
        ("probe", "{folder}", "-o"),
        ("bench", "--model", "{model}", "--json"),
    ],
    ids=lambda argv: argv[0],
)
def test_a_file_that_is_no_report_is_never_replaced(capsys, trace, tiny_model, tmp_path, argv):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    argv = [a.format(trace=trace, folder=tmp_path, model=tiny_model) for a in argv]
    err = told(capsys, *argv, str(weights), status=2).err
    assert err.count("\n") == 1 and f"{weights}: another file is there already" in err
    assert weights.read_bytes() == b"weights" and len(list(tmp_path.iterdir())) == 1
    absent = str(tmp_path / "absent" / "out.json")
    assert "absent: no such folder" in told(capsys, *argv, absent, status=2).err


@pytest.mark.parametrize(
    ("option", "value"), [("--pieces", "1000000000"), ("--expert-bytes", "9" * 30)]
)
def test_numbers_beyond_any_model(capsys, trace, option, value):
    err = told(capsys, "simulate", "--trace", trace, "--resident", "0.5", option, value, status=2)
    assert f"{option} is at most" in err.err


def test_plan_names_the_trace_or_the_profile_of_another_model(capsys, trace, tmp_path):
    err = told(capsys, "plan", "--model", "demo", "--trace", trace, status=2).err
    assert f"{trace}: the trace is of another model: " in err
    perms = str(tmp_path / "p.json")
    told(capsys, "cluster", trace, "-o", perms)
    document = json.loads(Path(perms).read_text())
    document["layers"] = document["layers"][:1]
    Path(perms).write_text(json.dumps(document))
    argv = ("simulate", "--trace", trace, "--resident", "0.5", "--perms", perms)
    assert f"{perms}: the trace is of another model than this profile: it has a layer 1" in (
        told(capsys, *argv, status=2).err
    )


@pytest.mark.parametrize(
    ("infos", "says"),
    [
        ({0: LayerInfo(8, 4), 1: LayerInfo(8, 4)}, "layer 0 chose another number of experts a"),
        ({1: LayerInfo(8, 2)}, "lacks layer 0, which has experts in the model; record all layers"),
    ],
    ids=["top_k", "layers"],
)
@pytest.mark.parametrize("command", ["plan", "simulate", "gate", "trace-stats", "cluster"])
def test_a_trace_that_is_not_of_the_model(capsys, tiny_model, tmp_path, command, infos, says):
    path = str(tmp_path / "t")
    chosen = {n: np.arange(i.top_k)[None] for n, i in infos.items()}
    write_trace(path, make_trace([Pass("decode", chosen)] * 3, infos))
    named = ("--model", str(tiny_model))
    argv = {
        "plan": (*named, "--trace", path),
        "simulate": (*named, "--trace", path, "--resident", "0.5"),
        "gate": (str(tiny_model), path, "-o", str(tmp_path / "o")),
    }.get(command, (*named, path, *(("-o", str(tmp_path / "o")) if command == "cluster" else ())))
    err = told(capsys, command, *argv, status=2).err
    assert err.count("\n") == 1 and f"{path}: the trace" in err and says in err
    assert not (tmp_path / "o").exists()


@pytest.fixture
def prompts(tmp_path):
    """A trace of the tiny model in which nothing was decoded."""
    chosen = {n: np.array([[0, 1], [2, 3], [4, 5]]) for n in range(2)}
    infos = {n: LayerInfo(8, 2) for n in range(2)}
    write_trace(tmp_path / "prompts", make_trace([Pass("prefill", chosen)], infos))
    return str(tmp_path / "prompts")


def test_where_nothing_was_decoded_no_hit_rate_is_told(capsys, prompts, trace):
    simulate = ("simulate", "--trace", prompts, "--resident", "0.5")
    found = json.loads(told(capsys, *simulate, "--json").out)
    for name in ("decode_hit_rate", "decode_hit_rate_range", "belady_decode_hit_rate"):
        assert found[name] is None
    assert found["ms_per_token"] is None and found["prefill_hit_rate"] == 0.0
    out = told(capsys, *simulate).out.splitlines()
    assert ["decode", "hit", "rate", "-"] in [line.split() for line in out]
    assert "%" not in "".join(out) and "0 decode" in out[1]
    stats = json.loads(told(capsys, "trace-stats", prompts, "--json").out)
    assert {rate for y in stats["hit_rates"].values() for rate in y.values()} == {None}
    lines = told(capsys, "trace-stats", prompts).out.splitlines()
    assert ["belady", *"-" * len(stats["hit_rates"]["belady"])] == lines[-1].split()
    told_of = json.loads(
        told(capsys, "simulate", "--trace", trace, "--resident", "1", "--json").out
    )
    assert told_of["decode_hit_rate"] == 1.0


@pytest.mark.parametrize("command", ["plan", "hits", "layouts", "coactivation"])
def test_where_decoding_is_needed(capsys, prompts, tiny_model, tmp_path, command):
    argv = ("plot", command, prompts, "-o", str(tmp_path / "x.png"))
    if command == "plan":
        argv = ("plan", "--model", str(tiny_model), "--trace", prompts)
    err = told(capsys, *argv, status=2).err
    assert err.count("\n") == 1
    assert f"{prompts}: the trace has no decoded token; record one while the model" in err
    assert not (tmp_path / "x.png").exists()
