"""Quantised checkpoints as they are published, made of small models.

Each maker gives the tensors and the config of one layout; the model's own ``sanitize``, or
mlx-lm's loader, makes of them what runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from tests.engine import architectures, raw
from tests.engine.raw import Tensors, W

Made = tuple[Tensors, dict[str, Any]]

INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
MXFP8 = {"quant_method": "mxfp8"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UE8M0 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
# Wider than a block of 128, so that there are several and the last is padded.
_WIDE = {"moe_intermediate_size": 160}


def experts_in(
    module: str,
    mode: str,
    bits: int = 4,
    group: int = 32,
    also: Callable[[str, nn.Module], bool] = lambda path, layer: False,
    **more: Any,
) -> Made:
    """Tensors and config of a small model whose experts are quantised, and what ``also`` says."""
    model, config = architectures.build(module, **more)

    def chosen(path: str, layer: nn.Module) -> bool:
        return isinstance(layer, SwitchLinear) or also(path, layer)

    nn.quantize(model, group, bits, mode=mode, class_predicate=chosen)
    return raw.converted(model), config


def published(config: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """``config`` with its quantisation, which a model with a part for text has there."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "quantization_config": how}}
    return {**config, "quantization_config": how}


def renamed(tensors: Tensors, ends: dict[str, str], only: str = ".experts.") -> Tensors:
    """Other endings for the names that have ``only`` in them."""
    out = {}
    for name, array in tensors.items():
        head, _, last = name.rpartition(".")
        if only in name and last in ends:
            name = f"{head}.{ends[last]}" if ends[last] else head
        out[name] = array
    return out


# --- a tensor for each expert


def one_by_one(module: str) -> Made:
    """What older conversions are: quantised experts that are not stacked."""
    plain = {"use_bias": False, "mlp_bias": False} if module != "phixtral" else {}
    tensors, config = experts_in(module, "affine", **plain)
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "affine"}
    return raw.RAW[module]["single"](tensors), config


def int4(module: str) -> Made:
    """Symmetric packed 4 bits without biases, which are -8 times the scales."""
    tensors, config = experts_in(module, "affine")
    out = {}
    for name, array in raw.single()(tensors).items():
        if ".mlp.experts." not in name:
            out[name] = array
        elif name.endswith(".weight"):
            base = name.removesuffix("weight")
            out[base + "weight_packed"] = array.view(mx.int32)
            out[base + "weight_shape"] = mx.array([array.shape[0], array.shape[1] * 8])
        elif name.endswith(".scales"):
            out[name.removesuffix("scales") + "weight_scale"] = array
    return out, published(config, INT4)


