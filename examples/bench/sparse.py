"""Models of real geometry without a byte of weights: true headers, and holes for the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES = {"U32": 4, "BF16": 2, "U8": 1}


def affine4(hidden: int, width: int) -> dict[str, list[tuple[str, str, list[int]]]]:
    """Pieces of an expert in MLX's affine 4-bit format with groups of 64: projection → pieces."""
    return {
        name: [
            ("weight", "U32", [rows, columns // 8]),
            ("scales", "BF16", [rows, columns // 64]),
            ("biases", "BF16", [rows, columns // 64]),
        ]
        for name, rows, columns in _projections(hidden, width)
    }


def mxfp4(hidden: int, width: int) -> dict[str, list[tuple[str, str, list[int]]]]:
    """Pieces of an expert in MXFP4 with a bias a row, as gpt-oss has them."""
    return {
        name: [
            ("weight", "U32", [rows, columns // 8]),
            ("scales", "U8", [rows, columns // 32]),
            ("bias", "BF16", [rows]),
        ]
        for name, rows, columns in _projections(hidden, width)
    }


def _projections(hidden: int, width: int) -> list[tuple[str, int, int]]:
    return [
        ("gate_proj", width, hidden),
        ("up_proj", width, hidden),
        ("down_proj", hidden, width),
    ]


def write(
    folder: Path,
    config: dict[str, Any],
    pieces: dict[str, list[tuple[str, str, list[int]]]],
    *,
    shards: int,
    container: str = "mlp.switch_mlp",
) -> Path:
    """Write config, index and sparse shards of ``config``'s layers and experts to ``folder``.

    Args:
        pieces: of one expert, by projection.
        container: where the experts are in a layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    layers = config["num_hidden_layers"]
    experts = config.get("num_experts") or config["num_local_experts"]
    where = {}
    for n in range(shards):
        file, header, end = f"model-{n + 1:05d}-of-{shards:05d}.safetensors", {}, 0
        for layer in range(n * layers // shards, (n + 1) * layers // shards):
            for name, parts in pieces.items():
                for kind, dtype, shape in parts:
                    tensor = f"model.layers.{layer}.{container}.{name}.{kind}"
                    nbytes = experts * _SIZES[dtype]
                    for extent in shape:
                        nbytes *= extent
                    header[tensor] = {
                        "dtype": dtype,
                        "shape": [experts, *shape],
                        "data_offsets": [end, end + nbytes],
                    }
                    end += nbytes
                    where[tensor] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
