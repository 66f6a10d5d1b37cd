"""Split models, and which tensors belong to which expert."""

import re
import tarfile

import gguf
import numpy as np
import pytest

from mbolt_gguf import tensor_names
from mbolt_gguf.experts import ROLES, find_experts, permutable
from mbolt_gguf.interleaved import blob_name
from mbolt_gguf.llama_source import Pin, sdist
from mbolt_gguf.model import Model
from mbolt_mlx.core.errors import GgufError, UnsupportedError
from tests.gguf.conftest import F16, F32, I8, Q8_0, moe_block, moe_values, value
from tests.gguf.makers import MODELS, make_gguf


def roles(slices):
    return [s.role for s in slices]


def found_in(path):
    return find_experts(Model.open(path))


# Split models


@pytest.fixture(scope="module", params=[False, True], ids=["", "empty-first"])
def split(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    return make_gguf(folder / "m.gguf", "gpt-oss", split=7, empty_first=request.param)


def test_a_split_model_is_opened_by_any_of_its_files(split, tmp_path):
    whole = Model.open(make_gguf(tmp_path / "m.gguf", "gpt-oss"))
    paths = sorted(split.parent.glob("*.gguf"))
    for path in paths:
        model = Model.open(path)
        assert [f.path for f in model.files] == paths and model.path == paths[0]
        assert model.arch == "gpt-oss" and model.split and not whole.split
        assert {n: (t.type, t.shape) for n, t in model.tensors.items()} == {
            n: (t.type, t.shape) for n, t in whole.tensors.items()
        }
        assert model.size == sum(p.stat().st_size for p in paths)
    layers = find_experts(model)
    assert [y.layer for y in layers] == [0, 1, 2]
    for y in layers:
        for s in (*y.weights, *y.small, *y.router):
            assert model.files[s.tensor.file].path == model.file_of(s.tensor)
            assert s.tensor in model.files[s.tensor.file].tensors


def shards(write, *, count=2, numbers=None, total=None, twice=False):
    paths = []
    for n in range(count):
        number = n if numbers is None else numbers[n]
        keys = [
            *(moe_values() if n == 0 else []),
            value("split.no", "u16", number),
            value("split.count", "u16", count),
            value("split.tensors.count", "i32", total or 5 * count),
        ]
        name = f"m-{n + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(keys, moe_block(0 if twice else n), name=name))
    return paths


def test_a_file_of_a_split_model_is_absent(write):
    first, second = shards(write)
    assert len(Model.open(second).files) == 2
    second.unlink()
    with pytest.raises(GgufError, match="file 2 of the 2 of this model is absent") as error:
        Model.open(first)
    assert str(second) in str(error.value)


def test_a_file_of_a_split_model_under_another_name(write):
    first, second = shards(write)
    other = second.rename(second.with_name("renamed.gguf"))
    with pytest.raises(GgufError, match="NAME-00002-of-00002.gguf"):
        Model.open(other)
    first.rename(second)
    with pytest.raises(GgufError, match="does not say which"):
        Model.open(second)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"numbers": [0, 0]}, "split.no does not match"),
        ({"total": 11}, "expected 11, found 10"),
        ({"twice": True}, "in two files"),
    ],
)
def test_files_that_do_not_belong_together(write, change, says):
    with pytest.raises(GgufError, match=says):
        Model.open(shards(write, **change)[0])


def test_a_model_without_an_architecture(write):
    for values in ([], [value("general.architecture", "u32", 1)]):
        with pytest.raises(GgufError, match="general.architecture"):
            Model.open(write(values, moe_block(0)))


def test_metadata_with_and_without_the_architectures_name(write):
    model = Model.open(write(moe_values(), moe_block(0)))
    assert model.get("expert_count") == model.get("test.expert_count") == 4
    assert model.get("absent") is None and model.get("absent", 3) == 3


# Experts


