"""Names, shapes and metadata of small mixture-of-experts models, as llama.cpp reads them.

One function an architecture; see random_gguf.py for the file that comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gguf import GGMLQuantizationType

T = GGMLQuantizationType
# What a matrix becomes: experts' gate and up, experts' down by layer parity, the rest, embeddings.
QUANTS = {
    "F16": (T.F16, (T.F16, T.F16), T.F16, T.F16),
    "Q8_0": (T.Q8_0, (T.Q8_0, T.Q8_0), T.Q8_0, T.Q8_0),
    "Q4_0": (T.Q4_0, (T.Q4_0, T.Q4_0), T.Q4_0, T.Q6_K),
    "Q4_K_M": (T.Q4_K, (T.Q6_K, T.Q4_K), T.Q4_K, T.Q6_K),
    "IQ4_XS": (T.IQ4_XS, (T.IQ4_XS, T.IQ4_XS), T.IQ4_XS, T.Q6_K),
    "MXFP4": (T.MXFP4, (T.MXFP4, T.MXFP4), T.Q8_0, T.Q8_0),
}
_SUPER = {T.Q4_K, T.Q6_K, T.IQ4_XS}


@dataclass(frozen=True)
class Spec:
    """The shape of a model. ``options`` are those of an architecture (see the functions below)."""

    arch: str = "qwen3moe"
    quant: str = "Q4_K_M"
    layers: int = 3
    experts: int = 8
    top_k: int = 2
    embd: int = 256
    ff: int = 256
    ff_exp: int = 256
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    context: int = 512
    vocab: int = 320
    embedding_std: float = 2.0
    router_std: float = 3.0
    name: str = "random"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """One tensor to be: ``shape`` in ggml's order, fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    std: float = 1.0
    mean: float = 0.0
    positive: int = 0  # 1: made positive, -1: made negative


def matrix(
    spec: Spec, name: str, shape: tuple[int, ...], *, layer: int = 0, std: float | None = None
) -> Made:
    """A weight, of the type that the spec's quantisation gives it; outputs have an rms near 1."""
    gate_up, down, dense, embedding = QUANTS[spec.quant]
    if "_exps" in name:
        kind = down[layer % 2] if "down" in name else gate_up
    else:
        kind = embedding if name.startswith(("token_embd", "output")) else dense
    if kind in _SUPER and shape[0] % 256:
        kind = T.Q8_0
    if kind not in (T.F16, T.F32) and shape[0] % 32:
        kind = T.F16
    return Made(f"{name}.weight", shape, kind, std or 1.0 / math.sqrt(shape[0]))


def norm(name: str, size: int) -> Made:
    return Made(f"{name}.weight", (size,), T.F32, 0.05, 1.0)


def bias(name: str, shape: tuple[int, ...], std: float = 0.1) -> Made:
    return Made(f"{name}.bias", shape, T.F32, std)


def experts(spec: Spec, n: int, *, fused: bool = False) -> Iterator[Made]:
    """The router and the experts of layer ``n``; ``fused`` has gate and up in one tensor."""
    p, d, f, e = f"blk.{n}.ffn_", spec.embd, spec.ff_exp, spec.experts
    yield Made(f"{p}gate_inp.weight", (d, e), T.F32, spec.router_std / math.sqrt(d))
    if fused:
        yield matrix(spec, f"{p}gate_up_exps", (d, 2 * f, e))
    else:
        yield matrix(spec, f"{p}gate_exps", (d, f, e))
    yield matrix(spec, f"{p}down_exps", (f, d, e), layer=n)
    if not fused:
        yield matrix(spec, f"{p}up_exps", (d, f, e))


def feed_forward(spec: Spec, n: int, size: int, suffix: str = "") -> Iterator[Made]:
    """A dense feed-forward network, or with ``suffix`` "_shexp" the shared experts."""
    yield matrix(spec, f"blk.{n}.ffn_gate{suffix}", (spec.embd, size))
    yield matrix(spec, f"blk.{n}.ffn_down{suffix}", (size, spec.embd))
    yield matrix(spec, f"blk.{n}.ffn_up{suffix}", (spec.embd, size))


