"""Quantised checkpoints that stock mlx-lm does not run, and so are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from tests.engine import raw
from tests.engine.quantised import (
    AWQ,
    INT4,
    MODELOPT,
    NVFP4,
    SINGLE,
    STACKS_WEIGHTS,
    Made,
    awq,
    experts_in,
    fp8,
    in_attention,
    one_by_one,
    packed,
    published,
    renamed,
)
from tests.engine.raw import W


def unknown(
    module: str, how: dict[str, Any], parts: dict[str, str], names: dict[str, str] | None = None
) -> Made:
    """Experts whose tensors have names that the module does not know."""
    tensors, config = experts_in(module, "affine")
    out = raw.single(names=names)(tensors)
    out = renamed({n: a for n, a in out.items() if not n.endswith(".biases")}, parts)
    return out, published(config, how)


_SCALE = {"scales": "weight_scale"}


def awq_experts(module: str, names: dict[str, str] | None = None) -> Made:
    return awq(module, lambda name: ".experts." in name or in_attention(name), names)


def gptq() -> Made:
    tensors, config = awq_experts("qwen3_moe")
    for name in [n for n in tensors if n.endswith(".qweight")]:
        tensors[name.replace(".qweight", ".g_idx")] = mx.arange(tensors[name].shape[0])
    return tensors, published(config, {**AWQ, "quant_method": "gptq"})


def scaled_nvfp4() -> Made:
    """As compressed-tensors writes it, which kimi_k3 does not know."""
    tensors, config = packed("kimi_k3", "nvfp4", 16, NVFP4)
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        tensors[name.replace("weight_scale", "weight_global_scale")] = mx.array(1.0)
    return tensors, config


def unscaled() -> Made:
    """fp8 whose scales have names that deepseek_v3 drops: stock runs, and answers nonsense."""
    tensors, config = fp8("deepseek_v3")
    return {n.replace("_scale_inv", "_scale"): a for n, a in tensors.items()}, config


# With words of the error.
REFUSED: dict[tuple[str, str], tuple[Callable[[], Made], str]] = {
    ("mixtral", "AWQ"): (lambda: awq_experts("mixtral", W), "after it has stacked.*found awq"),
    ("qwen3_moe", "AWQ"): (lambda: awq_experts("qwen3_moe"), "after it has stacked.*found awq"),
    ("deepseek_v3", "AWQ"): (lambda: awq_experts("deepseek_v3"), "after it has stacked.*found awq"),
    ("qwen3_moe", "GPTQ"): (gptq, "after it has stacked.*found gptq"),
    ("qwen3_moe", "fp8"): (lambda: fp8("qwen3_moe"), "weight_scale_inv.*no place.*found fp8"),
    ("qwen3_moe", "modelopt"): (
        lambda: unknown("qwen3_moe", MODELOPT, _SCALE), "weight_scale: .*found modelopt NVFP4",
    ),
    ("deepseek_v3", "modelopt"): (
        lambda: unknown("deepseek_v3", MODELOPT, _SCALE), "the shape is.*found modelopt NVFP4",
    ),
    ("qwen3_moe", "modelopt fp8"): (
        lambda: unknown("qwen3_moe", {**MODELOPT, "quant_algo": "FP8"}, _SCALE),
        "quant_algo: FP8; found modelopt FP8",
    ),
    ("qwen3_moe", "packed int4"): (
        lambda: unknown("qwen3_moe", INT4, {**_SCALE, "weight": "weight_packed"}),
        "weight_packed.*no place.*found compressed-tensors pack-quantized",
    ),
    ("kimi_k3", "packed int4"): (
        lambda: packed("kimi_k3", "affine", 32, INT4),
        "lacks 6 tensors.*found compressed-tensors pack-quantized",
    ),
    ("kimi_k3", "packed nvfp4 with a scale a tensor"): (
        scaled_nvfp4, "weight_global_scale.*no place.*found compressed-tensors nvfp4",
    ),
    ("glm4_moe", "float-quantized"): (
        lambda: unknown("glm4_moe", {**INT4, "format": "float-quantized"}, _SCALE),
        "unsupported compressed-tensors format 'float-quantized'",
    ),
    ("qwen3_moe", "bitsandbytes"): (
        lambda: unknown("qwen3_moe", {"quant_method": "bitsandbytes"}, {"scales": "weight.absmax"}),
        "absmax.*no place.*found bitsandbytes",
    ),
    **{(m, SINGLE): (lambda m=m: one_by_one(m), "no place for") for m in STACKS_WEIGHTS},
}  # fmt: skip
