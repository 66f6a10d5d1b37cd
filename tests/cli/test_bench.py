import json
import sys

import jsonschema
import pytest

from mbolt_mlx.bench import cold
from mbolt_mlx.cli.main import main
from mbolt_mlx.resources import resource

PREFILL, DECODE, LAYERS, TOP_K, EXPERTS = 12, 6, 2, 2, 8


def bench(model, *options):
    common = ["--prefill", str(PREFILL), "--decode", str(DECODE), "--runs", "1"]
    return main(["bench", "--model", str(model), *common, *options])


@pytest.fixture(scope="module")
def side_file(tiny_model_q4, tmp_path_factory):
    path = tmp_path_factory.mktemp("side") / "experts.safetensors"
    assert main(["coalesce", "--model", str(tiny_model_q4), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def measured(tiny_model_q4, side_file, tmp_path_factory):
    """Every setting once: stock, then 0.25 with and without the side-file."""
    out = tmp_path_factory.mktemp("bench") / "out.json"
    options = ["--resident", "0.25", "--side-file", str(side_file), "--no-side-file"]
    status = bench(tiny_model_q4, *options, "--baseline", "--policy", "lru", "--json", str(out))
    assert status == 0
    return json.loads(out.read_text())


def test_output_fits_the_schema(measured):
    schema = json.loads(resource("manifests/schemas/bench.schema.json").read_text())
    jsonschema.validate(measured, schema)
    assert measured["settings"]["prefill"] == PREFILL
    assert [(r["engine"], r["resident"], bool(r["side_file"])) for r in measured["runs"]] == [
        ("mlx-lm", 1.0, False),
        ("mbolt", 0.25, True),
        ("mbolt", 0.25, False),
    ]


def test_every_setting_gives_the_bytes_of_stock(measured):
    assert len({r["logits_sha256"] for r in measured["runs"]}) == 1
    assert {entry["logits"] for entry in measured["summary"]} == {"same"}


def test_counts_agree_with_each_other(measured):
    stock, side, shards = measured["runs"]
    expert = side["expert_bytes"] // (LAYERS * EXPERTS)
    assert side["slot_bytes"] == LAYERS * TOP_K * expert
    assert side["dense_bytes"] == stock["dense_bytes"] > 0
    for run in (side, shards):
        assert run["policy"] == "lru"
        assert run["decode_hits"] + run["decode_misses"] == DECODE * LAYERS * TOP_K
        assert run["decode_misses"] > 0 and run["prefill_misses"] > 0
        assert run["decode_misses_per_token"] == pytest.approx(run["decode_misses"] / DECODE)
        assert run["decode_hit_rate"] == pytest.approx(
            run["decode_hits"] / (DECODE * LAYERS * TOP_K)
        )
        assert run["decode_bytes_per_token"] >= run["decode_misses_per_token"] * expert
        assert run["read_wait_s_per_token"] >= 0 and run["readback_wait_s_per_token"] > 0
    assert side["decode_misses"] == shards["decode_misses"]
    assert 0 < side["decode_reads"] <= side["decode_misses"]
    # Pieces that lie close together are merged, which in so small a model they do.
    assert 0 < shards["decode_reads"] <= 9 * shards["decode_misses"]
    assert stock["decode_misses_per_token"] == stock["decode_bytes_per_token"] == 0


def test_machine_and_versions_are_there(measured, tiny_model_q4):
    machine = measured["machine"]
    assert str(tiny_model_q4) in machine["drives"] and machine["cores"] >= 1
    assert all(r["peak_rss_bytes"] >= r["import_rss_bytes"] > 0 for r in measured["runs"])


def test_table_and_json_on_stdout(tiny_model, capsys):
    assert bench(tiny_model, "--resident", "1.0", "--no-side-file", "--json", "-") == 0
    captured = capsys.readouterr()
    (run,) = json.loads(captured.out)["runs"]
    assert (run["engine"], run["resident"], run["decode_misses"]) == ("mbolt", 1.0, 0)
    assert "decode tok/s" in captured.err and "run 1 of 1" in captured.err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what the drive reads")
def test_cold_is_proven_or_the_command_fails(tiny_model, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--resident", "0.25", "--no-side-file", "--cold", "--json", str(out)]
    status = bench(tiny_model, *options)
    (run,) = json.loads(out.read_text())["runs"]
    if "error" in run:
        pytest.skip(f"no direct reads here: {run['error']}")
    enough = all(
        run[f"drive_read_bytes_{phase}"] >= cold.NEEDED * run[f"{phase}_bytes"]
        for phase in ("prefill", "decode")
    )
    assert run["cold_asked"] and run["cold"] == enough
    assert status == (0 if enough else 1)
    assert ("is not cold" in capsys.readouterr().err) == (not enough)


def test_dropping_all_caches_is_for_cold_runs(tiny_model, capsys):
    assert bench(tiny_model, "--drop-all-caches") == 2
    assert "--drop-all-caches needs --cold" in capsys.readouterr().err


def test_a_warm_run_that_was_asked_to_be_cold_fails(tiny_model, monkeypatch, capsys):
    from mbolt_mlx.bench import plan

    warm = {"engine": "mbolt", "resident": 0.25, "side_file": None, "policy": "lru", "cold": False}
    warm |= {"cold_asked": True, "cold_reason": "in decode the drive read 0.10", "decode_tps": 1.0}
    monkeypatch.setattr(plan, "run_job", lambda job: dict(warm))
    assert bench(tiny_model, "--resident", "0.25", "--cold", "--runs", "3") == 1
    err = capsys.readouterr().err
    assert err.count("not cold: in decode the drive read 0.10 (and 2 more of mbolt)") == 1
    assert err.count("is not cold") == 1


@pytest.mark.parametrize(
    "options, direct",
    [([], None), (["--cold"], True), (["--cold", "--no-direct"], False), (["--direct"], True)],
)
def test_cold_reads_past_the_page_cache(tiny_model, monkeypatch, options, direct):
    from mbolt_mlx.bench import plan

    asked = []

    def note(job):
        asked.append(job.direct)
        return plan.failed(job, "not run")

    monkeypatch.setattr(plan, "run_job", note)
    assert bench(tiny_model, "--resident", "0.25", *options) == 1
    assert asked == [direct]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--resident", "0"], "fraction"),
        (["--resident", "20%"], "0.2"),
        (["--runs", "0"], "--runs is at least 1"),
        (["--decode", "-1"], "--decode is at least 1"),
        (["--side-file", "/nonexistent"], "no such side-file"),
        (["--zipf", "-1"], "zipf"),
    ],
)
def test_nonsense_is_one_line(tiny_model, options, said, capsys):
    assert bench(tiny_model, *options) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_a_run_that_fails_is_reported(tmp_path, tiny_model, capsys):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    for shard in broken.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    assert bench(broken, "--resident", "0.25") == 1
    err = capsys.readouterr().err
    assert "failed: CheckpointError" in err and "Traceback" not in err
