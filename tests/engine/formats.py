"""The formats of weights that mlx-lm writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tests.engine import architectures, raw

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
FLOATS = ("float32", "float16", "bfloat16")
AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MICRO = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def affine(bits: int, group: int) -> dict[str, Any]:
    return {"group_size": group, "bits": bits, "mode": "affine"}


def micro(mode: str) -> dict[str, Any]:
    bits, group = MICRO[mode]
    return {"group_size": group, "bits": bits, "mode": mode}


QUANTISED: dict[str, dict[str, Any]] = {
    **{f"affine {bits} bits, group {group}": affine(bits, group) for bits, group in AFFINE},
    **{mode: micro(mode) for mode in MICRO},
}


# What `mbolt-mlx support` says of every architecture; each is tested on qwen3_moe.
NAMES = [
    *FLOATS,
    f"affine {', '.join(map(str, sorted({bits for bits, _ in AFFINE})))} bits "
    f"(groups of {', '.join(map(str, sorted({group for _, group in AFFINE})))})",
    *MICRO,
]


def quantised(
    choose: Callable[[str], dict[str, Any] | None], module: str = "qwen3_moe", **more: Any
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors and config of a small model; ``choose`` says by path how a layer is quantised."""
    model, config = architectures.build(module, **more)
    chosen: dict[str, Any] = {}

    def predicate(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        if not hasattr(layer, "to_quantized"):
            return False
        how = choose(path)
        if how is None or layer.weight.shape[-1] % how["group_size"]:
            return False
        chosen[path] = how
        return how

    nn.quantize(model, class_predicate=predicate)
    config["quantization"] = {**affine(4, 64), **chosen}
    return raw.converted(model), config


def mixed_by_layer(path: str) -> dict[str, Any]:
    """Another format in each layer."""
    return affine(4, 64) if ".layers.0." in path else micro("mxfp4")


def mixed_by_projection(path: str) -> dict[str, Any] | None:
    """Another format in each projection, one of them not quantised."""
    name = path.rpartition(".")[2]
    return {"down_proj": affine(6, 32), "gate_proj": micro("mxfp8")}.get(name)