def attention(spec: Spec, n: int, *, q: int = 1, norms: bool = True) -> Iterator[Made]:
    p, d, h = f"blk.{n}.attn_", spec.embd, spec.head
    yield matrix(spec, f"{p}q", (d, spec.heads * h * q))
    yield matrix(spec, f"{p}k", (d, spec.kv_heads * h))
    yield matrix(spec, f"{p}v", (d, spec.kv_heads * h))
    yield matrix(spec, f"{p}output", (spec.heads * h, d))
    if norms:
        yield norm(f"{p}k_norm", h)
        yield norm(f"{p}q_norm", h)


def qwen3moe(spec: Spec, keys: dict[str, Any]) -> Iterator[Made]:
    for n in range(spec.layers):
        yield norm(f"blk.{n}.attn_norm", spec.embd)
        yield from attention(spec, n)
        yield norm(f"blk.{n}.ffn_norm", spec.embd)
        yield from experts(spec, n)


def gpt_oss(spec: Spec, keys: dict[str, Any]) -> Iterator[Made]:
    """Biases on everything, attention sinks, every second layer with a sliding window."""
    keys["attention.sliding_window"] = 64
    d, e = spec.embd, spec.experts
    for n in range(spec.layers):
        p = f"blk.{n}."
        yield norm(f"{p}attn_norm", d)
        yield norm(f"{p}post_attention_norm", d)
        yield from attention(spec, n, norms=False)
        yield bias(f"{p}attn_q", (spec.heads * spec.head,))
        yield bias(f"{p}attn_k", (spec.kv_heads * spec.head,))
        yield bias(f"{p}attn_v", (spec.kv_heads * spec.head,))
        yield bias(f"{p}attn_output", (d,))
        yield Made(f"{p}attn_sinks.weight", (spec.heads,), T.F32)
        yield from experts(spec, n)
        yield bias(f"{p}ffn_gate_inp", (e,), 0.3)
        yield bias(f"{p}ffn_gate_exps", (spec.ff_exp, e), 0.3)
        yield bias(f"{p}ffn_down_exps", (d, e), 0.3)
        yield bias(f"{p}ffn_up_exps", (spec.ff_exp, e), 0.3)


