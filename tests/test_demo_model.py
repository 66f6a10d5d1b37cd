"""The shipped demo model: loads in stock mlx-lm, has its geometry, and has learned something."""

from __future__ import annotations

import json
import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import generate, load

from mbolt_mlx.resources import resource

# Measured nats per token of the shipped 4-bit model on heldout.json; the bound is 10 % above.
MEASURED = {"bible": 3.343, "english": 3.649, "python": 2.865, "german": 2.573}
MARGIN = 1.10
LEAST_EXPERT_ENTROPY = 0.80  # of the even share's, by layer
LEAST_WORDS = 0.75  # share of generated words that are among the commonest of the corpus


@pytest.fixture(scope="module")
def folder():
    return resource("demo")


@pytest.fixture(scope="module")
def demo(folder):
    model, tokenizer, config = load(str(folder), return_config=True)
    return model, tokenizer, config


@pytest.fixture(scope="module")
def heldout(folder):
    return json.loads((folder / "heldout.json").read_text(encoding="utf-8"))


def ids_of(tokenizer, text: str) -> mx.array:
    return mx.array([[0, *tokenizer.encode(text, add_special_tokens=False)]])


def test_weights_are_at_most_9_mb(folder):
    assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= 9_000_000


def test_geometry(demo):
    model, tokenizer, config = demo
    assert config["model_type"] == "qwen3_moe"
    assert len(model.layers) == 6
    assert (config["num_experts"], config["num_experts_per_tok"]) == (32, 4)
    assert (config["hidden_size"], config["moe_intermediate_size"]) == (256, 64)
    assert config["norm_topk_prob"] is True and config["tie_word_embeddings"] is True
    assert tokenizer.vocab_size == config["vocab_size"] == 2048
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = layer.mlp.switch_mlp[name]
            assert (linear.bits, linear.group_size, linear.mode) == (4, 64, "affine")
            assert linear.weight.shape[0] == 32


def test_everything_but_packed_weights_is_float32(demo):
    # Half-precision scales would make MLX's quantised kernels on the CPU many times slower.
    dtypes = {k: v.dtype for k, v in nn.utils.tree_flatten(demo[0].parameters())}
    packed = {k for k, v in dtypes.items() if v == mx.uint32}
    assert packed and all(k.endswith(".weight") for k in packed)
    assert all(v == mx.float32 for k, v in dtypes.items() if k not in packed)


@pytest.mark.parametrize("domain", sorted(MEASURED))
def test_held_out_loss(demo, heldout, domain):
    model, tokenizer, _ = demo
    nats, tokens = 0.0, 0
    for snippet in heldout["snippets"]:
        if snippet["domain"] == domain:
            ids = ids_of(tokenizer, snippet["text"])
            logits = model(ids[:, :-1])
            nats += nn.losses.cross_entropy(logits, ids[:, 1:], reduction="sum").item()
            tokens += ids.shape[1] - 1
    assert nats / tokens < MEASURED[domain] * MARGIN


class Recorder(nn.Module):
    """Stands in for a layer's experts and remembers which were chosen."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.chosen: list[np.ndarray] = []

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.chosen.append(np.array(indices).ravel())
        return self.experts(x, indices)


def test_routing_is_not_collapsed(demo, heldout):
    model, tokenizer, config = demo
    recorders = []
    try:
        for layer in model.layers:
            layer.mlp.switch_mlp = Recorder(layer.mlp.switch_mlp)
            recorders.append(layer.mlp.switch_mlp)
        for snippet in heldout["snippets"]:
            mx.eval(model(ids_of(tokenizer, snippet["text"])))
    finally:
        for layer, recorder in zip(model.layers, recorders, strict=False):
            layer.mlp.switch_mlp = recorder.experts
    experts = config["num_experts"]
    for number, recorder in enumerate(recorders):
        counts = np.bincount(np.concatenate(recorder.chosen), minlength=experts)
        share = counts[counts > 0] / counts.sum()
        entropy = -(share * np.log(share)).sum() / math.log(experts)
        assert np.count_nonzero(counts) >= 0.9 * experts, f"layer {number}: {counts}"
        assert entropy > LEAST_EXPERT_ENTROPY, f"layer {number}: {entropy:.3f}"


@pytest.mark.parametrize("start", ["And the LORD said unto", "And David said unto"])
def test_greedy_text_is_made_of_words(demo, heldout, start):
    model, tokenizer, _ = demo
    text = generate(model, tokenizer, start, max_tokens=48)
    words = re.findall(r"[a-z]+", text.lower())[:-1]  # the last may be cut
    common = set(heldout["common_words"].split())
    assert len(words) >= 20, text
    assert sum(word in common for word in words) >= LEAST_WORDS * len(words), text
    assert len(set(words)) >= 0.25 * len(words), text


def test_chat_template_answers_and_stops(demo):
    model, tokenizer, _ = demo
    messages = [{"role": "user", "content": "Write a Python function named open_file."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    question = messages[0]["content"]
    assert prompt == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    text = generate(model, tokenizer, prompt, max_tokens=200)
    assert "<|" not in text
    assert text.startswith("def ") and "return" in text.lower()
    assert len(tokenizer.encode(text)) < 200  # it ended by itself


TEXTS = [
    "plain text",
    "  spaces\t and\n\n lines ",
    "Grüße, naïve café — „ß“",
    "日本語 🙂🏳️",
    "\x00\x1f\x7f\xa0",
    "".join(map(chr, range(0x20, 0x250))),
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokenizer_keeps_every_character(demo, text):
    tokenizer = demo[1]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
