"""Rows of a call put back in order: as they come or at the end, the same bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mbolt_mlx.engine import rows

TOKENS, K, EXPERTS, WIDTH = 11, 3, 7, 5


def scaled(dtype):
    """A container whose row is x times (slot + 1)."""

    def compute(x, slots):
        return (x[..., None, :] * (slots[..., None] + 1).astype(mx.float32)).astype(dtype)

    return compute


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("group", [1, 2, EXPERTS])
@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_in_order_whatever_the_groups(monkeypatch, dtype, group, limit):
    monkeypatch.setattr(rows, "_IN_PLACE_BYTES", limit)
    seen = []
    put = rows._Whole.put
    monkeypatch.setattr(rows._Whole, "put", lambda self, g: seen.append(g) or put(self, g))
    rng = np.random.default_rng(0)
    tokens = np.array([rng.permutation(EXPERTS)[:K] for _ in range(TOKENS)])
    x = mx.random.normal((1, TOKENS, WIDTH), key=mx.random.key(1))
    slot_of = rng.permutation(EXPERTS).tolist()
    many = rows.ManyTokens(scaled(dtype), x, tokens, slot_of, 1)
    experts = np.unique(tokens).tolist()
    for start in range(0, len(experts), group):
        mx.async_eval(*many.compute(experts[start : start + group]))
    y = many.combine((1, TOKENS, K))
    slots = mx.array(np.array(slot_of)[tokens])[None]
    assert y.shape == (1, TOKENS, K, WIDTH) and y.dtype == dtype
    assert mx.array_equal(y, scaled(dtype)(x, slots)).item()
    assert len(seen) == (-(-len(experts) // group) if limit == 0 else 0)


def test_a_large_result_is_in_memory_once(monkeypatch):
    """Beside the result there are the groups on their way, not all rows twice more."""
    tokens = np.tile(np.arange(64), (256, 1)).astype(np.int32)
    x = mx.zeros((256, 256))
    whole = tokens.size * 256 * 4
    mx.eval(x)

    def extra(limit):
        monkeypatch.setattr(rows, "_IN_PLACE_BYTES", limit)
        many = rows.ManyTokens(scaled(mx.float32), x, tokens, list(range(64)), 1 << 20)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for expert in range(64):
            mx.async_eval(*many.compute([expert]))
        mx.eval(many.combine((256, 64)))
        return mx.get_peak_memory() - before

    assert extra(0) < 1.5 * whole
    assert extra(1 << 40) > 1.9 * whole
