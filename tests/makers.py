"""Makers of small model folders that mlx-lm itself loads. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

# mode -> (group size, bits, mlx mode)
QUANTISATIONS = {
    "affine4": (64, 4, "affine"),
    "affine8": (64, 8, "affine"),
    "mxfp4": (32, 4, "mxfp4"),
    "mxfp8": (32, 8, "mxfp8"),
    "nvfp4": (16, 4, "nvfp4"),
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(path: Path, vocab: int = 300) -> int:
    """Write a byte-level tokenizer with a chat template; return the id of its end token.

    ``vocab`` is at least 259: 256 bytes and three special tokens, then fillers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        ids[token] = len(ids)
    while len(ids) < vocab:
        ids[f"<|r{len(ids)}|>"] = len(ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return ids["<|im_end|>"]


def make_model(
    path: str | Path,
    *,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 64,
    width: int = 32,
    vocab: int = 300,
    mode: str = "none",
    dtype: str = "float32",
    shards: int = 1,
    per_expert: bool = False,
    seed: int = 0,
    emb_scale: float = 10.0,
) -> Path:
    """Write a qwen3_moe folder with random weights and return its path.

    Args:
        path: the folder; made when absent.
        layers, experts, top_k, hidden, width: the geometry; ``width`` is one expert's.
        mode: "none" or a key of ``QUANTISATIONS``. Affine groups are 64 wide where the
            geometry allows, else 32.
        dtype: of the unquantised arrays. The CPU runs unquantised experts in float32 only.
        shards: number of files. With several, one expert's pieces lie in different files.
        per_expert: name experts one by one (``experts.N.gate_proj.weight``), unquantised.
        seed: of the weights; the same arguments give the same bytes.
        emb_scale: multiplies the embedding; above 1, the routing depends on the token.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_moe
    from mlx_lm.utils import quantize_model, save_config

    if per_expert and mode != "none":
        raise ValueError("mlx-lm reads per-expert qwen3_moe tensors only unquantised")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    heads = max(1, hidden // 32)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 32,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "vocab_size": vocab,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    config["eos_token_id"] = make_tokenizer(path, vocab)
    mx.random.seed(seed)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight * emb_scale
    model.set_dtype(getattr(mx, dtype))
    if mode != "none":
        group, bits, kind = QUANTISATIONS[mode]
        if kind == "affine" and (hidden % group or width % group):
            group = 32
        model, config = quantize_model(model, config, group, bits, mode=kind)
    tensors = dict(tree_flatten(model.parameters()))
    mx.eval(tensors)
    if per_expert:
        tensors = _one_by_one(tensors)
    save_shards(path, tensors, shards)
    save_config(config, path / "config.json")
    generation = {"eos_token_id": config["eos_token_id"]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def save_shards(path: Path, tensors: dict, shards: int) -> None:
    """Write mlx arrays as ``shards`` safetensors files, dealt out name by name, and an index."""
    import mlx.core as mx

    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = (
            "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        )
        mx.save_safetensors(
            str(path / file), {n: tensors[n] for n in part}, metadata={"format": "mlx"}
        )
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {n: weight_map[n] for n in names},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _one_by_one(tensors: dict) -> dict:
    """Split ``…mlp.switch_mlp.P.weight [E, …]`` into ``…mlp.experts.N.P.weight``."""
    out = {}
    for name, tensor in tensors.items():
        head, found, tail = name.partition(".switch_mlp.")
        if not found:
            out[name] = tensor
            continue
        for n in range(tensor.shape[0]):
            out[f"{head}.experts.{n}.{tail}"] = tensor[n]
    return out
