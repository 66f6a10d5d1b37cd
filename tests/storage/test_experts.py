import re

import numpy as np
import pytest

from mbolt_mlx.core.errors import CheckpointError, UnsupportedError
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import find_experts
from tests.storage.made import expert_tensors, model, write_config

PLAIN = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def found(folder):
    return find_experts(Checkpoint.open(folder))


def made(tmp_path, tensors, **config):
    folder = model(tmp_path / "m", {"model.safetensors": tensors})
    if config:
        write_config(folder, **config)
    return folder


def test_stacked(tmp_path):
    layers = found(made(tmp_path, expert_tensors(experts=4)))
    assert [y.layer for y in layers] == [0, 1]
    assert layers[0].module == "model.layers.0.mlp.switch_mlp"
    assert [p.name for p in layers[0].pieces] == PLAIN
    assert layers[0].pieces[2].shape == (64, 32) and layers[0].block_bytes == 3 * 64 * 32 * 4
    assert layers[0].files.dtype == np.int32 and layers[0].offsets.dtype == np.int64
    assert layers[0].offsets.shape == (3, 4)
    assert (np.diff(layers[0].offsets[0]) == 64 * 32 * 4).all()


def test_quantised_pieces_come_in_the_fixed_order(tmp_path):
    tensors = expert_tensors(quantised=True)
    layers = found(made(tmp_path, dict(reversed(tensors.items()))))
    assert [p.name for p in layers[0].pieces] == [
        f"{q}.{part}"
        for q in ("gate_proj", "up_proj", "down_proj")
        for part in ("weight", "scales", "biases")
    ]


def test_named_one_by_one_and_stacked_hold_the_same_bytes(tmp_path):
    """Each per-expert tensor is found under the stacked name that mlx-lm gives it."""
    folder = made(tmp_path, expert_tensors(single=True, experts=12))
    checkpoint = Checkpoint.open(folder)
    layers = find_experts(checkpoint)
    assert layers[1].module == "model.layers.1.mlp.switch_mlp" and layers[1].experts == 12
    for i, piece in enumerate(layers[1].pieces):
        for e in range(12):
            t = checkpoint.tensors[f"model.layers.1.mlp.experts.{e}.{piece.name}"]
            assert layers[1].offsets[i, e] == t.offset and piece.nbytes == t.nbytes


def test_experts_that_straddle_shards(tmp_path):
    tensors = expert_tensors(single=True, experts=6)
    files = {f"model-{i + 1:05d}-of-00003.safetensors": {} for i in range(3)}
    for i, (name, t) in enumerate(tensors.items()):
        files[f"model-{i % 3 + 1:05d}-of-00003.safetensors"][name] = t
    folder = model(tmp_path / "m", files, index=True)
    checkpoint = Checkpoint.open(folder)
    layer = find_experts(checkpoint)[0]
    assert len(np.unique(layer.files)) == 3
    for i, piece in enumerate(layer.pieces):
        for e in range(6):
            t = checkpoint.tensors[f"model.layers.0.mlp.experts.{e}.{piece.name}"]
            assert (layer.files[i, e], layer.offsets[i, e]) == (t.shard, t.offset)


def test_mixtral_names(tmp_path):
    tensors = {
        re.sub(r"\.mlp\.experts", ".block_sparse_moe.experts", n)
        .replace("gate_proj", "w1")
        .replace("up_proj", "w3")
        .replace("down_proj", "w2"): t
        for n, t in expert_tensors(single=True).items()
    }
    layers = found(made(tmp_path, tensors, model_type="mixtral"))
    assert layers[0].module == "model.layers.0.block_sparse_moe.switch_mlp"
    assert [p.name for p in layers[0].pieces] == PLAIN
    assert layers[0].pieces[2].shape == (64, 32)


@pytest.mark.parametrize(
    ("container", "module"),
    [("mlp.experts", "mlp.experts"), ("experts.switch_glu", "experts.switch_glu")],
)
def test_other_container_names(tmp_path, container, module):
    tensors = {n.replace("mlp.switch_mlp", container): t for n, t in expert_tensors().items()}
    assert found(made(tmp_path, tensors))[0].module == f"model.layers.0.{module}"


def test_stacked_in_place_by_afmoe(tmp_path):
    folder = made(tmp_path, expert_tensors(single=True), model_type="afmoe")
    assert found(folder)[0].module == "model.layers.0.mlp.experts"


