#!/usr/bin/env python3
"""Make a random mixture-of-experts model (mlx-lm's qwen3_moe) that needs no download.

    python examples/bench/make_model.py OUT --preset bench --mode none --emb-scale 10

The weights are noise, so the text is noise; routing, sizes and reads are those of a real model of
this shape. The embedding is multiplied by --emb-scale: above 1 the routing follows the token, which
is what makes a small expert cache miss. Shards are written one at a time, so the memory needed is
about one shard, whatever the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# hidden, layers, heads, key-value heads, head width, experts, top-k, expert width
PRESETS = {
    "tiny": (256, 4, 4, 2, 64, 32, 4, 128),
    "bench": (512, 16, 8, 2, 64, 64, 8, 512),
    "scale64": (256, 4, 4, 2, 64, 64, 8, 128),
    "scale512": (256, 4, 4, 2, 64, 512, 8, 128),
}
# name -> group size, bits, mlx mode
MODES = {
    "affine4": (64, 4, "affine"),
    "affine8": (64, 8, "affine"),
    "mxfp4": (32, 4, "mxfp4"),
    "mxfp8": (32, 8, "mxfp8"),
    "nvfp4": (16, 4, "nvfp4"),
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(preset: str, vocab: int, dtype: str) -> dict:
    """The config.json of ``preset``."""
    hidden, layers, heads, kv_heads, head_dim, experts, top_k, width = PRESETS[preset]
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "torch_dtype": dtype,
        "eos_token_id": 256 + SPECIAL.index("<|im_end|>"),
    }


def write_tokenizer(out: Path, vocab: int) -> None:
    """A byte-level tokenizer: ids 0-255 are the bytes, then the special tokens, then filler."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    pieces += [f"<|unused{n}|>" for n in range(len(pieces), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": 32768,
        "chat_template": CHAT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make(
    out: Path,
    *,
    preset: str,
    mode: str,
    dtype: str = "float32",
    emb_scale: float = 1.0,
    vocab: int = 512,
    seed: int = 0,
    shard_bytes: int = 10**9,
) -> int:
    """Write the model folder ``out`` and return the bytes of its weights."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_moe

    out.mkdir(parents=True, exist_ok=True)
    config = config_of(preset, vocab, dtype)
    mx.random.seed(seed)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))  # lazy: no weight exists yet
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight * emb_scale
    model.set_dtype(getattr(mx, dtype))
    if mode != "none":
        group, bits, name = MODES[mode]
        nn.quantize(model, group_size=group, bits=bits, mode=name)
        config["quantization"] = {"group_size": group, "bits": bits, "mode": name}
        config["quantization_config"] = config["quantization"]
    shards: list[dict] = [{}]
    room = shard_bytes
    for name, value in tree_flatten(model.parameters()):
        if shards[-1] and value.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = value
        room -= value.nbytes
    del model, embedding, value
    total, where = 0, {}
    for n in range(len(shards)):
        shard, shards[n] = shards[n], {}
        file = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(out / file), shard, metadata={"format": "mlx"})
        total += sum(v.nbytes for v in shard.values())
        where.update(dict.fromkeys(shard, file))
        del shard
        mx.clear_cache()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    eos = {"eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(eos))
    write_tokenizer(out, vocab)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--mode", choices=["none", *MODES], default="none", help="quantisation")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--emb-scale", type=float, default=1.0)
    parser.add_argument("--vocab", type=int, default=512, help="tokens, at least 259")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=1.0, help="largest shard, in 10^9 bytes")
    args = parser.parse_args(argv)
    if args.vocab < 256 + len(SPECIAL):
        parser.error("--vocab must be at least 259")
    total = make(
        args.out,
        preset=args.preset,
        mode=args.mode,
        dtype=args.dtype,
        emb_scale=args.emb_scale,
        vocab=args.vocab,
        seed=args.seed,
        shard_bytes=int(args.shard_gb * 1e9),
    )
    print(f"{args.out}: {total} bytes of weights", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
