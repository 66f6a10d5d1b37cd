"""Memory: the experts are never loaded whole, and a limit holds whatever comes."""

from __future__ import annotations

import hashlib
import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mbolt_mlx
from mbolt_mlx.core import memory
from mbolt_mlx.core.errors import MemoryLimitError
from tests.engine.kit import assert_same, ids, layers_of, load, prefill_then_decode, run_python
from tests.makers import make_model

SHAPE = dict(layers=3, experts=16, top_k=4)
BIG = dict(layers=2, experts=48, top_k=2, hidden=512, width=512)  # 302 MB of experts
MB = 10**6

PROLOGUE = """
import hashlib, json, sys
import mlx.core as mx, mlx_lm, mbolt_mlx, numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mbolt_mlx.core import memory
from mbolt_mlx.engine import load as _

def peak():
    # Of this process since its program began; ru_maxrss would count the parent's before that.
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
path, at_start = sys.argv[1], memory.process_rss()
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("big") / "model", **BIG)
    mx.clear_cache()
    yield path
    shutil.rmtree(path)


def child(code: str, path, *args) -> dict:
    return json.loads(run_python(PROLOGUE + code, str(path), *map(str, args)).splitlines()[-1])


LOADED = """
model, _ = mbolt_mlx.load(path, resident=0.2, side_file=None)
stats = mbolt_mlx.stats(model)
needed = stats.dense_bytes + stats.slot_bytes
print(json.dumps(dict(needed=needed, experts=stats.expert_bytes, mlx_peak=mx.get_peak_memory(),
                      mlx_now=mx.get_active_memory(), rss=peak() - at_start)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["stacked", "per-expert"])
def test_loading_never_holds_the_experts(big, tmp_path, layout):
    path = big
    if layout == "per-expert":
        path = make_model(tmp_path / "each", **BIG, per_expert=True, shards=2)
        mx.clear_cache()
    seen = child(LOADED, path)
    assert seen["needed"] < seen["experts"] / 2
    assert seen["mlx_peak"] < seen["needed"] + 20 * MB, seen
    assert seen["mlx_now"] < seen["needed"] + 8 * MB, seen
    assert seen["rss"] < seen["needed"] + 80 * MB, seen
    if layout == "per-expert":
        shutil.rmtree(path)


def test_no_reference_to_the_stacked_arrays_stays(make):
    model = load(make(**SHAPE), resident=0.25)
    stats = mbolt_mlx.stats(model)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert held == stats.dense_bytes + stats.slot_bytes


@pytest.mark.slow
def test_a_prefill_needs_no_more_beside_slots_than_stock_beside_weights(big):
    code = """
if sys.argv[2] == "stock":
    model, _ = mlx_lm.load(path)
else:
    model, _ = mbolt_mlx.load(path, resident=0.2, side_file=None)
mx.clear_cache()
before = mx.get_active_memory()
mx.reset_peak_memory()
cache = make_prompt_cache(model)
for start in range(0, 256, 128):
    mx.eval(model(mx.arange(start, start + 128)[None] % 256, cache=cache))
print(json.dumps(dict(transient=mx.get_peak_memory() - before,
                      stays=mx.get_active_memory() - before)))
"""
    stock, ours = child(code, big, "stock"), child(code, big, "ours")
    assert ours["transient"] <= stock["transient"] + 20 * MB, (ours, stock)
    assert ours["stays"] <= stock["stays"] + 4 * MB, (ours, stock)


LIMITED = """
limit = at_start + int(sys.argv[2])
model, tokenizer = mbolt_mlx.load(path, memory_limit=limit, side_file=None)
after_load, slots = peak(), sum(mbolt_mlx.stats(model).slots.values())
rng = np.random.default_rng(0)
text = []
for topic in range(4):
    base = 40 * topic
    prompt = (base + rng.integers(0, 30, 20 + 100 * (topic == 2))).tolist()
    text += [p.token for p in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=6)]
cache = make_prompt_cache(model)
rest = rng.integers(0, 256, 800)
for start in range(0, 800, 400):
    y = model(mx.array(rest[None, start:start + 400]), cache=cache)
    mx.eval(y)
batch = model(mx.array(rng.integers(0, 256, (4, 20))))
digest = hashlib.sha256(np.array(y).tobytes() + np.array(batch).tobytes()).hexdigest()
stats = mbolt_mlx.stats(model)
print(json.dumps(dict(limit=limit, at_start=at_start, after_load=after_load, peak=peak(),
    before=slots, after=sum(stats.slots.values()), shrinks=stats.shrinks, text=text,
    digest=digest)))
"""


@pytest.mark.slow
def test_the_limit_holds_over_topics_long_prompts_and_batches(big):
    model, tokenizer = mlx_lm.load(str(big))
    rng = np.random.default_rng(0)
    text = []
    for topic in range(4):
        prompt = (40 * topic + rng.integers(0, 30, 20 + 100 * (topic == 2))).tolist()
        parts = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=6)
        text += [part.token for part in parts]
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    rest = rng.integers(0, 256, 800)
    for start in range(0, 800, 400):
        y = model(mx.array(rest[None, start : start + 400]), cache=cache)
        mx.eval(y)
    batch = model(mx.array(rng.integers(0, 256, (4, 20))))
    digest = hashlib.sha256(np.array(y).tobytes() + np.array(batch).tobytes()).hexdigest()
    del model, cache, y, batch
    mx.clear_cache()

    seen = child(LIMITED, big, 480 * MB)
    assert seen["text"] == text and seen["digest"] == digest
    assert seen["after_load"] <= seen["limit"] and seen["peak"] <= seen["limit"], seen
    # The memory that was allowed is used, not left idle.
    assert seen["before"] > 3 * BIG["top_k"] * BIG["layers"], seen


