#!/usr/bin/env python3
"""Mixture-of-experts GGUFs of random weights that llama.cpp really loads and runs.

    python examples/gguf/random_gguf.py OUT.gguf --arch qwen3moe --quant Q4_K_M
    python examples/gguf/random_gguf.py OUT.gguf --arch qwen3moe --quant Q4_K_M --layers 16 \\
        --experts 64 --top-k 8 --embd 512 --ff-exp 512 --vocab 2048

Tensor names and metadata keys are those that llama.cpp reads for each architecture. Embeddings are
large beside what the layers add, so the routing depends on the token. The text such a model writes
means nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from random_shapes import ARCHS, QUANTS, Made, Spec, describe

T = GGMLQuantizationType
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "IQ4_XS": 30, "MXFP4": 38}
# Standard deviation of a random block's values with scale 1: rms of the codes · rms of the scales.
_UNIT = {T.Q8_0: 73.9, T.Q4_0: 4.63, T.Q4_K: 219.0, T.Q6_K: 1370.0, T.IQ4_XS: 1260.0}


def random_blocks(
    shape: tuple[int, ...], kind: GGMLQuantizationType, std: float, rng: np.random.Generator
) -> np.ndarray:
    """Random values of about ``std`` as the bytes of quantised blocks.

    Every code is as likely as every other, so the values are not normal, but all are finite.

    Args:
        shape: in ggml's order; the first must be whole blocks.
        kind: one of Q8_0, Q4_0, Q4_K, Q6_K, IQ4_XS, MXFP4.
        std: of the values.
        rng: where they come from.

    Returns:
        uint8 ``[…slowest first…, bytes of a row]``.
    """
    elements, size = GGML_QUANT_SIZES[kind]
    rows = (*reversed(shape[1:]), shape[0] // elements * size)
    blocks = rng.integers(0, 256, (math.prod(shape) // elements, size), np.uint8)
    if kind == T.MXFP4:  # exponent − 128 of the block, then codes of rms 5.7
        middle = 128 + round(math.log2(std / 5.7))
        blocks[:, 0] = rng.integers(middle - 1, middle + 2, len(blocks), np.uint8)
        return blocks.reshape(rows)
    # A random sign each block: the codes' own mean is not 0, and would push all tokens one way.
    sign = rng.choice(np.array([-1, 1], np.float16), (len(blocks), 1))
    scale = sign * np.float16(std / _UNIT[kind])
    place = -2 if kind == T.Q6_K else 0
    blocks[:, place : place + 2 or None] = scale.view(np.uint8)
    if kind == T.Q4_K:  # the minimum, for a mean of about 0
        blocks[:, 2:4] = (sign * np.float16(7.5 * std / _UNIT[kind])).view(np.uint8)
    return blocks.reshape(rows)


def values_of(made: Made, rng: np.random.Generator) -> np.ndarray:
    """The tensor's values, or its blocks, slowest dimension first."""
    if made.type not in (T.F32, T.F16):
        return random_blocks(made.shape, made.type, made.std, rng)
    values = rng.standard_normal(tuple(reversed(made.shape)), np.float32) * np.float32(made.std)
    values += np.float32(made.mean)
    if made.positive:
        values = np.abs(values) * made.positive
    return values.astype(np.float16) if made.type == T.F16 else values


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE (as in GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def add_tokenizer(writer: GGUFWriter, size: int) -> None:
    """A byte-level BPE: 256 bytes, some merges, two special tokens, unused ones up to ``size``."""
    if size < 300:
        raise ValueError("a vocabulary has at least 300 tokens")
    letters = byte_alphabet()
    pairs = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), (letters[32], "the")]
    tokens = letters + [a + b for a, b in pairs]
    kinds = [1] * len(tokens)
    special = len(tokens)
    tokens += ["<|end|>", "<|start|>"]
    kinds += [3, 3]
    while len(tokens) < size:
        tokens.append(f"<|unused_{len(tokens)}|>")
        kinds.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(special + 1)
    writer.add_eos_token_id(special)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    )


def add_keys(writer: GGUFWriter, arch: str, keys: dict[str, Any]) -> None:
    """Write ``keys`` below ``arch.``; whole numbers are u32, others f32."""
    for key, value in keys.items():
        kind = (
            GGUFValueType.BOOL
            if isinstance(value, bool)
            else GGUFValueType.UINT32
            if isinstance(value, int)
            else GGUFValueType.FLOAT32
        )
        writer.add_key_value(f"{arch}.{key}", value, kind)


def write_gguf(
    path: Path, spec: Spec, *, seed: int = 0, split_tensors: int = 0, empty_first: bool = False
) -> Path:
    """Write a model; memory is that of one tensor.

    Args:
        path: of the file. A split model is NAME-00001-of-0000N.gguf and so on beside it.
        spec: its shape.
        seed: of the weights.
        split_tensors: tensors in a file of a split model; 0 for a single file.
        empty_first: the first file of a split model has no tensors.

    Returns:
        The path that llama.cpp is given: the file, or the first of a split model.
    """
    keys, tensors = describe(spec)
    writer = GGUFWriter(
        path, spec.arch, split_max_tensors=split_tensors, small_first_shard=empty_first
    )
    writer.add_name(spec.name)
    writer.add_file_type(_FILE_TYPES[spec.quant])
    add_keys(writer, spec.arch, keys)
    add_tokenizer(writer, spec.vocab)
    for made in tensors:
        elements, size = GGML_QUANT_SIZES[made.type]
        shape = tuple(reversed(made.shape))
        writer.add_tensor_info(
            made.name,
            shape,
            np.dtype(np.float32),
            math.prod(shape) // elements * size,
            raw_dtype=made.type,
        )
    count = len(writer.tensors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, made in enumerate(tensors):
        writer.write_tensor_data(values_of(made, np.random.default_rng((seed, number))))
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{count:05d}.gguf") if count > 1 else path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Spec()
    parser.add_argument("output", type=Path)
    parser.add_argument("--arch", choices=[*ARCHS], default=default.arch)
    parser.add_argument("--quant", choices=[*QUANTS], default=default.quant)
    for name in ("layers", "experts", "top_k", "embd", "ff", "ff_exp", "heads", "vocab"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split-tensors", type=int, default=0, help="tensors a file")
    args = parser.parse_args()
    chosen = {k: v for k, v in vars(args).items() if hasattr(default, k)}
    path = write_gguf(
        args.output, replace(default, **chosen), seed=args.seed, split_tensors=args.split_tensors
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
