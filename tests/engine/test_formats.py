"""Every format of weights gives the logits of stock mlx-lm, bit for bit, on the CPU."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import mbolt_mlx
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.locate import build
from mbolt_mlx.engine.swap import install, match
from mbolt_mlx.engine.switch import rebind
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.store import from_shards
from tests.engine import architectures, formats
from tests.engine.test_architectures import (
    HALF,
    TOP_K,
    containers,
    only_the_model,  # noqa: F401
    run,
    same,
    side_file,
)

on_the_cpu = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="about MLX's CPU")


def check(folder: Path, packed: Path, dtype: mx.Dtype | None = None) -> None:
    """Stock (cast to ``dtype``) and ours, from the shards and from the side-file."""
    stock, _ = load_model(folder)
    if dtype is not None:
        stock.set_dtype(dtype)
    wanted = run(stock)
    layers = len(containers(stock))
    del stock
    side_file(folder, packed)
    for resident, source in ((TOP_K, None), (HALF, packed)):
        model, _ = mbolt_mlx.load(str(folder), resident=resident, side_file=source)
        same(run(model), wanted)
        stats = mbolt_mlx.stats(model)
        assert stats.offloaded_layers == layers and stats.decode.misses > 0


@pytest.mark.parametrize("name", formats.QUANTISED)
def test_quantised(name: str, tmp_path: Path) -> None:
    how = formats.QUANTISED[name]
    tensors, config = formats.quantised(lambda path: how, **formats.WIDE)
    assert tensors["model.layers.0.mlp.switch_mlp.down_proj.weight"].dtype == mx.uint32
    check(architectures.save(tmp_path / "model", tensors, config), tmp_path / "experts")


@pytest.mark.parametrize("mix", [formats.mixed_by_layer, formats.mixed_by_projection])
def test_mixed(mix, tmp_path: Path) -> None:
    tensors, config = formats.quantised(mix, **formats.WIDE)
    check(architectures.save(tmp_path / "model", tensors, config), tmp_path / "experts")


@pytest.mark.parametrize("how", ["float32", "affine", "mxfp4"])
def test_biases_follow_their_experts(how: str, tmp_path: Path) -> None:
    table = {"float32": None, "affine": formats.affine(4, 32), "mxfp4": formats.micro("mxfp4")}
    tensors, config = formats.quantised(
        lambda path: table[how] if ".experts." in path else None, "gpt_oss"
    )
    bias = tensors["model.layers.0.mlp.experts.gate_proj.bias"]
    assert bias.shape[0] == architectures.EXPERTS and bias.any()
    check(architectures.save(tmp_path / "model", tensors, config), tmp_path / "experts")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("module", ["qwen3_moe", "gpt_oss"])
@on_the_cpu
def test_16_bits_run_as_float32(module: str, dtype: str, tmp_path: Path) -> None:
    model, config = architectures.build(module)
    model.set_dtype(getattr(mx, dtype))
    tensors = {n: mx.array(a) for n, a in formats.raw.converted(model).items()}
    folder = architectures.save(tmp_path / "model", tensors, {**config, "torch_dtype": dtype})
    check(folder, tmp_path / "experts", mx.float32)
    half, _ = mbolt_mlx.load(str(folder), resident=HALF, side_file=None)
    stats = mbolt_mlx.stats(half)
    assert stats.slot_bytes == sum(
        layer.slots.nbytes for layer in (c._offloaded for c in containers(half).values())
    )
    assert stats.slot_bytes == stats.expert_bytes  # half of the experts, in twice the bytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_survive_fewer_slots(dtype: str, tmp_path: Path) -> None:
    model, config = architectures.build("qwen3_moe")
    model.set_dtype(getattr(mx, dtype))
    folder = architectures.save(tmp_path / "model", formats.raw.converted(model), config)
    model, _ = mbolt_mlx.load(str(folder), resident=HALF, side_file=None)
    wanted = run(model)
    for container in containers(model).values():
        container._offloaded.shrink(2)
        rebind(container)
    same(run(model), wanted)


def test_bfloat16_scales_of_quantised_experts(tmp_path: Path) -> None:
    tensors, config = formats.quantised(lambda path: formats.affine(4, 64), **formats.WIDE)
    tensors = {
        name: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
        for name, array in tensors.items()
    }
    check(architectures.save(tmp_path / "model", tensors, config), tmp_path / "experts")


def scaled(folder: Path) -> Path:
    """A model in nvfp4 with a scale for each expert."""
    tensors, config = formats.quantised(
        lambda path: formats.micro("nvfp4") if "switch_mlp" in path else None, **formats.WIDE
    )
    for name in [n for n in tensors if "switch_mlp" in n and n.endswith(".scales")]:
        path = name.removesuffix(".scales")
        tensors[f"{path}.global_scale"] = mx.random.uniform(0.5, 2.0, (architectures.EXPERTS,))
        config["quantization"][path] = {**config["quantization"][path], "global_scale": True}
    return architectures.save(folder, tensors, config)


@on_the_cpu
def test_a_scale_for_each_expert_is_refused_on_the_cpu(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="nvfp4 with a scale for each expert") as caught:
        mbolt_mlx.load(str(folder), resident=HALF)
    assert "\n" not in str(caught.value)


def test_a_scale_for_each_expert_lies_in_its_slot(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "model")
    checkpoint = Checkpoint.open(folder)
    built = build(checkpoint)
    store = from_shards(checkpoint, built.layers)
    whole = mx.load(str(next(folder.glob("model*1-of*.safetensors"))))
    whole |= mx.load(str(next(folder.glob("model*2-of*.safetensors"))))
    fetcher = Fetcher(store, threads=2, direct=False)
    try:
        places = match(built.model, built.config, store, checkpoint)
        layers = install(places, [3] * len(places), fetcher, "default")
        fetcher.open()
        for container, layer, _ in layers:
            path = layer.slots.store.module
            pieces = [piece.name for piece in layer.slots.store.pieces]
            assert "gate_proj.global_scale" in pieces
            for chosen in ([5, 2], [2, 7], [0, 1], [6, 5]):
                indices = mx.array([chosen], mx.uint32)
                for name in pieces:
                    projection, attribute = name.split(".")

                    def look(rows, slots, c=container, p=projection, a=attribute):
                        found = c[p][a][slots]
                        return found.reshape(*slots.shape, -1)

                    seen = layer.forward(look, mx.zeros((1, 128)), indices)
                    want = whole[f"{path}.{name}"][indices].reshape(1, 2, -1)
                    assert np.array_equal(np.array(seen), np.array(want)), (name, chosen)
    finally:
        fetcher.close()


def test_shard_is_refused(tmp_path: Path) -> None:
    folder = architectures.make(tmp_path / "model", "qwen3_moe")
    model, _ = mbolt_mlx.load(str(folder), resident=HALF)
    with pytest.raises(UnsupportedError, match="split over devices"):
        model.shard()


def test_dense_models_are_refused(tmp_path: Path) -> None:
    model, config = architectures.build("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    folder = architectures.save(tmp_path / "model", formats.raw.converted(model), config)
    with pytest.raises(UnsupportedError, match="dense"):
        mbolt_mlx.load(str(folder), resident=HALF)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no_such_model"}, "no_such_model not supported"),
        ({"model_file": "model.py"}, "outside mlx-lm"),
    ],
)
def test_models_outside_mlx_lm_are_refused(change, reason, tmp_path: Path) -> None:
    model, config = architectures.build("qwen3_moe")
    folder = architectures.save(
        tmp_path / "model", formats.raw.converted(model), {**config, **change}
    )
    with pytest.raises(UnsupportedError, match=reason) as caught:
        mbolt_mlx.load(str(folder), resident=HALF, trust_remote_code=True)
    assert "\n" not in str(caught.value)
