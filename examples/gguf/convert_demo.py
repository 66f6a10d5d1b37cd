#!/usr/bin/env python3
"""The shipped demo model as a GGUF that llama.cpp runs, with its tokenizer.

    python examples/gguf/convert_demo.py demo.gguf [--type F32|F16|Q8_0] [--model FOLDER]

The folder is a qwen3_moe model in MLX's affine format: packed integers, a scale and a bias a group.
F32 holds exactly the weights that MLX computes with, so both engines route alike. Nothing of MLX is
imported: numpy unpacks the integers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mbolt_mlx.core import files  # noqa: E402
from mbolt_mlx.core.errors import MboltError, UnsupportedError  # noqa: E402
from mbolt_mlx.resources import resource  # noqa: E402
from mbolt_mlx.storage.checkpoint import Checkpoint  # noqa: E402

ARCH = "qwen3moe"
_JSON_MAX = 1 << 26
# Qwen3-MoE's names in MLX and in llama.cpp; N is the layer.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.N.input_layernorm": "blk.N.attn_norm",
    "model.layers.N.self_attn.q_proj": "blk.N.attn_q",
    "model.layers.N.self_attn.k_proj": "blk.N.attn_k",
    "model.layers.N.self_attn.v_proj": "blk.N.attn_v",
    "model.layers.N.self_attn.o_proj": "blk.N.attn_output",
    "model.layers.N.self_attn.q_norm": "blk.N.attn_q_norm",
    "model.layers.N.self_attn.k_norm": "blk.N.attn_k_norm",
    "model.layers.N.post_attention_layernorm": "blk.N.ffn_norm",
    "model.layers.N.mlp.gate": "blk.N.ffn_gate_inp",
    "model.layers.N.mlp.switch_mlp.gate_proj": "blk.N.ffn_gate_exps",
    "model.layers.N.mlp.switch_mlp.up_proj": "blk.N.ffn_up_exps",
    "model.layers.N.mlp.switch_mlp.down_proj": "blk.N.ffn_down_exps",
}


class Weights:
    """The tensors of a model folder as float32, unpacked one at a time."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.quantization = self.checkpoint.config.get("quantization") or {}

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file; bfloat16 is widened to float32."""
        tensor = self.checkpoint.tensors[name]
        fd = files.open_read(self.checkpoint.shards[tensor.shard].path)
        try:
            data = bytearray(tensor.nbytes)
            files.pread_into(fd, [memoryview(data)], tensor.offset)
        finally:
            files.close(fd)
        if tensor.dtype == "BF16":
            wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(tensor.shape)
        kinds = {"F32": "<f4", "F16": "<f2", "U32": "<u4"}
        if tensor.dtype not in kinds:
            raise UnsupportedError(
                "cannot be converted", tensor=name, expected=" or ".join(kinds), found=tensor.dtype
            )
        return np.frombuffer(data, kinds[tensor.dtype]).reshape(tensor.shape)

    def float32(self, module: str) -> np.ndarray:
        """The weight of ``module``, ``[…, outputs, inputs]``: scale · integer + bias."""
        weight = self.raw(f"{module}.weight")
        if f"{module}.scales" not in self.checkpoint.tensors:
            return weight.astype(np.float32)
        own = self.quantization.get(module)
        bits = (own if isinstance(own, dict) else self.quantization)["bits"]
        if 32 % bits:
            raise UnsupportedError("only 2, 4 and 8 bits are unpacked", tensor=module, found=bits)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        codes = (weight[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        scales = self.raw(f"{module}.scales").astype(np.float32)
        biases = self.raw(f"{module}.biases").astype(np.float32)
        grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
        values = grouped * scales[..., None] + biases[..., None]
        return values.reshape(*weight.shape[:-1], -1)


def tensors(weights: Weights, layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's name and the values of each tensor, in the order of the layers."""
    tied = weights.checkpoint.config.get("tie_word_embeddings")
    for mlx, name in NAMES.items():
        if "N" not in mlx and not (mlx == "lm_head" and tied):
            yield f"{name}.weight", weights.float32(mlx)
    for n in range(layers):
        for mlx, name in NAMES.items():
            if ".N." in mlx:
                layer = mlx.replace(".N.", f".{n}.")
                yield f"{name.replace('.N.', f'.{n}.')}.weight", weights.float32(layer)


def add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata that llama.cpp reads of a qwen3moe model."""
    writer.add_name("mbolt demo")
    writer.add_license("mit")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """The byte-level BPE, its special tokens and the chat template.

    `ByteLevel` with ``use_regex`` splits text as GPT-2 does, which llama.cpp calls "gpt-2".
    """
    data = json.loads(files.read_whole(folder / "tokenizer.json", limit=_JSON_MAX))
    config = json.loads(files.read_whole(folder / "tokenizer_config.json", limit=_JSON_MAX))
    model, before = data["model"], data["pre_tokenizer"]
    if model["type"] != "BPE" or before.get("type") != "ByteLevel" or not before.get("use_regex"):
        raise UnsupportedError("only a byte-level BPE split as GPT-2 is converted", path=folder)
    special = {token["content"]: token["id"] for token in data["added_tokens"]}
    ids = {**model["vocab"], **special}
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise UnsupportedError("the ids of the vocabulary have gaps", path=folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(special[config["pad_token"]])
    writer.add_eos_token_id(special[config["eos_token"]])
    writer.add_pad_token_id(special[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])


def convert(folder: Path, output: Path, kind: str = "F32") -> Path:
    """Write the model in ``folder`` as ``output``; matrices become ``kind``, the router stays F32.

    Raises:
        UnsupportedError: when the folder holds something else than a qwen3_moe model.
    """
    weights = Weights(folder)
    config = weights.checkpoint.config
    if config.get("model_type") != "qwen3_moe":
        raise UnsupportedError(
            "cannot be converted", path=folder, expected="qwen3_moe", found=config.get("model_type")
        )
    writer = GGUFWriter(output, ARCH)
    add_config(writer, config)
    writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[kind])
    add_tokenizer(writer, folder)
    chosen = GGMLQuantizationType[kind]
    for name, values in tensors(weights, config["num_hidden_layers"]):
        plain = values.ndim == 1 or "ffn_gate_inp" in name
        type_of = GGMLQuantizationType.F32 if plain else chosen
        writer.add_tensor(name, quants.quantize(values, type_of), raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, help="a model folder (default: the demo model)")
    parser.add_argument("--type", choices=["F32", "F16", "Q8_0"], default="F32")
    args = parser.parse_args()
    try:
        print(convert(args.model or resource("demo"), args.output, args.type))
    except MboltError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