def test_fc1_fc2_and_phixtral_names(tmp_path):
    tensors = {}
    for e in range(3):
        base = f"transformer.h.0.moe.mlp.{e}"
        tensors |= {f"{base}.fc1.weight": ("F32", [8, 4]), f"{base}.fc1.bias": ("F32", [8])}
        tensors |= {f"{base}.fc2.weight": ("F32", [4, 8]), f"{base}.fc2.bias": ("F32", [4])}
    layer = found(made(tmp_path, tensors, model_type="phixtral"))[0]
    assert layer.module == "transformer.h.0.moe.switch_mlp"
    assert [p.name for p in layer.pieces] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def test_nemotron_projections_are_renamed(tmp_path):
    tensors = {}
    for e in range(3):
        base = f"backbone.layers.1.mixer.experts.{e}"
        tensors |= {f"{base}.up_proj.weight": ("F32", [8, 4])}
        tensors |= {f"{base}.down_proj.weight": ("F32", [4, 8])}
    layer = found(made(tmp_path, tensors, model_type="nemotron_h"))[0]
    assert layer.module == "backbone.layers.1.mixer.switch_mlp" and layer.layer == 1
    assert [p.name for p in layer.pieces] == ["fc1.weight", "fc2.weight"]


def test_bias_and_global_scale(tmp_path):
    tensors = expert_tensors(layers=[0])
    base = "model.layers.0.mlp.switch_mlp.gate_proj"
    tensors |= {f"{base}.bias": ("F32", [4, 32]), f"{base}.global_scale": ("F32", [4])}
    layer = found(made(tmp_path, tensors))[0]
    assert [p.name for p in layer.pieces][:3] == [
        "gate_proj.weight", "gate_proj.bias", "gate_proj.global_scale",
    ]  # fmt: skip
    assert layer.pieces[2].shape == () and layer.pieces[2].nbytes == 4


def test_shared_experts_never_match(tmp_path):
    tensors = expert_tensors(experts=4)
    for shared in ("shared_experts", "shared_expert", "share_expert", "shared_mlp"):
        tensors |= {f"model.layers.0.mlp.{shared}.gate_proj.weight": ("F32", [32, 64])}
        tensors |= {f"model.layers.0.mlp.{shared}.down_proj.weight": ("F32", [64, 32])}
    tensors |= {"model.layers.0.mlp.shared_expert_gate.weight": ("F32", [1, 64])}
    layers = found(made(tmp_path, tensors))
    assert [y.block_bytes for y in layers] == [3 * 64 * 32 * 4] * 2


def test_attention_switch_linear_is_no_expert(tmp_path):
    tensors = expert_tensors() | {"model.layers.0.self_attn.o_a_proj.weight": ("F32", [4, 8, 8])}
    assert len(found(made(tmp_path, tensors))[0].pieces) == 3


def test_dense_first_layers_and_prediction_heads_are_left_out(tmp_path):
    tensors = expert_tensors(layers=[1, 2, 3])
    tensors |= {"model.layers.0.mlp.gate_proj.weight": ("F32", [32, 64])}
    tensors |= {n.replace("model.", "mtp."): t for n, t in expert_tensors(layers=[0]).items()}
    folder = made(tmp_path, tensors, num_hidden_layers=3)
    assert [y.layer for y in found(folder)] == [1, 2]


def test_quantisation_mixed_by_layer_and_projection(tmp_path):
    tensors = expert_tensors(layers=[0]) | expert_tensors(layers=[1], quantised=True)
    base = "model.layers.1.mlp.switch_mlp.down_proj"
    del tensors[f"{base}.scales"], tensors[f"{base}.biases"]
    tensors[f"{base}.weight"] = ("F32", [4, 64, 32])
    layers = found(made(tmp_path, tensors))
    assert len(layers[0].pieces) == 3 and len(layers[1].pieces) == 7


def test_layers_of_different_width(tmp_path):
    tensors = expert_tensors(layers=[0]) | expert_tensors(layers=[1], width=16)
    layers = found(made(tmp_path, tensors))
    assert layers[0].block_bytes == 2 * layers[1].block_bytes


def wrong(folder, *words, error=CheckpointError):
    with pytest.raises(error) as caught:
        found(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_dense_model_is_named_as_such(tmp_path):
    folder = made(tmp_path, {"model.layers.0.mlp.gate_proj.weight": ("F32", [4, 4])})
    wrong(folder, "dense", "qwen3_moe", error=UnsupportedError)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.3.gate_proj.weight_packed",
        "model.layers.0.mlp.experts.3.down_proj.qweight",
        "model.layers.0.block_sparse_moe.input_linear.weight",
        "transformer.blocks.0.ffn.experts.mlp.w1",
    ],
)
def test_layouts_that_are_computed_at_load_are_named(tmp_path, name):
    wrong(made(tmp_path, {name: ("F32", [4, 8, 8])}), name, "convert", error=UnsupportedError)


