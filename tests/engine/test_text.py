"""mlx-lm's own ways to generate, on a model with its experts on the drive: the same text."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mbolt_mlx
from tests.engine.kit import load

PROMPT = "The keeper of the lighthouse wrote in his book that"


@pytest.fixture(scope="module")
def pair(make, stock):
    """(folder, stock model, offloaded model, tokenizer)."""
    path = make(experts=16, top_k=4)
    model, tokenizer = stock(path)
    return path, model, load(path, resident=0.25), tokenizer


@pytest.mark.ends
def test_generate_and_stream_generate(pair):
    _, stock, model, tokenizer = pair
    wanted = mlx_lm.generate(stock, tokenizer, PROMPT, max_tokens=40)
    assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=40) == wanted
    parts = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=40))
    assert "".join(part.text for part in parts) == wanted
    assert parts[-1].prompt_tokens == len(tokenizer.encode(PROMPT))


def test_small_prefill_steps(pair):
    _, stock, model, tokenizer = pair
    prompt = PROMPT * 8
    options = dict(max_tokens=12, prefill_step_size=64)
    assert mlx_lm.generate(model, tokenizer, prompt, **options) == mlx_lm.generate(
        stock, tokenizer, prompt, **options
    )


def tokens_of(model, tokenizer, prompt, **options) -> list[int]:
    return [p.token for p in mlx_lm.stream_generate(model, tokenizer, prompt, **options)]


def test_a_prompt_cache_goes_on_where_it_was(pair, tmp_path):
    _, stock, model, tokenizer = pair
    results = []
    for name, one in (("stock", stock), ("ours", model)):
        cache = make_prompt_cache(one)
        first = tokens_of(one, tokenizer, PROMPT, max_tokens=10, prompt_cache=cache)
        file = str(tmp_path / f"{name}.safetensors")
        save_prompt_cache(file, cache)
        assert trim_prompt_cache(cache, 6) == 6
        second = tokens_of(one, tokenizer, " and then", max_tokens=10, prompt_cache=cache)
        saved = load_prompt_cache(file)
        third = tokens_of(one, tokenizer, " and then", max_tokens=10, prompt_cache=saved)
        results.append((first, second, third))
    assert results[0] == results[1]
    # A cache that stock filled serves the offloaded model.
    theirs = load_prompt_cache(str(tmp_path / "stock.safetensors"))
    third = tokens_of(model, tokenizer, " and then", max_tokens=10, prompt_cache=theirs)
    assert third == results[0][2]


def test_a_quantised_cache(pair):
    _, stock, model, tokenizer = pair
    options = dict(max_tokens=12, kv_bits=8, kv_group_size=32, quantized_kv_start=4)
    assert tokens_of(model, tokenizer, PROMPT, **options) == tokens_of(
        stock, tokenizer, PROMPT, **options
    )


@pytest.mark.parametrize("draft", ["stock", "offloaded"])
def test_a_draft_model(pair, make, stock, draft):
    _, big, model, tokenizer = pair
    small = make(experts=8, top_k=2, seed=3)
    helper = stock(small)[0] if draft == "stock" else load(small, resident=0.25)
    options = dict(max_tokens=24, num_draft_tokens=3)
    wanted = tokens_of(big, tokenizer, PROMPT, draft_model=stock(small)[0], **options)
    assert tokens_of(model, tokenizer, PROMPT, draft_model=helper, **options) == wanted
    # The model as its own draft: every token is accepted.
    own = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, draft_model=model, **options))
    assert [p.token for p in own] == tokens_of(big, tokenizer, PROMPT, max_tokens=24)
    assert any(p.from_draft for p in own)


def test_batch_generate(pair):
    _, stock, model, tokenizer = pair
    prompts = [tokenizer.encode(PROMPT[:n]) for n in (5, 20, 33, len(PROMPT))]
    wanted = mlx_lm.batch_generate(stock, tokenizer, prompts, max_tokens=12)
    got = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=12)
    assert got.texts == wanted.texts


def test_load_returns_what_mlx_lm_returns(make):
    path = str(make(experts=16, top_k=4))
    theirs = mlx_lm.load(path, return_config=True)
    ours = mbolt_mlx.load(path, return_config=True, resident=0.3, side_file=None)
    assert len(ours) == len(theirs) == 3 and ours[2] == theirs[2]
    assert isinstance(ours[0], type(theirs[0])) and type(ours[1]) is type(theirs[1])
    assert len(mbolt_mlx.load(path, resident=0.3, side_file=None)) == 2
    assert ours[0].args == theirs[0].args and len(ours[0].layers) == len(theirs[0].layers)


def test_arguments_of_mlx_lm_load_are_passed_on(make):
    path = str(make(experts=16, top_k=4))
    model, tokenizer, config = mbolt_mlx.load(
        path,
        {"eos_token": "<|endoftext|>"},
        {"rope_theta": 5e5},
        None,
        True,
        return_config=True,
        resident=0.3,
        side_file=None,
    )
    theirs, their_tokenizer = mlx_lm.load(path, {"eos_token": "<|endoftext|>"}, {"rope_theta": 5e5})
    assert config["rope_theta"] == model.args.rope_theta == 5e5
    assert tokenizer.eos_token_ids == their_tokenizer.eos_token_ids
    x = mx.array([[1, 2, 3, 4, 5]])
    assert np.array(model(x)).tobytes() == np.array(theirs(x)).tobytes()


def test_a_conversation_over_topics_stays_the_stock_conversation(pair):
    _, stock, model, tokenizer = pair
    rng = np.random.default_rng(0)
    caches = make_prompt_cache(stock), make_prompt_cache(model)
    for _ in range(6):
        prompt = rng.integers(0, 256, int(rng.integers(1, 60))).tolist()
        a, b = (
            tokens_of(m, tokenizer, prompt, max_tokens=8, prompt_cache=c)
            for m, c in zip((stock, model), caches, strict=True)
        )
        assert a == b
