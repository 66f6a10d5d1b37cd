"""Checkpoints as they are published give the logits of stock mlx-lm, which converts them itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import mbolt_mlx
from mbolt_mlx.cli import main
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.engine.compute import open_experts
from mbolt_mlx.engine.locate import pieces_of
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.locate import open_side_file
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from mbolt_mlx.storage.verify import verify
from tests.engine import architectures, quantised, raw, refused
from tests.engine.test_architectures import (
    TOP_K,
    agree,
    containers,
    only_the_model,  # noqa: F401
    run,
    run_containers,
    same,
)


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


def check(
    folder: Path,
    path: Path,
    *,
    computed: bool,
    run: Callable[[Any], list] = run,
) -> None:
    stock, _ = load_model(folder)
    pieces = [piece for c in containers(stock).values() for piece in pieces_of(c)]
    if any(n.endswith(".weight") and a.dtype in (mx.bfloat16, mx.float16) for n, a in pieces):
        stock.set_dtype(mx.float32)  # the CPU runs no others
    wanted = run(stock)
    del stock
    agree(Checkpoint.open(folder))
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
    forward = run_containers if module in architectures.METAL_ONLY else run
    computed = layout in raw.COMPUTED
    check(folder, tmp_path / "experts.safetensors", computed=computed, run=forward)


@pytest.mark.parametrize(("module", "layout"), quantised.MAKERS)
def test_quantised_raw_layout(module: str, layout: str, tmp_path: Path) -> None:
    made = quantised.MAKERS[module, layout]()
    folder = quantised.save(tmp_path / "model", layout, made)
    computed = layout in quantised.COMPUTED
    check(folder, tmp_path / "experts.safetensors", computed=computed)


def check_refused(folder: Path, words: str) -> None:
    """In one line, before a weight is read."""
    before = mx.get_active_memory()
    with pytest.raises(UnsupportedError, match=words) as caught:
        load(folder)
    text = str(caught.value)
    assert text.startswith(str(folder)) and "\n" not in text and len(text) < 600
    assert mx.get_active_memory() - before < 20_000  # a layer of experts has ten times that


@pytest.mark.parametrize(("module", "layout"), refused.REFUSED)
def test_what_stock_cannot_load_is_refused(module: str, layout: str, tmp_path: Path) -> None:
    maker, words = refused.REFUSED[module, layout]
    folder = quantised.save(tmp_path / "model", layout, maker())
    with pytest.raises((ValueError, KeyError, TypeError)):
        run(load_model(folder)[0])
    check_refused(folder, words)


def test_bytes_are_not_taken_for_numbers(tmp_path: Path) -> None:
    folder = quantised.save(tmp_path / "model", "fp8", refused.unscaled())
    load_model(folder, lazy=True)  # stock does not notice
    check_refused(folder, "switch_mlp.gate_proj.weight: .* for numbers; found mlx.core.uint8, fp8")


def test_nvfp4_with_a_scale_for_each_expert(tmp_path: Path) -> None:
    folder = quantised.save(tmp_path / "model", "nvfp4", quantised.muse_spark())
    path = tmp_path / "experts.safetensors"
    if mx.default_device() == mx.gpu:
        check(folder, path, computed=True, run=run_containers)
        return
    words = r"layers\.1\.mlp\.experts\.gate_proj\.global_scale: MLX's CPU cannot run"
    check_refused(folder, words)  # before hours of writing a side-file that could not be used
    assert packed(folder, path)["layers"].keys() == {"model.language_model.layers.1.mlp.experts"}
    with pytest.raises(UnsupportedError, match=words):
        load(folder, path)
    blocks, held = mx.load(str(path)), containers(load_model(folder)[0])
    for entry in Manifest.read(manifest_path(path)).layers:
        stored = np.array(next(blocks[name] for name in blocks if name.startswith(entry.module)))
        rows = np.argsort(np.argsort(entry.offsets))
        for piece in entry.pieces:
            projection, _, part = piece.name.rpartition(".")
            array = held[entry.module][projection][part]
            wanted = np.array(array.reshape(entry.experts, -1).view(mx.uint8))
            found = stored[rows, piece.offset : piece.offset + piece.nbytes]
            assert np.array_equal(found, wanted), (entry.layer, piece.name)


def test_what_the_engine_refuses_is_not_written_either(tmp_path: Path, capsys) -> None:
    made = quantised.one_by_one("qwen3_moe")  # by their names alone these could be coalesced
    folder = quantised.save(tmp_path / "model", quantised.SINGLE, made)
    output = tmp_path / "experts"
    assert main.main(["coalesce", "--model", str(folder), "-o", str(output)]) == 2
    assert "no place for 144 of the tensors" in capsys.readouterr().err and not output.exists()


def test_a_quantisation_that_lies_beside_the_config_is_named(tmp_path: Path) -> None:
    made, config = refused.unknown("qwen3_moe", {}, {"scales": "weight_scale"})
    del config["quantization_config"]
    folder = quantised.save(tmp_path / "model", "modelopt", (made, config))
    how = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(how))
    check_refused(folder, "mlx-lm cannot build this model: .*found modelopt NVFP4")


def test_the_commands_do_it(tmp_path: Path, capsys) -> None:
    model, config = architectures.build("llama4")
    folder = architectures.save(
        tmp_path / "model", raw.RAW["llama4"]["transposed"](raw.converted(model)), config
    )
    assert main.main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
    assert "mbolt-mlx coalesce --model" in capsys.readouterr().err
    assert main.main(["coalesce", "--model", str(folder)]) == 0
    assert "computed once" in capsys.readouterr().err
    assert main.main(["verify", "--model", str(folder), "--full"]) == 0
    assert main.main(["inspect", str(folder)]) == 0
    assert "computed by mlx-lm" in capsys.readouterr().out
    stock, _ = load_model(folder)
    model, _ = mbolt_mlx.load(str(folder), resident=TOP_K)
    assert mbolt_mlx.stats(model).side_file
    same(run(model), run(stock))


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
