"""Make the MLX model folder from a training checkpoint, with mlx-lm's own functions.

    python convert.py RUN_DIR MODEL_DIR                 4 bits, the router 8, as mlx-lm does it
    python convert.py RUN_DIR MODEL_DIR --dense-bits 8  attention and embedding at 8 bits too
    python convert.py RUN_DIR MODEL_DIR --float         not quantised

Everything that is not quantised, the scales and biases too, is float32: MLX's quantised kernels on
the CPU are many times slower when the activations are of a shorter type.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import data
import mlx.core as mx
import torch
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer
from train import CHECKPOINT, GROUP, bits_of

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def mlx_model(state: dict) -> qwen3_moe.Model:
    """The checkpoint's weights in mlx-lm's model, float32."""
    config = state["config"]
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    weights = []
    for name, tensor in state["model"].items():
        if name.endswith(("gate_proj", "up_proj", "down_proj")):
            name += ".weight"  # the stacked experts have no module of their own in train.py
        weights.append((f"model.{name}", mx.array(tensor.numpy())))
    model.load_weights(weights, strict=True)
    return model


def save_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer's three files; refuse one whose special tokens lie elsewhere."""
    tokenizer = Tokenizer.from_file(str(source))
    ids = [tokenizer.token_to_id(token) for token in data.SPECIALS]
    if ids != [0, 1, 2]:
        raise ValueError(f"{source}: special tokens {data.SPECIALS} have the ids {ids}, not 0-2")
    tokenizer.save(str(folder / "tokenizer.json"))
    text, start, end = data.SPECIALS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": end,
        "pad_token": text,
        "unk_token": None,
        "additional_special_tokens": [start, end],
        "added_tokens_decoder": {
            str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": True}
            for i, token in enumerate(data.SPECIALS)
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def convert(run: Path, folder: Path, dense_bits: int | None) -> int:
    """Write the model folder; ``dense_bits`` None keeps float32. Returns the weights' bytes."""
    state = torch.load(run / CHECKPOINT, weights_only=True)
    config = dict(state["config"])
    model = mlx_model(state)
    if dense_bits is not None:

        def predicate(path: str, module: object) -> bool | dict:
            bits = bits_of(f"{path}.weight", dense_bits)
            return True if bits == 4 else {"group_size": GROUP, "bits": bits}

        model, config = quantize_model(model, config, GROUP, 4, quant_predicate=predicate)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    save_tokenizer(run / "tokenizer.json", folder)
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return (folder / "model.safetensors").stat().st_size


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder that train.py wrote")
    parser.add_argument("folder", type=Path, help="model folder to write")
    parser.add_argument("--dense-bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--float", action="store_true", help="do not quantise")
    args = parser.parse_args()
    try:
        size = convert(args.run, args.folder, None if args.float else args.dense_bits)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.folder}: {size / 1e6:.2f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
