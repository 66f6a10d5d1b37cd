"""The layouts in which the experts of each architecture are published, made from converted ones.

A maker takes the converted tensors by name and gives the raw ones; the model's own ``sanitize``
is what takes them back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Tensors = dict[str, mx.array]
Maker = Callable[[Tensors], Tensors]

_EXPERT = re.compile(
    r"^(?P<parent>.+?)\.(?P<container>experts\.switch_mlp|switch_mlp|switch_glu|experts)"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|fc1|fc2)\.(?P<part>\w+)$"
)
W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def single(child: str = "experts", names: dict[str, str] | None = None, **rename: str) -> Maker:
    """One tensor for each expert: ``PARENT.experts.N.w1.weight``."""

    def make(tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, array in tensors.items():
            found = _EXPERT.match(name)
            if found is None:
                out[name] = array
                continue
            parent = found["parent"]
            for old, new in rename.items():
                parent = re.sub(rf"\.{old}$", f".{new}", parent)
            projection = (names or {}).get(found["projection"], found["projection"])
            for e in range(array.shape[0]):
                out[f"{parent}.{child}.{e}.{projection}.{found['part']}"] = array[e]
        return out

    return make


def fused(gate_up: str, down: str, *, transposed: bool = False, base: str | None = None) -> Maker:
    """Gate and up in one tensor, halves along the output axis; perhaps all transposed."""

    def make(tensors: Tensors) -> Tensors:
        out = {name: array for name, array in tensors.items() if not _EXPERT.match(name)}
        for name, array in tensors.items():
            found = _EXPERT.match(name)
            if found is None or found["projection"] == "up_proj":
                continue
            parent = found["parent"] + (f".{base}" if base else "")
            if found["projection"] == "down_proj":
                out[f"{parent}.{down}"] = _turn(array, transposed)
                continue
            up = tensors[name.replace("gate_proj", "up_proj")]
            both = mx.concatenate([array, up], axis=1)
            out[f"{parent}.{gate_up}"] = _turn(both, transposed)
        return out

    return make


def _turn(array: mx.array, transposed: bool) -> mx.array:
    return mx.contiguous(array.swapaxes(1, 2)) if transposed else array


def deepseek_v41(tensors: Tensors) -> Tensors:
    """The published names, which have no prefix."""
    out = {}
    for name, array in single(names=W)(tensors).items():
        name = re.sub(r"\.mlp\.experts\.(\d+)\.", r".ffn.experts.\1.", name)
        name = name.replace("lm_head.", "head.").replace("model.embed_tokens.", "embed.")
        out[name.removeprefix("model.")] = array
    return out


def gpt_oss(tensors: Tensors) -> Tensors:
    """Gate and up rows alternate, weights are bytes in blocks of 16."""
    out = {name: array for name, array in tensors.items() if not _EXPERT.match(name)}
    ends = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}
    for name, array in tensors.items():
        found = _EXPERT.match(name)
        if found is None or found["projection"] == "up_proj":
            continue
        projection, end = "down_proj", ends[found["part"]]
        if found["projection"] == "gate_proj":
            projection = "gate_up_proj"
            up = tensors[name.replace("gate_proj", "up_proj")]
            array = mx.stack([array, up], axis=2).reshape(array.shape[0], -1, *array.shape[2:])
        if end == "_blocks":
            array = array.view(mx.uint8)
            array = array.reshape(*array.shape[:2], -1, 16)
        out[f"{found['parent']}.experts.{projection}{end}"] = mx.contiguous(array)
    return out


def muse_spark(tensors: Tensors) -> Tensors:
    """Fused experts, projections of their own, and gates in place of their coefficients."""
    gates = {
        "add_attn": "post_attention_residual_gate",
        "add_ffn": "post_feedforward_residual_gate",
    }
    out: Tensors = {}
    for name, array in fused("experts.gate_up_proj", "experts.down_proj")(tensors).items():
        head, _, last = name.rpartition(".")
        gate = gates.get(last.removesuffix("_alpha").removesuffix("_beta"))
        if gate is not None:
            if last.endswith("_alpha"):
                out[f"{head}.{gate}.gate"] = array
        elif head.endswith(".qkvg_proj"):
            attention = head.removesuffix(".qkvg_proj")
            parts = mx.split(array, [64, 96, 128])
            for projection, part in zip(("q", "k", "v", "gate"), parts, strict=True):
                out[f"{attention}.{projection}_proj.{last}"] = mx.contiguous(part)
        else:
            out[name] = array
    return out


def one_more(tensors: Tensors) -> Tensors:
    """Gate and up fused, and the shared expert is the last of the stack."""
    out = dict(tensors)
    for name in tensors:
        found = _EXPERT.match(name)
        if found is None:
            continue
        parent, projection = found["parent"], found["projection"]
        shared = out.pop(f"{parent}.shared_experts.{projection}.weight")
        out[name] = mx.concatenate([out[name], shared[None]])
    return fused("gate_up_proj.weight", "down_proj.weight", base="switch_mlp")(out)


def renamed(pattern: str, by: str) -> Maker:
    """Only other names."""
    return lambda tensors: {re.sub(pattern, by, name): a for name, a in tensors.items()}


def whole(maker: Maker, left_out: str) -> Maker:
    """A whole model's names, of which mlx-lm leaves out ``left_out`` (images, extra heads).

    Convolutions are as published, which tells mlx-lm that the norms are too.
    """

    def make(tensors: Tensors) -> Tensors:
        out = {}
        for name, array in maker(tensors).items():
            name = name.replace("language_model.model.", "model.language_model.")
            if name.endswith("conv1d.weight"):
                array = mx.contiguous(array.swapaxes(1, 2))
            out[name.replace("language_model.lm_head.", "lm_head.")] = array
        out[f"{left_out}.0.weight"] = mx.ones((4, 4))
        return out

    return make


_SINGLE, _SINGLE_W = single(), single(names=W)
_FUSED = fused("experts.gate_up_proj", "experts.down_proj")
_GRANITE = fused("input_linear.weight", "output_linear.weight")


def _prefixed(tensors: Tensors) -> Tensors:
    return renamed("^", "language_model.")(_SINGLE(tensors))


RAW: dict[str, dict[str, Maker]] = {
    "Klear": {"single": _SINGLE},
    "afmoe": {"single": _SINGLE},
    "bailing_hybrid": {"single": _SINGLE},
    "bailing_moe": {"single": _SINGLE},
    "bailing_moe_linear": {"single": _SINGLE},
    "bailing_moe_v3": {"single": _SINGLE},
    "deepseek": {"single": _SINGLE},
    "deepseek_v2": {"single": _SINGLE},
    "deepseek_v3": {"single": _SINGLE},
    "deepseek_v32": {"single": _SINGLE},
    "deepseek_v41": {"single": deepseek_v41},
    "dots1": {"single": _SINGLE},
    "ernie4_5_moe": {"single": _SINGLE},
    "exaone_moe": {"single": _SINGLE},
    "gemma4": {
        "fused": fused("gate_up_proj", "down_proj"),
        "whole": whole(fused("gate_up_proj", "down_proj"), "model.vision_tower"),
    },
    "gemma4_text": {"fused": fused("gate_up_proj", "down_proj")},
    "glm4_moe": {"single": _SINGLE},
    "glm4_moe_lite": {"single": _SINGLE},
    "glm_moe_dsa": {"single": _SINGLE},
    "granitemoe": {"fused": _GRANITE},
    "granitemoehybrid": {"fused": _GRANITE},
    "hunyuan": {"single": _SINGLE},
    "jamba": {"single": _SINGLE},
    "kimi_k25": {"single": _SINGLE},
    "kimi_k3": {"single": single(names=W, mlp="block_sparse_moe")},
    "kimi_linear": {"single": single(names=W, mlp="block_sparse_moe")},
    "kimi_vl": {"single": _SINGLE},
    "laguna": {
        "single": _SINGLE,
        "prefixed": _prefixed,
    },
    "lfm2_moe": {"single": _SINGLE_W},
    "llama4": {
        "transposed": fused("experts.gate_up_proj", "experts.down_proj", transposed=True),
    },
    "longcat_flash": {"single": _SINGLE},
    "longcat_flash_ngram": {"single": _SINGLE},
    "mellum": {"single": _SINGLE},
    "mimo_v2_flash": {"single": _SINGLE},
    "minimax": {"single": _SINGLE_W},
    "minimax_m3_vl": {"single": _SINGLE_W, "one more": one_more},
    "mistral3": {
        "single": _SINGLE,
        "fused": _FUSED,
        "whole": whole(_FUSED, "model.vision_tower"),
    },
    "mistral4": {"single": _SINGLE, "fused": _FUSED},
    "mixtral": {"single": _SINGLE_W},
    "muse_spark": {"fused": muse_spark},
    "nemotron_h": {"single": single(names={"fc1": "up_proj", "fc2": "down_proj"})},
    "olmoe": {"single": _SINGLE},
    "phimoe": {"single": _SINGLE_W},
    "phixtral": {"single": single("mlp")},
    "qwen2_moe": {"single": _SINGLE},
    "qwen3_5": {"prefix": renamed(r"^language_model\.(model\.)", r"\1")},
    "qwen3_5_moe": {
        "fused": _FUSED,
        "prefix": renamed(r"^language_model\.(model\.)", r"\1"),
        "whole": whole(_FUSED, "model.visual"),
    },
    "qwen3_moe": {"single": _SINGLE},
    "qwen3_next": {"single": _SINGLE, "whole": whole(_SINGLE, "mtp")},
    "qwen3_vl_moe": {
        "transposed": fused("experts.gate_up_proj", "experts.down_proj", transposed=True),
        "whole, transposed": whole(
            fused("experts.gate_up_proj", "experts.down_proj", transposed=True), "model.visual"
        ),
    },
    "solar_open": {"single": _SINGLE},
    "step3p5": {"renamed": renamed(r"\.mlp\.switch_mlp\.", ".moe.")},
}


# Those whose experts are no ranges of the files.
COMPUTED = {"transposed", "whole, transposed"}


def layouts() -> list[tuple[str, str]]:
    """(module, layout) of every raw layout that is made here."""
    return [(module, layout) for module, makers in RAW.items() for layout in makers]


def converted(model: Any) -> Tensors:
    """The tensors of a model by name."""
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))
