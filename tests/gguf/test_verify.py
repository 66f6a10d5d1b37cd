import re
import shutil

import pytest

from mbolt_gguf.cli.main import main
from mbolt_gguf.header import read_gguf
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_gguf.verify import verify
from mbolt_mlx.core.errors import GgufError, UsageError, VerifyError
from mbolt_mlx.profile.perms import read_perms
from tests.gguf import made
from tests.gguf.conftest import F32, Q8_0, value

LAYOUTS = ["chain", "interleave+chain"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with biases and padding, and its rewrites by layout."""
    folder = tmp_path_factory.mktemp("verify")
    more = [("ffn_up_exps.bias", F32, (33,)), ("exp_probs_b.bias", F32, ())]
    tensors = [("token_embd.weight", F32, (9, 1))]
    for number in (0, 2):
        tensors += made.layer(number, Q8_0, ff=33, more=more)
    model = made.write_model(folder / "m.gguf", tensors)
    made.perms_of(folder / "perms.json", [0, 2])
    perms = read_perms(folder / "perms.json")
    out = {layout: folder / f"{layout}.gguf" for layout in LAYOUTS}
    for layout, path in out.items():
        rewrite(model, perms, path, layout=layout)
    return model, out, perms


@pytest.fixture(params=LAYOUTS)
def pair(request, models, tmp_path):
    """(original, a copy of its rewrite, which may be damaged)."""
    model, out, _ = models
    copy = tmp_path / "copy.gguf"
    shutil.copy(out[request.param], copy)
    return model, copy


def flip(path, offset, bit=1):
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)
        f.seek(offset)
        f.write(bytes([byte[0] ^ bit]))


def differs(model, path, match):
    with pytest.raises(VerifyError, match=match) as caught:
        verify(model, path)
    assert caught.value.exit_code == 1
    return caught.value


def test_a_good_one(models):
    model, out, _ = models
    report = verify(model, out["chain"])
    assert report.bytes == out["chain"].stat().st_size and not report.interleaved
    assert report.experts == 16 and 0 < report.moved <= 16
    assert verify(model, out["interleave+chain"]).interleaved
    verify(out["chain"], out["interleave+chain"])  # both rewritten, each in its own way
    verify(out["interleave+chain"], out["chain"])


def test_any_byte_of_any_tensor(pair):
    """The first, the last and one in the middle of each tensor, one at a time."""
    model, path = pair
    file = read_gguf(path)
    for tensor in file.tensors:
        for offset in {tensor.offset, tensor.offset + tensor.nbytes // 2,
                       tensor.offset + tensor.nbytes - 1}:  # fmt: skip
            flip(path, offset, 16)
            error = differs(model, path, re.escape(tensor.name))
            assert error.offset == offset
            flip(path, offset, 16)
    verify(model, path)


def test_the_expert_of_the_first_difference_is_named(pair):
    model, path = pair
    file = read_gguf(path)
    perm = file.values["mbolt.perm"].get()
    name = next(t.name for t in file.tensors if "blk.2.ffn_" in t.name and "_exps.w" in t.name)
    tensor = next(t for t in file.tensors if t.name == name)
    for position in (6, 3):  # the later one first: the first one of both is named
        flip(path, tensor.offset + position * (tensor.nbytes // 8) + 1)
    differs(model, path, f"expert {perm[8 + 3]}, at position 3,")


def test_padding_that_is_not_zero(pair):
    model, path = pair
    file = read_gguf(path)
    tensor = next(t for t in file.tensors if t.nbytes % 32)
    flip(path, tensor.offset + tensor.nbytes)
    differs(model, path, "padding")


def test_two_experts_swapped(pair):
    model, path = pair
    tensor = next(t for t in read_gguf(path).tensors if "blk.0.ffn_" in t.name and t.nbytes > 9999)
    raw, size = bytearray(path.read_bytes()), tensor.nbytes // 8
    a, b = tensor.offset + size, tensor.offset + 4 * size
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]
    path.write_bytes(raw)
    differs(model, path, "at position 1,")


@pytest.mark.parametrize("old, new", [(b"\x64esa", b"\x64esb"), (b"Made f", b"Made g")])
def test_a_value_of_the_metadata(pair, old, new):
    model, path = pair
    raw = path.read_bytes()
    at = raw.find(b"Made f") if old == b"Made f" else raw.find(b"some.number") + 15
    flip(path, at, 1)
    differs(model, path, "metadata differs at (general.name|some.number)")


def test_a_key_that_is_absent_or_new(pair, tmp_path):
    model, path = pair
    for name, keys in {
        "less": made.values()[:-1],
        "more": made.values(more=[value("other.key", "u32", 1)]),
    }.items():
        tensors = [
            (t.name, t.type, t.shape, model.read_bytes()[t.offset : t.offset + t.nbytes])
            for t in read_gguf(model).tensors
        ]
        (tmp_path / name).write_bytes(made.encode(keys, tensors))
        differs(model, tmp_path / name, "metadata differs at (some.number|other.key)")


def test_a_permutation_that_is_another(pair):
    model, path = pair
    value = read_gguf(path).values["mbolt.perm"]
    raw = bytearray(path.read_bytes())
    at = value.start + 8 + len("mbolt.perm") + 4 + 12
    raw[at : at + 4], raw[at + 4 : at + 8] = raw[at + 4 : at + 8], raw[at : at + 4]
    path.write_bytes(raw)
    differs(model, path, "at position 0,")
    raw[at : at + 4] = raw[at + 4 : at + 8]
    path.write_bytes(raw)
    differs(model, path, "once")


def test_cut_short_and_longer(pair):
    model, path = pair
    size = path.stat().st_size
    with open(path, "ab") as f:
        f.write(bytes(32))
    differs(model, path, "after the last tensor")
    with open(path, "r+b") as f:
        f.truncate(size - 4096)
    differs(model, path, "cut short")


def test_another_model_of_the_same_shape(models, tmp_path):
    model, out, perms = models
    other = made.write_model(
        tmp_path / "o.gguf",
        [(t.name, t.type, t.shape) for t in read_gguf(model).tensors],
        seed=5,
    )
    differs(other, out["chain"], "differs")


def test_no_such_file(models, tmp_path):
    with pytest.raises(GgufError) as caught:
        verify(models[0], tmp_path / "absent.gguf")
    with pytest.raises(GgufError, match="not a regular file"):
        verify(models[0], tmp_path)
    assert caught.value.exit_code == 2


def test_the_original_itself_proves_nothing(models, tmp_path):
    path = tmp_path / "link.gguf"
    path.symlink_to(models[0])
    for other in (models[0], path):
        with pytest.raises(UsageError, match="the same file as the original"):
            verify(models[0], other, progress=False)


def test_split_models_and_the_file_of_the_difference(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf", split=6)
    made.perms_of(tmp_path / "perms.json", range(6))
    out = rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "o.gguf").paths
    verify(model, out[2])  # any file names the model
    tensor = Model.open(out[0]).tensors["blk.3.ffn_down_exps.weight"]
    flip(out[tensor.file], tensor.offset + 77)
    error = differs(model, out[0], "blk.3.ffn_down_exps.weight")
    assert error.path == str(out[tensor.file])


def test_a_model_split_otherwise(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf")
    other = made.typed_model(tmp_path / "n.gguf", split=6)
    differs(model, other, "number of files")


def test_command(models, pair, capsys):
    model, path = pair
    assert main(["verify", str(model), str(path)]) == 0
    assert "every byte is the original's" in capsys.readouterr().err
    tensor = read_gguf(path).tensors[-1]
    flip(path, tensor.offset)
    assert main(["verify", str(model), str(path)]) == 1
    assert f"{path}: tensor {tensor.name}: byte {tensor.offset}" in capsys.readouterr().err
