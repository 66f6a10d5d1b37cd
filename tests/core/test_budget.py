"""Slots for a number of bytes: as many as fit, never fewer than a token needs."""

from __future__ import annotations

import random

import pytest

from mbolt_mlx.core.budget import (
    TOKENIZER_ENTRY,
    TOKENIZER_LOADING,
    Geometry,
    LayerShape,
    geometry_of,
    slot_bytes,
    slots_at,
    slots_within,
)
from mbolt_mlx.core.errors import MemoryLimitError

SAME = [LayerShape(64, 8, 1000)] * 5


def test_the_least_that_works_is_top_k_a_layer():
    assert slots_within(SAME, 5 * 8 * 1000) == [8] * 5
    assert slots_at(SAME, 0.0) == [8] * 5
    with pytest.raises(MemoryLimitError) as caught:
        slots_within(SAME, 5 * 8 * 1000 - 1)
    assert "at least 40.0 kB" in str(caught.value) and "found 40.0 kB" in str(caught.value)


@pytest.mark.parametrize("nbytes", [-(10**12), -1, 0, 1])
def test_next_to_nothing_is_refused_in_one_line(nbytes):
    with pytest.raises(MemoryLimitError) as caught:
        slots_within(SAME, nbytes)
    assert "\n" not in str(caught.value) and "-" not in str(caught.value)


def test_all_of_it_is_all_of_it():
    assert slots_within(SAME, 5 * 64 * 1000) == [64] * 5
    assert slots_within(SAME, 10**15) == [64] * 5


@pytest.mark.parametrize("seed", range(30))
def test_no_layer_of_equal_experts_could_have_one_more(seed):
    pick = random.Random(seed)
    experts, top_k = pick.choice([(8, 2), (64, 8), (60, 4), (128, 8), (7, 3)])
    shapes = [LayerShape(experts, top_k, 999)] * pick.randint(1, 12)
    for _ in range(30):
        least, most = (
            slot_bytes(shapes, slots_at(shapes, 0.0)),
            slot_bytes(shapes, slots_at(shapes, 1.0)),
        )
        nbytes = pick.randint(least, most)
        slots = slots_within(shapes, nbytes)
        used = slot_bytes(shapes, slots)
        assert used <= nbytes
        assert all(top_k <= n <= experts for n in slots)
        assert nbytes - used < 999 or slots == [experts] * len(shapes)
        assert max(slots) - min(slots) <= 1


@pytest.mark.parametrize("seed", range(30))
def test_layers_of_different_shape_share_fairly_within_the_bytes(seed):
    pick = random.Random(seed)
    shapes = []
    for _ in range(pick.randint(2, 10)):
        experts = pick.randint(2, 128)
        shapes.append(LayerShape(experts, pick.randint(1, experts), pick.randint(1, 5000)))
    least = slots_at(shapes, 0.0)
    nbytes = pick.randint(slot_bytes(shapes, least), slot_bytes(shapes, slots_at(shapes, 1.0)))
    slots = slots_within(shapes, nbytes)
    assert slot_bytes(shapes, slots) <= nbytes
    share = [n / shape.experts for n, shape in zip(slots, shapes, strict=True)]
    for n, floor, shape in zip(slots, least, shapes, strict=True):
        assert floor <= n <= shape.experts
    # No layer above its floor is far ahead of one that still has room.
    above = [
        s - 2 / shape.experts
        for s, n, floor, shape in zip(share, slots, least, shapes, strict=True)
        if n > floor + 1  # one more may come from what is left over
    ]
    below = [s + 2 / shape.experts for s, shape in zip(share, shapes, strict=True) if s < 1]
    if above and below:
        assert max(above) <= min(below)


def test_more_bytes_are_never_fewer_slots():
    shapes = [LayerShape(64, 8, 1000), LayerShape(16, 2, 7000), LayerShape(64, 8, 1000)]
    last = 0
    for nbytes in range(100_000, 300_000, 501):
        total = slot_bytes(shapes, slots_within(shapes, nbytes))
        assert total >= last - 7000
        last = total


QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def test_the_cache_of_a_known_model():
    geometry = geometry_of(QWEN3_30B, 2)
    assert geometry.kv_bytes == 48 * 2 * 4 * 128 * 2
    assert geometry_of({"text_config": QWEN3_30B, "hidden_size": 7}, 2) == geometry
    assert geometry_of({**QWEN3_30B, "text_config": [5]}, 2) == geometry


def test_a_latent_cache_is_small():
    deepseek = {
        **QWEN3_30B,
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_key_value_heads": 128,
    }
    assert geometry_of(deepseek, 2).kv_bytes == 61 * (512 + 64) * 2


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"hidden_size": "wide"}])
def test_an_odd_config_is_no_error(config):
    geometry = geometry_of(config, 4)
    assert geometry.kv_bytes > 0 and geometry.row_bytes > 0 and geometry.score_bytes > 0


def test_transients_grow_with_tokens_and_context():
    geometry = Geometry(kv_bytes=10, row_bytes=100, score_bytes=3)
    assert geometry.transient(4, 50) == 4 * (100 + 150)
    assert geometry.transient(0, 50) == 0


def test_beside_the_weights_is_the_context_or_a_tokenizer_being_loaded():
    geometry = Geometry(kv_bytes=1000, row_bytes=100, score_bytes=3)
    # The cache grows by 256 positions; no chunk is longer than the context.
    assert geometry.beside_weights(300, 64) == 512 * 1000 + geometry.transient(64, 300)
    assert geometry.beside_weights(20, 64, 5) == 5 + 256 * 1000 + geometry.transient(20, 20)
    known = geometry_of({**QWEN3_30B, "vocab_size": 151936}, 2)
    assert known.vocabulary == 151936 and geometry_of(QWEN3_30B, 2).vocabulary == 0
    tokens = Geometry(kv_bytes=1, row_bytes=1, score_bytes=1, vocabulary=151936)
    assert tokens.beside_weights(1, 1) == 151936 * TOKENIZER_LOADING
    much = 1 << 30
    later = tokens.beside_weights(1, 1, much) - much
    assert later == 151936 * TOKENIZER_ENTRY + 256 + tokens.transient(1, 1)