# --- shrinking, with a process size of the test's own making


class Grown:
    """``memory.process_rss`` that says what it is told plus what the slots take."""

    def __init__(self, monkeypatch, model) -> None:
        self.model, self.beside = model, 0
        monkeypatch.setattr(memory, "process_rss", self)

    def __call__(self) -> int:
        return self.beside + sum(layer.slots.nbytes for layer in layers_of(self.model))


def limited(path, monkeypatch):
    """A model that fits whole, and its made-up size; the limit is 10 MB."""
    model = load(path, memory_limit="8GB")
    assert set(mbolt_mlx.stats(model).slots.values()) == {16}
    grown = Grown(monkeypatch, model)
    model._mbolt._ceiling.limit = 10 * MB
    return model, grown


@pytest.mark.parametrize("mode", ["none", "affine4"])
def test_slots_are_given_up_as_other_memory_grows_and_results_stay(
    make, stock_logits, monkeypatch, mode
):
    path = make(**SHAPE, mode=mode)
    model, grown = limited(path, monkeypatch)
    assert_same(prefill_then_decode(model, ids(1, 20), 3), stock_logits(path, 1, 20, 3))
    last, seen = 16 * 3, set()
    layer = layers_of(model)[0].slots
    need = model._mbolt._ceiling.excess(20, 30) - memory.process_rss() + 10 * MB
    for share in (0.9, 0.7, 0.5, 0.3):
        room = int(share * 3 * 16 * layer.store.expert_bytes)
        grown.beside = 10 * MB - need - room
        assert_same(prefill_then_decode(model, ids(1, 20), 3), stock_logits(path, 1, 20, 3))
        stats = mbolt_mlx.stats(model)
        slots = sum(stats.slots.values())
        seen.add(slots)
        assert slots <= last and min(stats.slots.values()) >= 4
        assert grown() <= 10 * MB
        assert stats.slot_bytes == sum(part.slots.nbytes for part in layers_of(model))
        held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert held == stats.dense_bytes + stats.slot_bytes
        last = slots
    assert len(seen) == 4 and mbolt_mlx.stats(model).shrinks >= 4


def test_what_cannot_fit_is_refused_and_the_model_goes_on_when_it_can(
    make, stock_logits, monkeypatch
):
    path = make(**SHAPE)
    model, grown = limited(path, monkeypatch)
    grown.beside = 11 * MB
    for _ in range(2):
        with pytest.raises(MemoryLimitError) as caught:
            model(ids(1, 20))
        text = str(caught.value)
        assert "forward of 20 tokens" in text and "at most 10.0 MB" in text and "\n" not in text
    assert set(mbolt_mlx.stats(model).slots.values()) == {4}
    grown.beside = 0
    assert_same(prefill_then_decode(model, ids(1, 20), 3), stock_logits(path, 1, 20, 3))


def test_an_interrupted_shrink_leaves_a_model_that_is_right(make, stock_logits, monkeypatch):
    from tests.engine.test_failures import InterruptAt

    path = make(**SHAPE)
    wanted = stock_logits(path, 1, 20, 3)
    for line in range(1, 400, 17):
        model, grown = limited(path, monkeypatch)
        grown.beside = 10 * MB
        interrupt = InterruptAt(line)
        cut = interrupt.run(lambda m=model: m._mbolt._keep_within(20, 20))
        grown.beside = 0
        assert_same(prefill_then_decode(model, ids(1, 20), 3), wanted)
        monkeypatch.undo()
        if not cut and not interrupt.where:
            break
