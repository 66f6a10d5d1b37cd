"""Checkpoints as they are published give the logits of stock mlx-lm, which converts them itself."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model

import mbolt_mlx
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.engine.compute import open_experts
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.locate import open_side_file
from mbolt_mlx.storage.verify import verify
from tests.engine import architectures, raw
from tests.engine.test_architectures import TOP_K, only_the_model, run, same  # noqa: F401

# Whose experts are no ranges of the file.
COMPUTED = {"transposed"}


def load(folder: Path, side_file: Path | None = None):
    return mbolt_mlx.load(str(folder), resident=TOP_K, side_file=side_file)[0]


def packed(folder: Path, path: Path) -> dict | None:
    """Write and verify a side-file; returns what its manifest says was computed."""
    checkpoint = Checkpoint.open(folder)
    layers, computer = open_experts(checkpoint)
    coalesce(checkpoint, layers, path, progress=False, computer=computer)
    layers, computer = open_experts(checkpoint)
    report = verify(checkpoint, layers, path, progress=False, computer=computer)
    assert report.blocks == sum(layer.experts for layer in layers)
    return open_side_file(path, checkpoint, layers).manifest.computed


def check(folder: Path, path: Path, *, computed: bool) -> None:
    stock, _ = load_model(folder)
    wanted = run(stock)
    del stock
    if computed:
        with pytest.raises(UnsupportedError, match="computes.*coalesce"):
            load(folder)
    else:
        same(run(load(folder)), wanted)
    note = packed(folder, path)
    assert (note is not None) == computed
    if note is not None:
        assert note["by"].endswith("sanitize") and note["layers"]
    same(run(load(folder, path)), wanted)


@pytest.mark.parametrize(("module", "layout"), raw.layouts())
def test_raw_layout(module: str, layout: str, tmp_path: Path) -> None:
    # mlx-lm stacks no biases of single experts.
    plain = {"use_bias": False, "mlp_bias": False} if module != "phixtral" else {}
    model, config = architectures.build(module, **plain)
    tensors = raw.RAW[module][layout](raw.converted(model))
    folder = architectures.save(tmp_path / "model", tensors, config)
    check(folder, tmp_path / "experts.safetensors", computed=layout in COMPUTED)


def quantised(module: str, bits: int, mode: str) -> tuple[dict, dict]:
    """Tensors and config of a small model with quantised experts only."""
    model, config = architectures.build(module)
    experts = (".switch_mlp.", ".experts.")
    nn.quantize(
        model, 32, bits, mode=mode,
        class_predicate=lambda path, m: hasattr(m, "to_quantized")
        and any(part in path for part in experts) and "shared" not in path,
    )  # fmt: skip
    return raw.converted(model), config


def test_gpt_oss_blocks(tmp_path: Path) -> None:
    tensors, config = quantised("gpt_oss", 4, "mxfp4")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    folder = architectures.save(tmp_path / "model", raw.gpt_oss(tensors), config)
    check(folder, tmp_path / "experts.safetensors", computed=True)


def test_packed_int4(tmp_path: Path) -> None:
    tensors, config = quantised("deepseek_v3", 4, "affine")
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
    }  # fmt: skip
    folder = architectures.save(tmp_path / "model", raw.int4(tensors), config)
    check(folder, tmp_path / "experts.safetensors", computed=True)


def test_an_expert_that_is_absent_is_named(tmp_path: Path) -> None:
    model, config = architectures.build("qwen3_moe")
    tensors = raw.RAW["qwen3_moe"]["single"](raw.converted(model))
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    folder = architectures.save(tmp_path / "model", tensors, config)
    with pytest.raises(mbolt_mlx.MboltError, match="expert 5 has no up_proj"):
        load(folder)


@pytest.mark.parametrize("layout", ["single", "transposed"])
def test_nothing_is_read_to_find_the_experts(layout: str, tmp_path: Path) -> None:
    module = {"single": "qwen3_moe", "transposed": "llama4"}[layout]
    model, config = architectures.build(module)
    folder = architectures.save(
        tmp_path / "model", raw.RAW[module][layout](raw.converted(model)), config
    )
    del model
    mx.clear_cache()
    before = mx.get_active_memory()
    layers, computer = open_experts(Checkpoint.open(folder))
    assert mx.get_active_memory() - before < 1000
    assert (computer is not None) == (layout == "transposed")
    del layers, computer
