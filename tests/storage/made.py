"""Makers of tiny safetensors files and model folders, good and bad."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "U8": 1, "I64": 8}


def raw_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file of ``header`` (bytes as they are, else JSON) and ``data``."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], seed: int = 0) -> Path:
    """A good file with random bytes; ``tensors`` maps name → (dtype, shape)."""
    rng = np.random.default_rng(seed)
    header: dict = {"__metadata__": {"format": "mlx"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * WIDTH[dtype]
        header[name] = tensor(shape, position, position + size, dtype)
        position += size
    return raw_file(path, header, rng.bytes(position))


def write_config(folder: Path, **more: object) -> None:
    config = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, **more}
    (folder / "config.json").write_text(json.dumps(config))


def expert_tensors(
    layers: range | list[int] = range(2),
    experts: int = 4,
    hidden: int = 64,
    width: int = 32,
    *,
    quantised: bool = False,
    single: bool = False,
) -> dict[str, tuple[str, list[int]]]:
    """Names and shapes of experts; ``single`` names them one by one."""
    made = {}
    for layer in layers:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            out, into = (hidden, width) if projection == "down_proj" else (width, hidden)
            parts = {"weight": ("F32", [out, into])}
            if quantised:
                parts = {
                    "weight": ("U32", [out, into // 8]),
                    "scales": ("BF16", [out, into // 32]),
                    "biases": ("BF16", [out, into // 32]),
                }
            for part, (dtype, shape) in parts.items():
                base = f"model.layers.{layer}.mlp"
                if single:
                    for e in range(experts):
                        made[f"{base}.experts.{e}.{projection}.{part}"] = (dtype, shape)
                else:
                    made[f"{base}.switch_mlp.{projection}.{part}"] = (dtype, [experts, *shape])
    return made


def model(folder: Path, files: dict[str, dict] | None = None, *, index: bool = False) -> Path:
    """A model folder; ``files`` maps file name → tensors (default: one file of stacked experts)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder)
    files = files or {"model.safetensors": {**expert_tensors(), "model.norm.weight": ("F32", [64])}}
    weights = {}
    for seed, (name, tensors) in enumerate(files.items()):
        safetensors(folder / name, tensors, seed)
        weights.update(dict.fromkeys(tensors, name))
    if index:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def large_model(folder: Path, layers: int = 3, experts: int = 12) -> Path:
    """35 MB: 9 pieces an expert, in two files, experts straddling both."""
    tensors = expert_tensors(range(layers), experts, 1024, 512, quantised=True)
    names = list(tensors)
    half = {n: tensors[n] for n in names if "down_proj" not in n}
    rest = {n: tensors[n] for n in names if "down_proj" in n}
    return model(
        folder,
        {"model-00001-of-00002.safetensors": half, "model-00002-of-00002.safetensors": rest},
        index=True,
    )