@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale", "weight_scale_2", "g_idx"])
def test_scales_that_mlx_lm_folds_in_at_load_are_named(tmp_path, part):
    """Raw fp8 and nvfp4: the weights alone would be read as if they were final."""
    name = f"model.layers.1.mlp.experts.2.up_proj.{part}"
    tensors = expert_tensors(single=True) | {name: ("F32", [1])}
    wrong(made(tmp_path, tensors), name, "convert", error=UnsupportedError)


@pytest.mark.parametrize("single", [False, True])
def test_weights_of_a_dtype_that_is_converted_at_load(tmp_path, single):
    tensors = {n: ("U8", t[1]) for n, t in expert_tensors(single=single).items()}
    wrong(made(tmp_path, tensors), "convert", "found U8", error=UnsupportedError)


def test_prediction_heads_in_a_raw_layout_do_not_matter(tmp_path):
    tensors = expert_tensors() | {
        "model.layers.2.mlp.experts.0.up_proj.weight_scale_inv": ("F32", [1]),
        "mtp.layers.0.mlp.experts.gate_up_proj": ("F32", [4, 4, 4]),
    }
    assert len(found(made(tmp_path, tensors, num_hidden_layers=2))) == 2


def test_missing_projection(tmp_path):
    tensors = expert_tensors()
    del tensors["model.layers.1.mlp.switch_mlp.up_proj.weight"]
    wrong(made(tmp_path, tensors), "model.layers.1.mlp.switch_mlp has no up_proj.weight")


def test_scales_without_a_weight(tmp_path):
    tensors = expert_tensors(quantised=True)
    del tensors["model.layers.1.mlp.switch_mlp.up_proj.weight"]
    wrong(made(tmp_path, tensors), "has no up_proj.weight", "layers.1")


def test_missing_expert(tmp_path):
    tensors = expert_tensors(single=True)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    wrong(made(tmp_path, tensors), "layers.1", "expert 2 has no up_proj.weight")


def test_missing_last_piece_of_last_expert(tmp_path):
    tensors = expert_tensors(single=True, quantised=True)
    del tensors["model.layers.1.mlp.experts.3.down_proj.biases"]
    wrong(made(tmp_path, tensors), "expert 3 has no down_proj.biases")


@pytest.mark.parametrize("change", [("F16", [32, 64]), ("F32", [32, 65])])
def test_experts_that_differ(tmp_path, change):
    tensors = expert_tensors(single=True)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = change
    wrong(made(tmp_path, tensors), "experts.1.up_proj.weight", "differs", "expected F32 [32, 64]")


def test_stacked_tensors_of_different_length(tmp_path):
    tensors = expert_tensors()
    tensors["model.layers.0.mlp.switch_mlp.up_proj.weight"] = ("F32", [5, 32, 64])
    wrong(made(tmp_path, tensors), "up_proj.weight", "number of experts differs")


@pytest.mark.parametrize("shape", [[], [4], [4, 32], [0, 32, 64], [4, 0, 64]])
def test_stacked_weight_of_a_shape_that_cannot_be(tmp_path, shape):
    tensors = expert_tensors()
    tensors["model.layers.0.mlp.switch_mlp.gate_proj.weight"] = ("F32", shape)
    wrong(made(tmp_path, tensors), "layers.0.mlp.switch_mlp.gate_proj.weight")


def test_config_with_another_number_of_experts(tmp_path):
    folder = made(tmp_path, expert_tensors(experts=4), num_experts=8)
    wrong(folder, "not the config's", "expected 8", "found 4")


def test_both_layouts_at_once(tmp_path):
    wrong(made(tmp_path, expert_tensors() | expert_tensors(single=True)), "another tensor")


def test_layer_that_has_no_number(tmp_path):
    tensors = {
        f"tail.switch_mlp.{p}.weight": ("F32", [2, 4, 4])
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    wrong(made(tmp_path, tensors), "cannot be told", error=UnsupportedError)


def test_names_are_those_of_the_real_model(tiny_model_q4, tiny_model_per_expert):
    for folder in (tiny_model_q4, tiny_model_per_expert):
        layers = found(folder)
        assert [y.module for y in layers] == [f"model.layers.{i}.mlp.switch_mlp" for i in (0, 1)]
