"""Bit for bit what stock mlx-lm computes, however little is in memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mbolt_mlx.core.residency import ResidentSet, make_policy
from mbolt_mlx.engine import slots as slots_module
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.engine.slots import LayerSlots
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import find_experts
from mbolt_mlx.storage.store import from_shards
from tests.engine.kit import assert_same, ids, layers_of, load, prefill_then_decode

E, K = 16, 4
SHAPES = {
    "float32": dict(experts=E, top_k=K),
    "affine4": dict(experts=E, top_k=K, mode="affine4"),
    "affine8": dict(experts=E, top_k=K, mode="affine8"),
    "sharded": dict(experts=E, top_k=K, shards=3),
    "per-expert": dict(experts=E, top_k=K, per_expert=True, shards=2),
}
SHARES = [K / E, 0.25 + 1 / E, 0.5, 1.0]


def check(path, stock_logits, batch, length, steps, **options):
    model = load(path, **options)
    got = prefill_then_decode(model, ids(batch, length), steps)
    assert_same(got, stock_logits(path, batch, length, steps))
    return model


@pytest.mark.ends
@pytest.mark.parametrize(
    ("kind", "resident"),
    [(kind, share) for kind in ("float32", "affine4") for share in SHARES]
    + [("affine8", K / E), ("sharded", 0.5), ("per-expert", K / E), ("per-expert", 1.0)],
)
def test_prefill_of_300_tokens_and_64_decoded(make, stock_logits, kind, resident):
    check(make(**SHAPES[kind]), stock_logits, 1, 300, 64, resident=resident)


@pytest.mark.parametrize("resident", [K / E, 0.5, 1.0])
@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("kind", ["float32", "affine4"])
def test_batches(make, stock_logits, kind, batch, resident):
    check(make(**SHAPES[kind]), stock_logits, batch, 40, 8, resident=resident)


@pytest.mark.ends
@pytest.mark.parametrize(
    ("kind", "resident"),
    [("float32", K / E), ("affine4", 0.5), ("affine8", K / E), ("per-expert", 0.3)],
)
def test_from_a_side_file(make, stock_logits, side_file_of, kind, resident):
    path = make(**SHAPES[kind])
    side_file = side_file_of(path)
    model = check(path, stock_logits, 1, 300, 64, resident=resident, side_file=side_file)
    assert model._mbolt.stats().side_file == str(side_file)


@pytest.mark.parametrize("policy", ["lru", "decayed"])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("source", ["shards", "side-file"])
def test_every_policy_and_way_to_read(make, stock_logits, side_file_of, source, direct, policy):
    for kind in ("affine4", "per-expert"):
        path = make(**SHAPES[kind])
        side_file = side_file_of(path) if source == "side-file" else None
        options = dict(resident=0.3, policy=policy, direct=direct, side_file=side_file)
        model = check(path, stock_logits, 1, 100, 12, **options)
        assert model._mbolt.stats().direct is direct and model._mbolt.stats().policy == policy


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_any_number_of_reading_threads(make, stock_logits, threads):
    path = make(**SHAPES["affine4"])
    check(path, stock_logits, 1, 100, 12, resident=0.25, read_threads=threads)


@pytest.mark.parametrize(("hidden", "width"), [(72, 40), (68, 33), (65, 37), (36, 5), (130, 1)])
@pytest.mark.parametrize("batch", [1, 3])
def test_odd_widths(make, stock_logits, hidden, width, batch):
    """Vector code treats the last few of a row apart; grouping rows anew must not show."""
    path = make(experts=E, top_k=K, hidden=hidden, width=width)
    for direct in (False, True):
        check(path, stock_logits, batch, 61, 12, resident=0.25, direct=direct)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65])
def test_prompts_around_the_sizes_where_kernels_change(make, stock_logits, length):
    check(make(**SHAPES["float32"]), stock_logits, 1, length, 2, resident=0.25)
    check(make(**SHAPES["affine4"]), stock_logits, 3, length, 2, resident=0.4)


def test_top_k_of_one_and_of_all(make, stock_logits):
    for top_k in (1, 8):
        path = make(experts=8, top_k=top_k)
        check(path, stock_logits, 1, 50, 10, resident=0.01)
        check(path, stock_logits, 4, 50, 10, resident=0.6)


def test_where_arrays_cannot_be_written_in_place(make, stock_logits, monkeypatch):
    monkeypatch.setattr(slots_module, "_aliasing", False)
    model = check(make(**SHAPES["affine4"]), stock_logits, 1, 100, 12, resident=0.25)
    assert not layers_of(model)[0].slots.aliased
    check(make(**SHAPES["float32"]), stock_logits, 4, 40, 8, resident=1.0)


def test_windows_do_alias_on_this_machine():
    """What the engine builds on; where it fails, misses are copied once more."""
    assert slots_module.windows_alias()


def test_chunked_prefill_is_the_stock_chunked_prefill(make, stock):
    path = make(**SHAPES["float32"])
    model = load(path, resident=0.25)
    prompt = ids(1, 200, seed=5)
    from mlx_lm.models.cache import make_prompt_cache

    for chunks in ([200], [64, 64, 72], [1, 199], [150, 1, 49]):
        caches = [make_prompt_cache(m) for m in (stock(path)[0], model)]
        start = 0
        for size in chunks:
            a, b = (
                m(prompt[:, start : start + size], cache=c)
                for m, c in zip((stock(path)[0], model), caches, strict=True)
            )
            assert np.array(a).tobytes() == np.array(b).tobytes()
            start += size


# --- a layer by itself, with fewer slots than a loaded model would have


def one_layer(path, slots: int, policy: str = "lru", direct: bool = False):
    """(stock container, offloaded layer of ``slots`` slots, its compute)."""
    import mlx_lm

    checkpoint = Checkpoint.open(path)
    store = from_shards(checkpoint, find_experts(checkpoint))
    stock = mlx_lm.load(str(path))[0].model.layers[0].mlp.switch_mlp
    twin = mlx_lm.load(str(path), lazy=True)[0].model.layers[0].mlp.switch_mlp
    memory = LayerSlots(store.layers[0], slots)
    resident = ResidentSet(store.layers[0].experts, slots, make_policy(policy, E))
    fetcher = Fetcher(store, threads=2, direct=direct)
    fetcher.open()
    layer = OffloadedLayer(memory, resident, fetcher)
    for name, array in memory.arrays.items():
        part, attribute = name.split(".")
        setattr(twin[part], attribute, array)
    return stock, layer, twin


@pytest.mark.parametrize("kind", ["float32", "affine4"])
@pytest.mark.parametrize("slots", [1, 2, 3, K, 5, E - 1])
@pytest.mark.parametrize("policy", ["lru", "decayed"])
def test_any_number_of_slots_from_one_up(make, kind, slots, policy):
    stock, layer, compute = one_layer(make(**SHAPES[kind]), slots, policy)
    rng = np.random.default_rng(slots)
    for rows in (1, 1, 2, 7, 1, 90, 1, 3):
        choice = np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.uint32)
        x = mx.array(rng.normal(size=(1, rows, 64)).astype(np.float32))
        indices = mx.array(choice)[None]
        got = layer.forward(compute, x, indices)
        assert got.shape == (1, rows, K, 64)
        assert np.array(got).tobytes() == np.array(stock(x, indices)).tobytes()
        assert len(layer.resident.residents()) <= slots


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_router_that_names_an_expert_twice(make, slots):
    stock, layer, compute = one_layer(make(**SHAPES["float32"]), slots)
    x = mx.array(np.random.default_rng(0).normal(size=(1, 3, 64)).astype(np.float32))
    for choice in ([[[3, 3, 5, 3]]], [[[3, 3, 5, 3], [1, 1, 1, 1], [15, 0, 15, 3]]]):
        indices = mx.array(choice, dtype=mx.uint32)
        rows = x[:, : indices.shape[1]]
        got = layer.forward(compute, rows, indices)
        assert np.array(got).tobytes() == np.array(stock(rows, indices)).tobytes()


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64), (2, 1, 64), (1, 64)])
@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64])
def test_rows_in_any_shape_and_ids_of_any_type(make, shape, dtype):
    stock, layer, compute = one_layer(make(**SHAPES["float32"]), 5)
    rng = np.random.default_rng(1)
    rows = int(np.prod(shape[:-1]))
    choice = np.stack([rng.permutation(E)[:K] for _ in range(rows)])
    indices = mx.array(choice).reshape(*shape[:-1], K).astype(dtype)
    x = mx.array(rng.normal(size=shape).astype(np.float32))
    got = layer.forward(compute, x, indices)
    assert got.shape == (*shape[:-1], K, 64)
    assert np.array(got).tobytes() == np.array(stock(x, indices)).tobytes()


@pytest.mark.parametrize("direct", [False, True])
def test_slots_shrink_and_stay_right(make, direct):
    stock, layer, compute = one_layer(make(**SHAPES["affine4"]), 12, direct=direct)
    rng = np.random.default_rng(2)
    for slots in (12, 9, 5, 4, 1):
        layer.shrink(slots)
        for name, array in layer.slots.arrays.items():
            part, attribute = name.split(".")
            setattr(compute[part], attribute, array)
        kept = layer.resident.residents()
        assert layer.slots.count == layer.resident.slots == slots
        for rows in (1, 1, 30, 1):
            choice = np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.uint32)
            if rows == 1 and len(kept) >= K:
                choice[0] = kept[:K]  # only what has moved
            x = mx.array(rng.normal(size=(1, rows, 64)).astype(np.float32))
            indices = mx.array(choice)[None]
            got = layer.forward(compute, x, indices)
            assert np.array(got).tobytes() == np.array(stock(x, indices)).tobytes()
