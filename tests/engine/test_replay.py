"""A replay counts exactly what the engine counts: hits, misses, evictions, reads and bytes."""

from __future__ import annotations

import numpy as np
import pytest

import mbolt_mlx
from mbolt_mlx.core.residency import POLICIES
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace
from tests.engine.kit import ids, layers_of, load, make_side_file, prefill_then_decode
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


def recorded(monkeypatch, model, work):
    """The trace of what ``work`` makes the model choose."""
    calls = []
    forward = OffloadedLayer.forward

    def noting(layer, compute, x, indices):
        chosen = np.array(indices)
        calls.append((layer.slots.store.layer, chosen.reshape(-1, chosen.shape[-1])))
        return forward(layer, compute, x, indices)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadedLayer, "forward", noting)
        work()
    infos = {
        y.slots.store.layer: LayerInfo(E, K, y.slots.store.expert_bytes) for y in layers_of(model)
    }
    passes, last = [], None
    for layer, rows in calls:
        if last is None or layer <= last:
            passes.append({})
        passes[-1][layer] = rows
        last = layer
    return make_trace(
        [Pass("prefill" if len(next(iter(p.values()))) > 2 else "decode", p) for p in passes], infos
    )


@pytest.mark.parametrize("source", ["shards", "side-file"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resident", [0.125, 0.3, 0.6])
def test_replay_equals_the_engine(model_dir, side_file, monkeypatch, source, policy, resident):
    model = load(
        model_dir,
        resident=resident,
        policy=policy,
        side_file=side_file if source == "side-file" else None,
    )
    trace = recorded(monkeypatch, model, lambda: prefill_then_decode(model, ids(1, 40, seed=3), 30))
    stats = mbolt_mlx.stats(model)
    ranges = {y.slots.store.layer: y.slots.store.runs for y in layers_of(model)}
    counts = replay(trace, Setup(policy, slots=stats.slots), ranges)
    for phase in ("prefill", "decode"):
        ours, theirs = getattr(counts, phase), getattr(stats, phase)
        for name in ("tokens", "hits", "misses", "evictions", "reads", "bytes"):
            assert getattr(ours, name) == getattr(theirs, name), (phase, name)
    assert stats.decode.misses > 0


def test_and_over_several_prompts_and_a_batch(model_dir, side_file, monkeypatch):
    model = load(model_dir, resident=0.3, side_file=side_file)

    def work():
        for seed in range(3):
            prefill_then_decode(model, ids(1, 20, seed=seed), 8)
        prefill_then_decode(model, ids(2, 9, seed=9), 5)

    trace = recorded(monkeypatch, model, work)
    stats = mbolt_mlx.stats(model)
    ranges = {y.slots.store.layer: y.slots.store.runs for y in layers_of(model)}
    counts = replay(trace, Setup(slots=stats.slots), ranges)
    for name in ("hits", "misses", "evictions", "reads", "bytes"):
        ours = getattr(counts.prefill, name) + getattr(counts.decode, name)
        assert ours == getattr(stats.prefill, name) + getattr(stats.decode, name), name
