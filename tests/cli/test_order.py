"""A side-file in the order of a profile: written, read back, used, and without a wrong word."""

import json

import numpy as np
import pytest

import mbolt_mlx
from mbolt_mlx.cli import coalesce_rewrite
from mbolt_mlx.cli.main import main
from mbolt_mlx.profile.perms import make_perms, read_perms, tier_hints, write_perms
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace
from mbolt_mlx.resources import resource
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from tests.engine.kit import assert_same, ids, layers_of, load, prefill_then_decode


@pytest.fixture(scope="module")
def trace():
    """Of the tiny model: 2 layers of 8 experts, top 2."""
    rng = np.random.default_rng(0)
    layers = {n: LayerInfo(8, 2) for n in range(2)}
    weights = np.array([9, 1, 5, 1, 7, 1, 1, 0.01])
    chosen = lambda: rng.choice(8, 2, replace=False, p=weights / weights.sum())  # noqa: E731
    passes = [Pass("decode", {n: np.array([chosen()]) for n in layers}) for _ in range(60)]
    return make_trace(passes, layers)


@pytest.fixture(scope="module")
def perms(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("perms") / "perms.json"
    write_perms(path, make_perms(trace))
    return path


def written(model, perms, folder, *more):
    output = folder / "experts.safetensors"
    argv = [str(model), "-o", str(output), "--order", str(perms), "-q", *more]
    assert coalesce_rewrite.main(argv) == 0
    return output


@pytest.mark.parametrize("kind", ["chain", "clique", "heat"])
def test_blocks_lie_in_the_profiles_order_and_the_manifest_says_so(
    tiny_model_q4, perms, tmp_path, kind
):
    import jsonschema

    output = written(tiny_model_q4, perms, tmp_path, "--order-kind", kind)
    manifest = Manifest.read(manifest_path(output))
    profile = read_perms(perms)
    assert manifest.order == {"kind": kind, "profile_sha256": profile.sha256}
    for layer in manifest.layers:
        order = np.argsort(layer.offsets).tolist()
        assert order == profile.order(kind)[layer.layer]
        assert list(layer.heat) == profile.heat[layer.layer]
        assert list(layer.tier_hint) == tier_hints(layer.heat)
    schema = json.loads(resource("manifests/schemas/side-file.schema.json").read_text())
    jsonschema.validate(json.loads(manifest_path(output).read_text()), schema)
    checked = ["verify", "--model", str(tiny_model_q4), "--side-file", str(output), "--full"]
    assert main(checked) == 0


def test_without_an_order_it_is_kept_as_it_is(tiny_model_q4, perms, tmp_path, capsys):
    output = written(tiny_model_q4, perms, tmp_path)
    assert coalesce_rewrite.main([str(tiny_model_q4), "-o", str(output)]) == 0
    assert "already there" in capsys.readouterr().err
    assert Manifest.read(manifest_path(output)).order["kind"] == "chain"
    written(tiny_model_q4, perms, tmp_path, "--order-kind", "heat")
    assert Manifest.read(manifest_path(output)).order["kind"] == "heat"
    assert coalesce_rewrite.main([str(tiny_model_q4), "-o", str(output), "-q", "--force"]) == 0
    assert Manifest.read(manifest_path(output)).order["kind"] == "file"


def test_profile_reads_it_back(tiny_model_q4, perms, tmp_path, capsys):
    output = written(tiny_model_q4, perms, tmp_path)
    again = tmp_path / "again.json"
    assert main(["profile", str(output), "-o", str(again)]) == 0
    assert "order chain, heat of 2 layers" in capsys.readouterr().err
    a, b = read_perms(perms), read_perms(again)
    assert a.order("chain") == b.order("chain") and a.heat == b.heat
    assert a.order("heat") == b.order("heat")
    assert coalesce_rewrite.main([str(tiny_model_q4), "-o", str(tmp_path / "p.st"), "-q"]) == 0
    assert main(["profile", str(tmp_path / "p.st"), "-o", str(again)]) == 0
    assert read_perms(again).order("chain")[0] == list(range(8))


def test_the_engine_starts_with_the_hottest_and_says_the_same(tiny_model_q4, perms, tmp_path):
    output = written(tiny_model_q4, perms, tmp_path)
    seeded = load(tiny_model_q4, resident=0.5, side_file=output)
    heat = read_perms(perms).heat
    for layer in layers_of(seeded):
        hottest = sorted(range(8), key=lambda e: -heat[layer.slots.store.layer][e])[:4]
        assert set(layer.resident.residents()) == set(hottest)
    plain = load(tiny_model_q4, resident=0.5)
    assert all(not layer.resident.residents() for layer in layers_of(plain))
    work = ids(1, 1)
    assert_same(prefill_then_decode(seeded, work, 6), prefill_then_decode(plain, work, 6))
    whole = load(tiny_model_q4, resident=1.0, side_file=output)
    assert_same(prefill_then_decode(whole, work, 2), prefill_then_decode(plain, work, 2))
    assert mbolt_mlx.stats(seeded).decode.misses < mbolt_mlx.stats(plain).decode.misses


def test_a_replay_with_heat_begins_where_the_engine_does(tiny_model_q4, perms, tmp_path):
    from mbolt_mlx.engine.record import recorded
    from mbolt_mlx.profile.replay import Setup, replay
    from mbolt_mlx.profile.traces import read_trace

    output = written(tiny_model_q4, perms, tmp_path)
    for policy in ("lru", "decayed", "markov"):
        model = load(tiny_model_q4, resident=0.5, side_file=output, policy=policy)
        with recorded(model, tmp_path / "t"):
            prefill_then_decode(model, ids(1, 1), 12)
        ranges = {y.slots.store.layer: y.slots.store.runs for y in layers_of(model)}
        setup = Setup(policy, resident=0.5, heat=read_perms(perms).heat)
        counts = replay(read_trace(tmp_path / "t"), setup, ranges)
        theirs = mbolt_mlx.stats(model).decode
        assert (counts.decode.hits, counts.decode.reads) == (theirs.hits, theirs.reads)


def test_a_profile_of_another_model_is_refused(tiny_model_q4, tmp_path, capsys):
    layers = {n: LayerInfo(16, 2) for n in range(2)}
    other = make_trace([Pass("decode", {n: np.array([[0, 1]]) for n in layers})], layers)
    write_perms(tmp_path / "p.json", make_perms(other))
    argv = [str(tiny_model_q4), "-o", str(tmp_path / "x"), "--order", str(tmp_path / "p.json")]
    assert coalesce_rewrite.main(argv) == 2
    assert "another model" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_tiers_follow_heat():
    assert tier_hints([1, 50, 0, 30, 10, 9]) == [2, 0, 2, 1, 1, 2]
    assert tier_hints([0, 0]) == [2, 2]
    assert tier_hints([5, 5]) == [0, 1]
