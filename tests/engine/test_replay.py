"""A replay counts exactly what the engine counts: hits, misses, evictions, reads and bytes."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import mbolt_mlx
from mbolt_mlx.core.residency import POLICIES
from mbolt_mlx.engine.record import _Waiting, recorded
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


def test_what_is_recorded_does_not_depend_on_how_much_is_in_memory(model_dir, tmp_path):
    """At 1.0 choices are noted without a readback, some forwards late; none may be lost."""
    traces = []
    for resident in (1.0, 0.3):
        model = load(model_dir, resident=resident)
        with recorded(model, tmp_path / f"{resident}"):
            for seed in (1, 2):
                prefill_then_decode(model, ids(1, 9, seed=seed), 5)
            prefill_then_decode(model, ids(3, 4, seed=3), 2)
        traces.append(read_trace(tmp_path / f"{resident}"))
        assert mbolt_mlx.stats(model).prefill.readbacks == (0 if resident == 1.0 else 3 * 3)
    whole, part = traces
    assert whole.sessions == part.sessions == 3 and len(whole.passes) == len(part.passes) == 15
    for a, b in zip(whole.passes, part.passes, strict=True):
        assert (a.phase, a.session, list(a.chosen)) == (b.phase, b.session, list(b.chosen))
        for layer in a.chosen:
            assert np.array_equal(a.chosen[layer], b.chosen[layer])


def test_what_waits_is_passed_on_in_order(tmp_path):
    class Notes:
        def __init__(self):
            self.seen = []

        def record(self, phase, layer, ids):
            self.seen.append((phase, layer, ids.tolist()))

        def new_session(self):
            self.seen.append("new")

    notes = Notes()
    waiting = _Waiting(notes)
    lazy = lambda n: mx.array([[[n, n + 1]]])  # noqa: E731
    for forward in range(3):
        waiting.note("decode", 0, lazy(forward))
        waiting.note("decode", 2, lazy(10 + forward))
    assert notes.seen == [("decode", 0, [[0, 1]]), ("decode", 2, [[10, 11]])]
    waiting.note("decode", 3, np.array([[5, 6]]))  # read back, so all before it is there
    assert [entry[1] for entry in notes.seen] == [0, 2, 0, 2, 0, 2, 3]
    waiting.note("prefill", 0, lazy(7))
    waiting.new_session()
    assert notes.seen[-2:] == [("prefill", 0, [[7, 8]]), "new"]
    waiting.note("prefill", 0, lazy(8))
    waiting.note("prefill", 0, lazy(9))
    waiting.write(keep=1)
    assert notes.seen[-1] == ("prefill", 0, [[8, 9]])


def test_a_failure_leaves_what_came_before_it(model_dir, tmp_path):
    model = load(model_dir, resident=1.0)
    with pytest.raises(KeyboardInterrupt), recorded(model, tmp_path / "t"):
        prefill_then_decode(model, ids(1, 5), 3)
        raise KeyboardInterrupt
    assert [p.tokens for p in read_trace(tmp_path / "t").passes] == [5, 1, 1]


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