@pytest.mark.parametrize("name", MODELS)
def test_the_slices_are_the_bytes_that_another_reader_sees(name, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", name)
    data, theirs = path.read_bytes(), {t.name: t for t in gguf.GGUFReader(path).tensors}
    layers = found_in(path)
    covered = set()
    for y in layers:
        permutable(y)
        for s in (*y.weights, *y.small, *y.router):
            covered.add(s.name)
            whole = theirs[s.name].data
            assert len(whole) == y.experts
            for e in range(y.experts):
                at = s.offset(e)
                assert data[at : at + s.nbytes] == np.ascontiguousarray(whole[e]).tobytes()
    stems = ("_exps", "ffn_gate_inp.", "exp_probs")
    assert covered == {n for n in theirs if any(stem in n for stem in stems)}


def test_what_each_architecture_has(tmp_path):
    def layers(name, **more):
        return found_in(make_gguf(tmp_path / "m.gguf", name, **more))

    plain, fused = ["up", "gate", "down"], ["gate_up", "down"]
    for name, weights, numbers, router in [
        ("qwen3moe", plain, [0, 1, 2], ["router.weight"]),
        ("gpt-oss", plain, [0, 1, 2], ["router.weight", "router.bias"]),
        ("deepseek2", plain, [1, 2], ["router.weight", "probs.bias"]),
        ("deepseek2-fused", fused, [1, 2], ["router.weight", "probs.bias"]),
        ("glm4moe", plain, [1, 2, 3], ["router.weight", "probs.bias"]),
        ("qwen3next-fused", fused, [0, 1, 2, 3], ["router.weight"]),
    ]:
        found = layers(name)
        assert [y.layer for y in found] == numbers
        assert all(roles(y.weights) == weights and y.pieces == y.weights for y in found)
        assert all(sorted(roles(y.router)) == sorted(router) for y in found)
    assert {y.group_size for y in layers("deepseek2-groups")} == {4}
    assert set(roles(layers("gpt-oss")[0].small)) == {"up.bias", "gate.bias", "down.bias"}


def test_every_second_layer_and_no_gates(write):
    tensors = [
        ("blk.0.ffn_up.weight", F32, (32, 4)),
        *moe_block(1, roles=("up", "down")),
        ("blk.2.ffn_up.weight", F32, (32, 4)),
        *moe_block(3, roles=("up", "down")),
    ]
    layers = found_in(write(moe_values(layers=4), tensors))
    assert [y.layer for y in layers] == [1, 3]
    assert all(roles(y.weights) == ["up", "down"] and not y.obstacles for y in layers)


def test_scales_by_expert_and_those_that_only_look_like_it(write):
    tensors = [
        *moe_block(0),
        ("blk.0.ffn_up_exps.scale", F32, (4,)),
        ("blk.0.ffn_down_exps.input_scale", F32, (4,)),
        ("blk.0.ffn_gate_inp.scale", F32, (32,)),
        ("blk.0.ffn_gate_inp_shexp.weight", F32, (4,)),
        ("blk.0.ffn_norm_exps.weight", F32, (4,)),
        ("blk.0.attn_sinks.weight", F32, (4,)),
        ("blk.0.exp_probs_b", F32, (4,)),
        ("blk.0.exp_probs_b_vl.bias", F32, (4,)),
    ]
    (layer,) = found_in(write(moe_values(layers=1), tensors))
    permutable(layer)
    assert roles(layer.small) == ["up.scale", "down.input_scale"]
    assert [s.nbytes for s in layer.small] == [4, 4]
    assert roles(layer.router) == ["router.weight", "probs.bias", "probs_vl.bias"]


@pytest.mark.parametrize(
    "tensor",
    [
        ("blk.0.ffn_gate_tid2eid.weight", 26, (2, 100)),
        ("blk.0.ffn_up_chexps.weight", F32, (32, 8, 2)),
        ("blk.0.ffn_new_exps.weight", F32, (32, 3)),
        ("blk.0.something.weight", F32, (32, 4)),
        ("blk.0.ffn_gate_inp_extra", F32, (3,)),
        ("blk.0.exp_probs_b.scale", F32, (4,)),
        ("blk.0.exp_probs_b.bias", F32, (6,)),
        ("blk.0.ffn_up_exps.other", F32, (4,)),
    ],
    ids=lambda t: t[0],
)
def test_what_may_be_indexed_by_expert_and_is_not_known_forbids_another_order(write, tensor):
    (layer,) = found_in(write(moe_values(layers=1), [*moe_block(0), tensor]))
    with pytest.raises(UnsupportedError, match="cannot be reordered") as error:
        permutable(layer)
    assert f"tensor {tensor[0]}" in str(error.value)


def test_a_layer_without_a_router_forbids_another_order(write):
    tensors = [t for t in moe_block(0) if "gate_inp" not in t[0]]
    (layer,) = found_in(write(moe_values(layers=1), tensors))
    with pytest.raises(UnsupportedError, match="no router"):
        permutable(layer)


@pytest.mark.parametrize(
    "values, tensors, says",
    [
        (moe_values(experts=5), moe_block(0), "expected 5, found 4"),
        (moe_values(), [*moe_block(0), ("blk.0.ffn_up_exps.bias", F32, (64, 3))], "found 3"),
        (moe_values(), [*moe_block(0), ("blk.0.ffn_up_exps.scale", F32, ())], "single number"),
        (moe_values(experts=0), moe_block(0), "no usable test.expert_count"),
        (moe_values()[:2], moe_block(0), "no usable test.expert_count"),
        (moe_values(top_k=5), moe_block(0), "expected 1 to 4, found 5"),
        (moe_values(top_k=0), moe_block(0), "expert_used_count"),
        (moe_values()[:3], moe_block(0), "expert_used_count"),
        (moe_values(), moe_block(0, roles=("gate", "up")), "found gate, up"),
        (moe_values(), moe_block(0, roles=("gate_up", "up", "down")), "gate_up, up"),
        (moe_values(), [("blk.0.ffn_down_exps.bias", F32, (32, 4))], "no weight"),
        (
            moe_values(more=[value("test.expert_group_count", "u32", 3)]),
            moe_block(0),
            "a divisor of 4, found 3",
        ),
        (
            moe_values(),
            [("blk.0.ffn_up_exps.weight", F32, (32, 64 * 4)), *moe_block(0, roles=("down",))],
            "not of 3 dimensions",
        ),
    ],
)
def test_metadata_and_tensors_that_contradict_each_other(write, values, tensors, says):
    with pytest.raises(GgufError, match=re.escape(says)):
        found_in(write(values, tensors))


def test_top_k_by_layer(write):
    values = [*moe_values()[:3], value("test.expert_used_count", "u32[]", [1, 3])]
    layers = found_in(write(values, [*moe_block(0), *moe_block(1)]))
    assert [y.top_k for y in layers] == [1, 3]
    with pytest.raises(GgufError, match="for layer 2"):
        found_in(write(values, [*moe_block(1), *moe_block(2)]))


@pytest.mark.parametrize(
    "values, tensors, says",
    [
        (moe_values()[:2], [("blk.0.ffn_up.weight", F32, (32, 4))], "a dense model"),
        (moe_values(), [("blk.0.ffn_up.weight", F32, (32, 4))], "no tensor holds them"),
        (moe_values(), [("blk.0.ffn_up.3.weight", F32, (32, 4))], "convert the model again"),
        (moe_values(), [("v.blk.0.ffn_up_exps.weight", F32, (32, 8, 4))], "a vision encoder's"),
    ],
)
def test_models_without_experts(write, values, tensors, says):
    with pytest.raises(UnsupportedError, match=says):
        found_in(write(values, tensors))


# Interleaved files


def interleaved(*, layers=(1, 2), stride=4096, offsets=(0, 1088, 2176), experts=4, **changes):
    """Keys and tensors of a file whose pieces are 32 × 32 in Q8_0, 1088 bytes each."""
    count = len(offsets)
    keys = {
        "mbolt.interleaved": ("bool", True),
        "mbolt.layers": ("i32[]", layers),
        "mbolt.ilv.pieces": ("u32", count),
        "mbolt.ilv.role": ("str[]", ("up", "gate", "down")[:count]),
        "mbolt.ilv.type": ("u32[]", [Q8_0] * count * len(layers)),
        "mbolt.ilv.ne0": ("u32[]", [32] * count * len(layers)),
        "mbolt.ilv.ne1": ("u32[]", [32] * count * len(layers)),
        "mbolt.ilv.offset": ("u64[]", list(offsets) * len(layers)),
    } | changes
    values = [*moe_values(layers=3), *(value(k, *v) for k, v in keys.items() if v is not None)]
    tensors = [
        t
        for n in layers
        for t in [
            (f"blk.{n}.ffn_gate_inp.weight", F32, (32, experts)),
            (f"blk.{n}.ffn_up_exps.bias", F32, (32, experts)),
            (blob_name(n), I8, (stride, experts)),
        ]
    ]
    return values, tensors


def test_an_interleaved_file(write):
    for changes in (
        {},
        {"mbolt.layers": None},
        {"mbolt.ilv.role": ("str[]", ["up", "gate", "down"] * 2)},
    ):
        path = write(*interleaved(**changes))
        model = Model.open(path)
        layers = find_experts(model)
        assert [y.layer for y in layers] == [1, 2]
        for y in layers:
            permutable(y)
            assert y.interleaved and roles(y.weights) == ["ilv"] and roles(y.small) == ["up.bias"]
            (block,) = y.weights
            assert (block.nbytes, block.stride) == (2176 + 1088, 4096)
            assert roles(y.pieces) == ["up", "gate", "down"] and y.expert_bytes == 3 * 1088
            down = y.pieces[2]
            assert down.name == f"blk.{y.layer}.ffn_down_exps.weight"
            assert (down.type, down.shape, down.nbytes) == (Q8_0, (32, 32), 1088)
            assert down.offset(3) == model.tensors[blob_name(y.layer)].offset + 3 * 4096 + 2176


@pytest.mark.parametrize(
    "change, says",
    [
        ({"mbolt.ilv.pieces": None}, "mbolt.ilv.pieces"),
        ({"mbolt.ilv.pieces": ("u32", 2)}, "mbolt.ilv.role"),
        ({"mbolt.ilv.role": ("str[]", ["up", "up", "down"])}, "mbolt.ilv.role"),
        ({"mbolt.ilv.role": ("str[]", ["up", "odd", "down"])}, "mbolt.ilv.role"),
        ({"mbolt.ilv.role": ("str[]", ["up", "gate_up", "down"])}, "what an expert consists of"),
        ({"mbolt.ilv.type": ("u32[]", [Q8_0] * 5)}, "mbolt.ilv.type"),
        ({"mbolt.ilv.type": ("u32[]", [99] * 6)}, "unknown tensor type"),
        ({"mbolt.ilv.ne0": ("u32[]", [31] * 6)}, "multiple of 32"),
        ({"mbolt.ilv.ne1": None}, "mbolt.ilv.ne1"),
        ({"mbolt.layers": ("i32[]", [0, 1])}, "mbolt.layers"),
        ({"offsets": (0, 1056, 2176)}, "overlaps"),
        ({"offsets": (0, 1089, 2200)}, "odd place"),
        ({"stride": 2176}, "longer than a block"),
        ({"experts": 3}, "expected 4, found 3"),
    ],
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)  # fmt: skip
def test_interleaved_files_that_contradict_themselves(write, change, says):
    with pytest.raises(GgufError, match=re.escape(says)):
        found_in(write(*interleaved(**change)))


def test_experts_that_are_there_twice(write):
    values, tensors = interleaved()
    tensors.append(("blk.1.ffn_up_exps.weight", F16, (32, 32, 4)))
    with pytest.raises(GgufError, match="beside the interleaved"):
        found_in(write(values, tensors))


# Names


def test_names_of_tensors():
    parse = tensor_names.parse
    assert parse("blk.12.ffn_up_exps.weight") == (12, "ffn_up_exps", "weight")
    assert parse("blk.0.exp_probs_b") == (0, "exp_probs_b", "")
    assert parse("blk.0.nextn.eh_proj.weight") == (0, "nextn.eh_proj", "weight")
    assert parse("token_embd.weight") is None and parse("v.blk.0.ffn_up_exps.weight") is None


@pytest.mark.slow
def test_every_name_of_the_pinned_llama_cpp_is_known(user_cache):
    pin = Pin.read()
    with tarfile.open(sdist(pin)) as archive:
        name = f"{pin.file.removesuffix('.tar.gz')}/{pin.tree}/src/llama-arch.cpp"
        text = archive.extractfile(name).read().decode()
    stems = {s for s in re.findall(r'"blk\.%d\.([^"]+)"', text) if "%d" not in s}
    by_expert = {
        *ROLES, "ffn_gate_inp", "exp_probs_b", "exp_probs_b_vl", "ffn_gate_tid2eid",
        "ffn_up_chexps", "ffn_gate_chexps", "ffn_down_chexps",
    }  # fmt: skip
    assert stems - tensor_names.PLAIN_STEMS == by_expert
