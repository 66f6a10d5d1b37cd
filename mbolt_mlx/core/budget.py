"""How many slots each layer gets. Pure arithmetic, the same for the engine and its planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mbolt_mlx.core.errors import MemoryLimitError
from mbolt_mlx.core.residency import slots_for
from mbolt_mlx.core.sizes import format_size

# Share of the memory that is used when the user sets no limit.
DEFAULT_SHARE = 0.7
# What the process needs beyond weights, slots and KV cache: freed buffers, Python, the allocator.
WORKING_BYTES = 96 << 20
# Context and prefill chunk that a memory limit makes room for at the start. A longer context
# shrinks the slots when it comes.
PLANNED_CONTEXT = 2048
PLANNED_CHUNK = 512
# MLX on a CPU keeps so much of freed buffers for the next ones: a layer's transients are all that
# is worth keeping.
FREED_BYTES = 8 << 20
# mlx-lm's KV cache grows by so many positions.
KV_STEP = 256
# Bytes of a tokenizer for each entry of its vocabulary, and while it is being loaded, after all the
# weights (measured with BPE tokenizers of 32,000 and 151,000 entries).
TOKENIZER_ENTRY, TOKENIZER_LOADING = 1200, 1800


@dataclass(frozen=True)
class LayerShape:
    """A layer as the budget sees it: experts, experts a token uses, bytes of one expert."""

    experts: int
    top_k: int
    expert_bytes: int


def slots_at(layers: Sequence[LayerShape], resident: float) -> list[int]:
    """Slots a layer at the fraction ``resident`` of its experts."""
    return [slots_for(layer.experts, layer.top_k, resident) for layer in layers]


def slot_bytes(layers: Sequence[LayerShape], slots: Sequence[int]) -> int:
    """Bytes that ``slots`` slots a layer take."""
    return sum(n * layer.expert_bytes for n, layer in zip(slots, layers, strict=True))


def slots_within(layers: Sequence[LayerShape], nbytes: int) -> list[int]:
    """The most slots that fit in ``nbytes``, the same fraction of each layer's experts.

    Raises:
        MemoryLimitError: if not even top_k slots a layer fit.
    """
    least = slots_at(layers, 0.0)
    if slot_bytes(layers, least) > nbytes:
        raise MemoryLimitError(
            "too little memory for the experts of one token",
            expected=f"at least {format_size(slot_bytes(layers, least))} for slots",
            found=format_size(max(0, nbytes)),
        )
    steps = max(layer.experts for layer in layers)
    low, high = 0, steps  # in units of 1/steps
    while low < high:
        middle = (low + high + 1) // 2
        if slot_bytes(layers, slots_at(layers, middle / steps)) <= nbytes:
            low = middle
        else:
            high = middle - 1
    slots = slots_at(layers, low / steps)
    left = nbytes - slot_bytes(layers, slots)
    for number, layer in enumerate(layers):
        if slots[number] < layer.experts and layer.expert_bytes <= left:
            slots[number] += 1
            left -= layer.expert_bytes
    return slots


@dataclass(frozen=True)
class Geometry:
    """What sets a model's memory beyond its weights.

    Args:
        kv_bytes: KV cache of one token, all layers.
        row_bytes: transient of one token in an expert layer.
        score_bytes: transient of one attention score, all heads of a layer.
        vocabulary: entries of the tokenizer.
    """

    kv_bytes: int
    row_bytes: int
    score_bytes: int
    vocabulary: int = 0

    def transient(self, tokens: int, context: int) -> int:
        """Bytes that a forward of ``tokens`` tokens over ``context`` positions uses and frees."""
        return tokens * (self.row_bytes + context * self.score_bytes)

    def beside_weights(self, context: int, chunk: int, working: int = 0) -> int:
        """The most bytes beyond the process and the weights: the tokenizer while it is loaded, or
        later with a KV cache of ``context`` positions, the transients of a prefill chunk of
        ``chunk`` tokens, and ``working`` bytes."""
        cached = -(-context // KV_STEP) * KV_STEP * self.kv_bytes
        later = working + cached + self.transient(min(chunk, context), context)
        tokenizer = self.vocabulary
        return max(tokenizer * TOKENIZER_LOADING, tokenizer * TOKENIZER_ENTRY + later)


def geometry_of(config: dict[str, Any], activation_bytes: int) -> Geometry:
    """Estimate from a config.json with the usual keys; an unknown key counts as small.

    Args:
        config: the model's configuration; a nested ``text_config`` comes first.
        activation_bytes: bytes of one activation.
    """
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, dict) else {})}

    def number(*keys: str, default: int) -> int:
        for key in keys:
            value = config.get(key)
            if type(value) is int and value >= 0:
                return value
        return default

    hidden = number("hidden_size", "d_model", "n_embd", default=4096)
    heads = number("num_attention_heads", "n_head", default=32)
    layers = number("num_hidden_layers", "num_layers", "n_layer", default=32)
    kv_heads = number("num_key_value_heads", default=heads)
    head_dim = number("head_dim", default=hidden // max(1, heads))
    top_k = number("num_experts_per_tok", "top_k", "moe_topk", "num_local_experts", default=8)
    width = number("moe_intermediate_size", "intermediate_size", "ffn_hidden_size", default=hidden)
    latent = number("kv_lora_rank", default=0)
    a_layer = latent + number("qk_rope_head_dim", default=64) if latent else 2 * kv_heads * head_dim
    return Geometry(
        kv_bytes=layers * a_layer * activation_bytes,
        row_bytes=top_k * 3 * (hidden + width) * activation_bytes,
        # Scores and their softmax.
        score_bytes=2 * heads * activation_bytes,
        vocabulary=number("vocab_size", default=0),
    )
