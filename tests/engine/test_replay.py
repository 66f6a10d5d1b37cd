"""A replay counts exactly what the engine counts: hits, misses, evictions, reads and bytes."""

from __future__ import annotations

import mlx_lm
import pytest

import mbolt_mlx
from mbolt_mlx.core.residency import POLICIES
from mbolt_mlx.engine.record import recorded
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import read_trace
from tests.engine.kit import (
    assert_same,
    ids,
    layers_of,
    load,
    make_side_file,
    prefill_then_decode,
)
from tests.makers import make_model

E, K = 32, 4


@pytest.fixture(scope="module")
def model_dir(models_dir):
    return make_model(
        models_dir / "replayed", layers=3, experts=E, top_k=K, mode="affine4", hidden=128, width=256
    )


@pytest.fixture(scope="module")
def side_file(model_dir, tmp_path_factory):
    return make_side_file(model_dir, tmp_path_factory.mktemp("side") / "experts.safetensors")


@pytest.mark.parametrize("source", ["shards", "side-file"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resident", [0.125, 0.3, 0.6, 1.0])
def test_replay_equals_the_engine(model_dir, side_file, tmp_path, source, policy, resident):
    model = load(
        model_dir,
        resident=resident,
        policy=policy,
        side_file=side_file if source == "side-file" else None,
    )
    with recorded(model, tmp_path / "t"):
        prefill_then_decode(model, ids(1, 40, seed=3), 30)
    trace = read_trace(tmp_path / "t")
    stats = mbolt_mlx.stats(model)
    ranges = {y.slots.store.layer: y.slots.store.runs for y in layers_of(model)}
    counts = replay(trace, Setup(policy, slots=stats.slots), ranges)
    for phase in ("prefill", "decode"):
        ours, theirs = getattr(counts, phase), getattr(stats, phase)
        for name in ("tokens", "hits", "misses", "evictions", "reads", "bytes"):
            assert getattr(ours, name) == getattr(theirs, name), (phase, name)
    assert (stats.decode.misses > 0) == (resident < 1)


def test_and_over_several_conversations_and_a_batch(model_dir, side_file, tmp_path):
    model = load(model_dir, resident=0.3, side_file=side_file)
    with recorded(model, tmp_path / "t"):
        for seed in range(3):
            prefill_then_decode(model, ids(1, 20, seed=seed), 8)
        prefill_then_decode(model, ids(2, 9, seed=9), 5)
    trace = read_trace(tmp_path / "t")
    assert trace.sessions == 4
    assert trace.tokens("prefill") == 3 * 20 + 18 and trace.tokens("decode") == 3 * 8 + 10
    stats = mbolt_mlx.stats(model)
    ranges = {y.slots.store.layer: y.slots.store.runs for y in layers_of(model)}
    counts = replay(trace, Setup(slots=stats.slots), ranges)
    for name in ("hits", "misses", "evictions", "reads", "bytes"):
        for phase in ("prefill", "decode"):
            ours, theirs = getattr(counts, phase), getattr(stats, phase)
            assert getattr(ours, name) == getattr(theirs, name), (phase, name)


def test_layers_that_fit_whole_are_recorded_too(model_dir, tmp_path):
    model = load(model_dir, resident=1.0)
    with recorded(model, tmp_path / "t", name="m"):
        prefill_then_decode(model, ids(1, 5), 3)
    prefill_then_decode(model, ids(1, 5), 3)
    trace = read_trace(tmp_path / "t")
    assert trace.model == "m" and len(trace.layers) == 3
    assert [p.tokens for p in trace.passes] == [5, 1, 1, 1]
    assert all(list(p.chosen) == list(trace.layers) for p in trace.passes)


def test_recording_changes_no_logit(model_dir, tmp_path):
    model = load(model_dir, resident=0.3)
    with recorded(model, tmp_path / "t"):
        noted = prefill_then_decode(model, ids(1, 12), 4)
    assert_same(prefill_then_decode(model, ids(1, 12), 4), noted)


def test_a_new_conversation_renews_the_policy_and_a_chunk_of_it_does_not(model_dir, monkeypatch):
    model = load(model_dir, resident=0.3)
    renewed = []
    policy = type(layers_of(model)[0].resident.policy)
    monkeypatch.setattr(policy, "renew", lambda self: renewed.append(self))
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    for length in (6, 6, 1, 1, 4):
        model(ids(1, length), cache=cache)
    assert len(renewed) == 3