def fp8(module: str, names: dict[str, str] | None = None, **more: Any) -> Made:
    """Bytes with a scale for each 128 by 128 of them."""
    model, config = architectures.build(module, **(more or _WIDE))
    out = {}
    for name, array in raw.single(names=names)(raw.converted(model)).items():
        if ".experts." in name and name.endswith(".weight"):
            out[name + "_scale_inv"] = mx.random.uniform(
                0.5, 2.0, [-(-n // 128) for n in array.shape]
            )
            array = mx.to_fp8(array)
        out[name] = array
    return out, published(config, FP8)


def _deep(module: str, **more: Any) -> dict[str, Any]:
    """Changes to the part of a config that is about text."""
    given = architectures.CONFIGS[module]
    return {"text_config": {**given["text_config"], **more}} if "text_config" in given else more


def fp8_of_a_tensor(module: str) -> Made:
    """A scale for each tensor, and one of the activations."""
    tensors, config = fp8(module, **_deep(module, **_WIDE))
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        tensors[name] = mx.array(0.75)
        tensors[name.replace("weight_scale_inv", "activation_scale")] = mx.array(1.0)
    return tensors, config


def fp8_fused(module: str) -> Made:
    """Gate and up in one, with a scale for each expert."""
    model, config = architectures.build(module)
    made = raw.fused("experts.gate_up_proj", "experts.down_proj")(raw.converted(model))
    for name in [n for n in made if ".experts." in n]:
        made[name + "_scale_inv"] = mx.random.uniform(0.5, 2.0, (architectures.EXPERTS, 1, 1))
        made[name] = mx.to_fp8(made[name])
    return made, published(config, FP8)


def packed(module: str, mode: str, group: int, how: dict[str, Any]) -> Made:
    """kimi_k3's: bytes of two numbers each, and bytes as scales."""
    tensors, config = experts_in(module, mode, group=group)
    out = raw.single(names=W, mlp="block_sparse_moe")(tensors)
    out = renamed(out, {"weight": "weight_packed", "scales": "weight_scale"})
    out = {n: a for n, a in out.items() if not n.endswith(".biases")}
    for name in [n for n in out if n.endswith(".weight_packed")]:
        out[name] = out[name].view(mx.uint8)
    return out, published(config, how)


def mxfp8(*, folded: bool = False) -> Made:
    """minimax_m3_vl's: bytes with a scale for each 32 of a row; perhaps the shared expert last."""

    def shared(path: str, layer: nn.Module) -> bool:
        return folded and ".shared_experts." in path and isinstance(layer, nn.Linear)

    tensors, config = experts_in("minimax_m3_vl", "mxfp8", 8, also=shared)
    if folded:
        config["quantization"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
        return _folded(tensors), config
    out = raw.single(names=W)(tensors)
    out = renamed(out, {"scales": "weight_scale_inv"})
    for name in [n for n in out if ".experts." in n and n.endswith(".weight")]:
        out[name] = out[name].view(mx.uint8)
    return out, published(config, MXFP8)


def _folded(tensors: Tensors) -> Tensors:
    """Gate and up fused, the shared expert one more of the stack."""

    def stack(name: str) -> mx.array:
        shared = tensors[name.replace("switch_mlp", "shared_experts")]
        return mx.concatenate([tensors[name], shared[None]])

    out = {n: a for n, a in tensors.items() if ".switch_mlp." not in n and ".shared_" not in n}
    for name in [n for n in tensors if ".switch_mlp." in n]:
        if ".down_proj." in name:
            out[name] = stack(name)
        elif ".gate_proj." in name:
            both = [stack(name), stack(name.replace("gate_proj", "up_proj"))]
            out[name.replace("gate_proj", "gate_up_proj")] = mx.concatenate(both, axis=1)
    return out


def deepseek_v41(kind: str) -> Made:
    """Published names, experts in fp4 or fp8, attention in fp8; scales are powers of two."""
    bits = {"fp4": 4, "fp8": 8}[kind]

    def attention(path: str, layer: nn.Module) -> bool:
        return kind == "fp8" and path.endswith(("q_a_proj", "o_a_proj"))

    tensors, config = experts_in("deepseek_v41", f"mx{kind}", bits, also=attention)
    out = {}
    for name, array in raw.deepseek_v41(tensors).items():
        if array.dtype == mx.uint32:
            array = array.view(mx.int8 if kind == "fp4" else mx.uint8)
            array = array.reshape(-1, array.shape[-1])
        if name.endswith(".scales"):
            name = name.removesuffix("s")
            array = array.reshape(-1, array.shape[-1])
            array = array[::32] if kind == "fp8" else array  # one for each 32 by 32
            name = f"{name.rpartition('.')[0]}.scale"
        out[name] = mx.contiguous(array)
    return out, published(config, UE8M0)


def muse_spark() -> Made:
    """nvfp4 with a scale for each expert and projection, but in the first and the last layer."""
    model, config = architectures.build("muse_spark")
    nn.quantize(model, 16, 4, mode="nvfp4", class_predicate=model.quant_predicate)
    tensors = raw.converted(model)
    parts = {
        n: tensors.pop(n) for n in list(tensors) if f"{n.rpartition('.')[0]}.scales" in tensors
    }
    out = raw.muse_spark(tensors)
    ends = {"weight": "", "scales": "_weight_scale"}
    for name, array in parts.items():
        base, _, part = name.rpartition(".")
        if "up_proj" in name:
            continue
        if "gate_proj" in name:
            array = mx.concatenate([array, parts[name.replace("gate_proj", "up_proj")]], axis=1)
            base = base.replace("gate_proj", "gate_up_proj")
        out[base + ends[part]] = array.view(mx.uint8)
        columns = (2,) if "gate_proj" in name else ()
        scales = mx.random.uniform(1e-4, 1e-3, (architectures.EXPERTS, *columns))
        out[base + "_weight_scale_2"], out[base + "_input_scale"] = scales, mx.array(1.0)
    return out, published(config, MODELOPT)


def gpt_oss() -> Made:
    """Bytes in blocks of 16, gate and up rows alternating."""
    tensors, config = experts_in("gpt_oss", "mxfp4")
    return raw.gpt_oss(tensors), published(config, {"quant_method": "mxfp4"})


def awq(module: str, chosen: Callable[[str], bool], names: dict[str, str] | None = None) -> Made:
    """Columns of eight numbers in one, for the layers whose names are ``chosen``."""
    model, config = architectures.build(module)
    out: Tensors = {}
    for name, array in raw.single(names=names)(raw.converted(model)).items():
        if not name.endswith(".weight") or array.ndim != 2 or not chosen(name):
            out[name] = array
            continue
        base, (rows, columns) = name.removesuffix("weight"), array.shape
        group = AWQ["group_size"]
        out[base + "qweight"] = mx.random.randint(0, 1 << 30, (columns, rows // 8), mx.int32)
        out[base + "qzeros"] = mx.random.randint(
            0, 1 << 30, (columns // group, rows // 8), mx.int32
        )
        out[base + "scales"] = mx.random.uniform(0.001, 0.01, (columns // group, rows))
    return out, published(config, AWQ)


def in_attention(name: str) -> bool:
    return ".self_attn." in name


# Modules whose sanitize stacks weights, scales and biases of single experts, and those whose
# stacks weights only.
STACKS_ALL = (
    "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "hunyuan", "jamba", "kimi_k25", "kimi_k3", "kimi_vl", "laguna", "longcat_flash",
    "longcat_flash_ngram", "mimo_v2_flash", "minimax_m3_vl", "mistral3", "mistral4", "mixtral",
    "olmoe", "phimoe", "phixtral", "qwen2_moe", "solar_open",
)  # fmt: skip
STACKS_WEIGHTS = (
    "Klear", "bailing_moe_v3", "deepseek_v41", "ernie4_5_moe", "kimi_linear", "lfm2_moe", "mellum",
    "minimax", "nemotron_h", "qwen3_moe", "qwen3_next",
)  # fmt: skip
SINGLE = "single, quantised"

# By module and name of the layout: what makes it. Stock mlx-lm runs all of these on the CPU.
MAKERS: dict[tuple[str, str], Callable[[], Made]] = {
    **{(m, SINGLE): lambda m=m: one_by_one(m) for m in STACKS_ALL},
    ("gpt_oss", "mxfp4 blocks"): gpt_oss,
    **{(m, "packed int4"): lambda m=m: int4(m) for m in ("deepseek_v3", "kimi_k25", "mistral4")},
    **{
        (m, "fp8"): lambda m=m: fp8(m, **_deep(m, **_WIDE))
        for m in (
            "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash", "mistral3",
            "mistral4",
        )
    },
    ("minimax", "fp8"): lambda: fp8("minimax", W, intermediate_size=160),
    ("mistral3", "fp8 with a scale a tensor"): lambda: fp8_of_a_tensor("mistral3"),
    ("mistral4", "fp8 with a scale a tensor"): lambda: fp8_of_a_tensor("mistral4"),
    ("mistral3", "fp8 fused"): lambda: fp8_fused("mistral3"),
    ("mistral4", "fp8 fused"): lambda: fp8_fused("mistral4"),
    ("deepseek_v41", "fp4"): lambda: deepseek_v41("fp4"),
    ("deepseek_v41", "fp8 (ue8m0)"): lambda: deepseek_v41("fp8"),
    ("kimi_k3", "packed mxfp4"): lambda: packed("kimi_k3", "mxfp4", 32, MXFP4),
    ("kimi_k3", "packed nvfp4"): lambda: packed("kimi_k3", "nvfp4", 16, NVFP4),
    ("minimax_m3_vl", "mxfp8"): mxfp8,
    ("minimax_m3_vl", "mxfp8 with the shared expert in the stack"): lambda: mxfp8(folded=True),
    ("mixtral", "AWQ but for the experts"): lambda: awq("mixtral", in_attention, W),
}  # fmt: skip

# Those whose experts are no ranges of the files.
COMPUTED = {
    "fp8", "fp8 with a scale a tensor", "fp8 fused",
    "fp8 (ue8m0)", "mxfp4 blocks", "packed int4",
}  # fmt: skip


# By ending of a layout's names: the dtype of its bytes, which mlx-lm writes as U8.
DTYPES = {
    "fp8": {"weight": "F8_E4M3", "_proj": "F8_E4M3"},
    "fp8 with a scale a tensor": {"weight": "F8_E4M3"},
    "fp8 fused": {"_proj": "F8_E4M3"},
    "fp4": {"scale": "F8_E8M0"},
    "fp8 (ue8m0)": {"weight": "F8_E4M3", "scale": "F8_E8M0"},
    "mxfp8": {"weight": "F8_E4M3", "scale_inv": "F8_E8M0"},
    "packed nvfp4": {"scale": "F8_E4M3"},
    "nvfp4": {"weight_scale": "F8_E4M3"},
}


def save(path: Path, layout: str, made: Made) -> Path:
    """Write a model folder in which bytes have the dtypes that the published files give them."""
    folder = architectures.save(path, *made)
    ends = DTYPES.get(layout, {})
    for file in folder.glob("model*.safetensors"):
        whole = file.read_bytes()
        size = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:size])
        for name, entry in header.items():
            if entry.get("dtype") == "U8":
                kinds = [dtype for end, dtype in ends.items() if name.endswith(end)]
                entry["dtype"] = kinds[0] if kinds else "U8"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[size:])
    return folder