def deepseek2(spec: Spec, keys: dict[str, Any]) -> Iterator[Made]:
    """MLA, a leading dense layer, shared experts, exp_probs_b.

    Options: ``groups`` and ``groups_used`` for routing limited to groups, ``fused``.
    """
    q_rank, kv_rank, nope, rope, v_head, d = 128, 128, 64, 32, 64, spec.embd
    heads, shared, dense = spec.heads, 1, 1
    keys |= {
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": kv_rank,
        "attention.key_length": kv_rank + rope,
        "attention.value_length": kv_rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": v_head,
        "attention.head_count_kv": 1,
        "rope.dimension_count": rope,
        "leading_dense_block_count": dense,
        "expert_shared_count": shared,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "vocab_size": spec.vocab,
    }
    if groups := spec.options.get("groups"):
        keys |= {
            "expert_group_count": groups,
            "expert_group_used_count": spec.options.get("groups_used", groups // 2),
        }
    for n in range(spec.layers):
        p = f"blk.{n}."
        yield norm(f"{p}attn_norm", d)
        yield norm(f"{p}attn_q_a_norm", q_rank)
        yield norm(f"{p}attn_kv_a_norm", kv_rank)
        yield matrix(spec, f"{p}attn_q_a", (d, q_rank))
        yield matrix(spec, f"{p}attn_q_b", (q_rank, heads * (nope + rope)))
        yield matrix(spec, f"{p}attn_kv_a_mqa", (d, kv_rank + rope))
        yield matrix(spec, f"{p}attn_k_b", (nope, kv_rank, heads))
        yield matrix(spec, f"{p}attn_v_b", (kv_rank, v_head, heads))
        yield matrix(spec, f"{p}attn_output", (heads * v_head, d))
        yield norm(f"{p}ffn_norm", d)
        if n < dense:
            yield from feed_forward(spec, n, spec.ff)
            continue
        yield from experts(spec, n, fused=bool(spec.options.get("fused")))
        yield bias(f"{p}exp_probs_b", (spec.experts,))
        yield from feed_forward(spec, n, spec.ff_exp * shared, "_shexp")


def glm4moe(spec: Spec, keys: dict[str, Any]) -> Iterator[Made]:
    """A leading dense layer, exp_probs_b, a shared expert, and a next-token (MTP) layer at the end.

    ``layers`` counts those of the trunk; the MTP layer comes on top.
    """
    d, dense = spec.embd, 1
    keys |= {
        "block_count": spec.layers + 1,
        "nextn_predict_layers": 1,
        "rope.dimension_count": spec.head // 2,
        "leading_dense_block_count": dense,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    for n in range(spec.layers + 1):
        p = f"blk.{n}."
        yield norm(f"{p}attn_norm", d)
        yield from attention(spec, n)
        yield bias(f"{p}attn_q", (spec.heads * spec.head,))
        yield bias(f"{p}attn_k", (spec.kv_heads * spec.head,))
        yield bias(f"{p}attn_v", (spec.kv_heads * spec.head,))
        yield norm(f"{p}post_attention_norm", d)
        if n < dense:
            yield from feed_forward(spec, n, spec.ff)
            continue
        yield from experts(spec, n)
        yield bias(f"{p}exp_probs_b", (spec.experts,))
        yield from feed_forward(spec, n, spec.ff_exp, "_shexp")
    p = f"blk.{spec.layers}.nextn."
    yield matrix(spec, f"{p}eh_proj", (2 * d, d))
    yield norm(f"{p}enorm", d)
    yield norm(f"{p}hnorm", d)
    yield norm(f"{p}shared_head_norm", d)


def qwen3next(spec: Spec, keys: dict[str, Any]) -> Iterator[Made]:
    """Gated delta net in all but every second layer, a gated shared expert; option ``fused``."""
    every, state, k_heads, v_heads, conv = 2, 64, 2, 4, 4
    keys |= {
        "full_attention_interval": every,
        "rope.dimension_count": spec.head // 4,
        "expert_shared_feed_forward_length": spec.ff_exp,
        "ssm.conv_kernel": conv,
        "ssm.state_size": state,
        "ssm.group_count": k_heads,
        "ssm.time_step_rank": v_heads,
        "ssm.inner_size": state * v_heads,
    }
    d, channels = spec.embd, state * (2 * k_heads + v_heads)
    for n in range(spec.layers):
        p = f"blk.{n}."
        yield norm(f"{p}attn_norm", d)
        yield norm(f"{p}post_attention_norm", d)
        if (n + 1) % every == 0:
            yield from attention(spec, n, q=2)
        else:
            yield matrix(spec, f"{p}attn_qkv", (d, channels))
            yield matrix(spec, f"{p}attn_gate", (d, state * v_heads))
            yield Made(f"{p}ssm_conv1d.weight", (conv, channels), T.F32, 0.5)
            yield bias(f"{p}ssm_dt", (v_heads,))
            yield Made(f"{p}ssm_a", (v_heads,), T.F32, 1.0, positive=-1)
            yield matrix(spec, f"{p}ssm_ba", (d, 2 * v_heads))
            yield norm(f"{p}ssm_norm", state)
            yield matrix(spec, f"{p}ssm_out", (state * v_heads, d))
        yield from experts(spec, n, fused=bool(spec.options.get("fused")))
        yield Made(f"{p}ffn_gate_inp_shexp.weight", (d,), T.F32, 1.0 / math.sqrt(d))
        yield from feed_forward(spec, n, spec.ff_exp, "_shexp")


ARCHS: dict[str, Callable[[Spec, dict[str, Any]], Iterator[Made]]] = {
    "qwen3moe": qwen3moe,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "glm4moe": glm4moe,
    "qwen3next": qwen3next,
}


def describe(spec: Spec) -> tuple[dict[str, Any], list[Made]]:
    """The metadata below ``ARCH.`` and the tensors of a model, in the order of the file."""
    keys: dict[str, Any] = {
        "block_count": spec.layers,
        "context_length": spec.context,
        "embedding_length": spec.embd,
        "feed_forward_length": spec.ff,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head,
        "attention.value_length": spec.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "expert_count": spec.experts,
        "expert_used_count": spec.top_k,
        "expert_feed_forward_length": spec.ff_exp,
    }
    d, vocab = spec.embd, spec.vocab
    tensors = [
        matrix(spec, "token_embd", (d, vocab), std=spec.embedding_std),
        *ARCHS[spec.arch](spec, keys),
        norm("output_norm", d),
        matrix(spec, "output", (d, vocab), std=3.0 / math.sqrt(d)),
    ]
    return keys, tensors
