import pytest

from mbolt_gguf.experts import find_experts
from mbolt_gguf.interleave import plan_block
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.profile.perms import read_perms
from tests.gguf import made
from tests.gguf.conftest import F16, F32, Q8_0


def layers_of(path):
    return find_experts(Model.open(path))


@pytest.mark.parametrize(
    "kind, ff, pages",
    [
        (F16, 128, True),  # 3 pieces of 64 KiB
        (Q8_0, 256, True),  # 3 of 69,632 bytes, 17 pages each
        (Q8_0, 32, False),  # 8,704 and 69,632 bytes: a page more would cost 4 %
        (F32, 1, True),  # 264,192 bytes and half a page
    ],
)
def test_stride_is_whole_pages_where_that_is_cheap(tmp_path, kind, ff, pages):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0, kind, ff=ff))
    layer = layers_of(model)[0]
    block = plan_block(0, layer.experts, layer.pieces)
    used = sum(-(-piece.nbytes // 32) * 32 for piece in layer.pieces)
    assert [start % 32 for start in block.starts] == [0, 0, 0]
    assert block.stride == (used + -used % 4096 if pages else used)
    assert (block.stride % 4096 == 0) == pages


def test_blocks_begin_on_pages_and_are_found_again(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", [*made.layer(0, F16, ff=128), *made.layer(1)])
    rewrite(model, None, tmp_path / "out.gguf", layout="interleave")
    found = layers_of(tmp_path / "out.gguf")
    assert [y.interleaved for y in found] == [True, True]
    assert [p.role for p in found[0].pieces] == ["up", "gate", "down"]
    raw, was = (tmp_path / "out.gguf").read_bytes(), layers_of(model)
    original = model.read_bytes()
    for before, after in zip(was, found, strict=True):
        for a, b in zip(before.pieces, after.pieces, strict=True):
            for e in range(8):
                want = original[a.offset(e) : a.offset(e) + a.nbytes]
                assert raw[b.offset(e) : b.offset(e) + b.nbytes] == want
    assert found[0].weights[0].offset(3) % 4096 == 0


def test_fused_experts_have_two_pieces(tmp_path):
    tensors = made.layer(0, Q8_0, ff=32, roles=("gate_up", "down"))
    model = made.write_model(tmp_path / "m.gguf", tensors)
    rewrite(model, None, tmp_path / "out.gguf", layout="interleave")
    fields = made.check(model, tmp_path / "out.gguf", {})
    assert made.field(fields, "mbolt.ilv.role") == ["gate_up", "down"]


def test_layers_of_other_pieces_are_refused(tmp_path):
    tensors = [*made.layer(0), *made.layer(1, roles=("gate_up", "down"))]
    model = made.write_model(tmp_path / "m.gguf", tensors)
    with pytest.raises(UnsupportedError, match="blk.1.*up, gate, down.*gate_up, down"):
        rewrite(model, None, tmp_path / "out.gguf", layout="interleave")


def test_layers_of_other_types_and_sizes(tmp_path):
    tensors = [*made.layer(0, Q8_0, ff=64), *made.layer(1, F32, ff=33), *made.layer(5, F16)]
    model = made.write_model(tmp_path / "m.gguf", tensors)
    document = made.perms_of(tmp_path / "perms.json", [0, 1, 5])
    perms = read_perms(tmp_path / "perms.json")
    rewrite(model, perms, tmp_path / "out.gguf", layout="interleave+chain")
    made.check(model, tmp_path / "out.gguf", made.orders_of(document, "chain"))


def test_a_layer_across_files_goes_to_the_first_of_them(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", [*made.layer(0), *made.layer(1)], split=3)
    out = rewrite(model, None, tmp_path / "out.gguf", layout="interleave").paths
    made.check(model, out[0], {})
    places = {y.layer: y.weights[0].tensor.file for y in layers_of(out[0])}
    assert places == {y.layer: min(p.tensor.file for p in y.pieces) for y in layers_of(model)}


@pytest.mark.parametrize("layout", ["chain", "chain+pipeline"])
def test_taken_apart_again(tmp_path, layout):
    """From an interleaved file to one that any llama.cpp loads."""
    model = made.typed_model(tmp_path / "m.gguf")
    document = made.perms_of(tmp_path / "perms.json", range(6))
    perms = read_perms(tmp_path / "perms.json")
    rewrite(model, perms, tmp_path / "ilv.gguf", layout="interleave+heat")
    rewrite(tmp_path / "ilv.gguf", perms, tmp_path / "out.gguf", layout=layout)
    fields = made.check(model, tmp_path / "out.gguf", made.orders_of(document, "chain"))
    assert not any(key.startswith("mbolt.ilv") or key == "mbolt.interleaved" for key in fields)
