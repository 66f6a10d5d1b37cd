"""Prefetch maps: what they say is where the bytes are, and when they are stale."""

import json
import os
import struct

import gguf
import pytest

from mbolt_gguf.blocks import SLICES, WHOLE
from mbolt_gguf.cli import main as commands
from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import is_stale, make_map, map_path, read_map, write_map
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import GgufError, OutputError, UnsupportedError, UsageError
from tests.gguf.conftest import moe_block, moe_values
from tests.gguf.makers import MODELS, make_gguf
from tests.gguf.test_experts import interleaved

ORDER = ["up", "gate", "gate_up", "down"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Model.open(make_gguf(tmp_path_factory.mktemp("plain") / "m.gguf"))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    return Model.open(make_gguf(folder / "m.gguf", "deepseek2", split=9, empty_first=True))


def test_version_2_to_the_byte(plain):
    data = make_map(plain)
    path = str(plain.path).encode()
    assert struct.unpack_from("<7I", data) == (0x4650424D, 2, 3, 8, 2, 3, len(path))
    assert data[28 : 28 + len(path)] == path
    entries = struct.iter_unpack("<3Q", data[28 + len(path) :])
    tensors = [
        plain.tensors[f"blk.{n}.ffn_{role}_exps.weight"]
        for n in range(3)
        for role in ("up", "gate", "down")
    ]
    assert list(entries) == [(t.offset, t.nbytes // 8, t.nbytes // 8) for t in tensors]


def test_version_3_to_the_byte(split):
    data = make_map(split)
    assert struct.unpack_from("<5I", data) == (0x4650424D, 3, len(split.files), 6, 0)
    at = 20
    for file in split.files:
        stat, path = os.stat(file.path), str(file.path).encode()
        head = (stat.st_size, stat.st_mtime_ns, len(path))
        assert struct.unpack_from("<2QI", data, at) == head
        assert data[at + 20 : at + 20 + len(path)] == path
        at += 20 + len(path)
    records = list(struct.iter_unpack("<4I3Q", data[at:]))
    expected = []
    for layer in (1, 2):
        for role in ("up", "gate", "down"):
            t = split.tensors[f"blk.{layer}.ffn_{role}_exps.weight"]
            each = t.nbytes // 8
            expected.append((layer, t.file, 8, 2, t.offset, each, each))
    assert records == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("files", [0, 7])
def test_a_map_leads_to_the_bytes_of_every_expert(name, files, tmp_path):
    model = Model.open(make_gguf(tmp_path / "m.gguf", name, split=files))
    found = read_map(make_map(model))
    tensors = {t.name: t.data for file in found.files for t in gguf.GGUFReader(file.path).tensors}
    data = [open(file.path, "rb").read() for file in found.files]
    before, roles = None, []
    for r in found.records:
        roles = roles if r.layer == before else []
        rest = [o for o in ORDER if f"blk.{r.layer}.ffn_{o}_exps.weight" in tensors][len(roles) :]
        roles, before = [*roles, rest[0]], r.layer
        whole = tensors[f"blk.{r.layer}.ffn_{rest[0]}_exps.weight"]
        for e in range(r.experts):
            at = r.base + e * r.stride
            assert data[r.file][at : at + r.nbytes] == whole[e].tobytes()
    v2 = not files and name in ("qwen3moe", "gpt-oss", "qwen3next")
    assert found.version == (2 if v2 else 3)
    if found.version == 3:
        for file, own in zip(found.files, model.files, strict=True):
            assert (file.size, file.mtime_ns) == (own.size, own.path.stat().st_mtime_ns)


def test_interleaved_files_have_one_entry_a_layer(write):
    model = Model.open(write(*interleaved(layers=(0, 1))))
    found = read_map(make_map(model))
    assert found.version == 2 and len(found.records) == 2
    for r, y in zip(found.records, find_experts(model), strict=True):
        assert (r.base, r.nbytes, r.stride) == (y.weights[0].tensor.offset, 3264, 4096)
    v3 = read_map(make_map(Model.open(write(*interleaved()))))
    assert v3.version == 3 and [r.layer for r in v3.records] == [1, 2]


@pytest.mark.parametrize("files", [0, 7])
def test_slices_of_blocks(tmp_path, files):
    """Records of a layer in the order of use, each under a name of its own for its file."""
    plain = Model.open(make_gguf(tmp_path / "m.gguf", "glm4moe", split=files))
    path = rewrite(plain.path, None, tmp_path / "i.gguf", layout="interleave", progress=False)
    model = Model.open(path.paths[0])
    found = read_map(make_map(model, blocks=SLICES))
    count = len(model.files)
    assert found.version == 3 and len(found.files) == 3 * count
    assert found.files == found.files[:count] * 3
    by_layer = {}
    for r in found.records:
        by_layer.setdefault(r.layer, []).append(r)
    for y in find_experts(plain):
        assert [r.file // count for r in by_layer[y.layer]] == [0, 1, 2]
        for r, s in zip(by_layer[y.layer], y.weights, strict=True):
            assert (r.nbytes, r.experts, r.top_k) == (s.nbytes, y.experts, y.top_k)
            original = plain.file_of(s.tensor).read_bytes()
            rewritten = open(found.files[r.file].path, "rb").read()
            for e in range(y.experts):
                at, was = r.base + e * r.stride, s.offset(e)
                assert rewritten[at : at + r.nbytes] == original[was : was + s.nbytes]
    with pytest.raises(UnsupportedError, match="slice by slice"):
        make_map(model, blocks=SLICES, version=2)
    with pytest.raises(UsageError, match="unknown blocks 'some'; expected whole or"):
        make_map(model, blocks="some")
    assert make_map(plain, blocks=SLICES) == make_map(plain)


def test_a_map_that_reads_blocks_otherwise_is_stale_only_where_it_matters(tmp_path):
    path, place = make_gguf(tmp_path / "m.gguf"), tmp_path / "map"
    done = rewrite(path, None, tmp_path / "i.gguf", layout="interleave", progress=False).paths[0]
    model = Model.open(done)
    for blocks, other in ((WHOLE, SLICES), (SLICES, WHOLE)):
        write_map(model, place, blocks=blocks)
        assert not is_stale(model, place) and not is_stale(model, place, blocks=blocks)
        assert is_stale(model, place, blocks=other)


@pytest.mark.parametrize(
    "tensors, says",
    [
        ([*moe_block(1)], "some layers have no experts"),
        ([*moe_block(0, roles=("up", "down"))], "two tensors"),
        ([*moe_block(0), *moe_block(1, roles=("gate_up", "down"))], "its layers differ"),
    ],
)
def test_what_version_2_cannot_hold(write, tensors, says):
    model = Model.open(write(moe_values(), tensors))
    with pytest.raises(UnsupportedError, match=says):
        make_map(model, version=2)
    assert read_map(make_map(model)).version == 3


def test_a_split_model_needs_version_3(split):
    with pytest.raises(UnsupportedError, match="split"):
        make_map(split, version=2)


def test_the_default_place_is_the_models_own(plain, split, tmp_path):
    assert map_path(plain) != map_path(split) and map_path(plain).is_relative_to(
        os.environ["XDG_CACHE_HOME"]
    )
    assert is_stale(plain)
    assert write_map(plain) == map_path(plain)
    assert not is_stale(plain)
    copy = tmp_path / plain.path.name
    copy.write_bytes(plain.path.read_bytes())
    assert map_path(Model.open(copy)) != map_path(plain)


def test_when_a_map_is_stale(tmp_path):
    path, place = make_gguf(tmp_path / "m.gguf"), tmp_path / "map"
    model = Model.open(path)
    assert is_stale(model, place)
    for version in (2, 3):
        write_map(model, place, version=version)
        assert not is_stale(model, place)
    os.utime(path, ns=(0, 12345))
    assert is_stale(Model.open(path), place)
    model = Model.open(path)
    write_map(model, place)
    place.write_bytes(place.read_bytes()[:-1])
    assert is_stale(model, place)
    write_map(model, place)
    assert is_stale(Model.open(make_gguf(tmp_path / "m.gguf", "gpt-oss")), place)


def test_a_map_is_never_written_over_the_model(plain):
    before = plain.path.read_bytes()
    with pytest.raises(OutputError, match="the model itself"):
        write_map(plain, plain.path)
    assert plain.path.read_bytes() == before


def test_a_map_replaces_a_map_and_no_other_file(plain, tmp_path):
    place = tmp_path / "a"
    write_map(plain, place)
    write_map(plain, place)
    place.write_bytes(b"")
    write_map(plain, place)
    place.write_bytes(b"GGUF and more")
    with pytest.raises(OutputError, match="it is not a prefetch map; choose another name"):
        write_map(plain, place)
    assert place.read_bytes() == b"GGUF and more"


def test_a_place_where_no_map_can_go(plain, tmp_path):
    os.mkfifo(tmp_path / "ff")
    for name, says in (
        ("ff", "a pipe or a device; name a file"),
        ("nofolder/a.map", "nofolder: no such folder"),
        ("", "a folder; name a file in it"),
    ):
        with pytest.raises(OutputError, match=says):
            write_map(plain, tmp_path / name)
    assert [place.name for place in tmp_path.iterdir()] == ["ff"]


def test_damaged_maps(plain, split):
    for model in (plain, split):
        data = make_map(model)
        for end in range(0, len(data), 7):
            with pytest.raises(GgufError):
                read_map(data[:end])
        with pytest.raises(GgufError):
            read_map(data + b"\0")
    with pytest.raises(GgufError, match="version"):
        read_map(struct.pack("<7I", 0x4650424D, 4, 0, 0, 0, 0, 0))


def test_the_command_chooses_blocks_by_the_drive(tmp_path, capsys):
    path = make_gguf(tmp_path / "m.gguf", ff_exp=256)
    done = rewrite(path, None, tmp_path / "i.gguf", layout="interleave", progress=False).paths[0]
    model, place, probe = Model.open(done), tmp_path / "map", tmp_path / "probe.json"
    chosen = {}
    for name, t_op in (("cheap", 1e-9), ("costly", 1.0)):
        probe.write_text(json.dumps({"t_op_s": t_op, "bytes_per_s": 1e9}))
        for extra in ([], ["--blocks", "auto"], ["--blocks", "whole"], ["--blocks", SLICES]):
            words = ["prefetch-map", str(done), "-o", str(place), "--drive", str(probe), *extra]
            assert commands.main(words) == 0
            chosen[name, *extra[1:]] = place.read_bytes()
            said = "read slice by slice" in capsys.readouterr().out
            assert said == (place.read_bytes() == make_map(model, blocks=SLICES))
    whole, slices = make_map(model), make_map(model, blocks=SLICES)
    assert chosen["cheap",] == chosen["cheap", "auto"] == slices
    assert chosen["costly",] == chosen["costly", "auto"] == whole
    assert {chosen[n, "whole"] for n in ("cheap", "costly")} == {whole}
    assert {chosen[n, SLICES] for n in ("cheap", "costly")} == {slices}
    assert commands.main(["prefetch-map", str(done), "-o", str(place)]) == 0
    assert place.read_bytes() == whole
    probe.write_text("{}")
    assert commands.main(words) == 2
    assert f"{probe}: not the result of a probe" in capsys.readouterr().err


def test_the_command(plain, split, tmp_path, capsys):
    place = tmp_path / "x.mbpf"
    assert commands.main(["prefetch-map", str(split.path), "-o", str(place)]) == 0
    assert "MBPF v3, 2 layers, 6 tensors or slices in " in capsys.readouterr().out
    assert place.read_bytes() == make_map(split)
    assert commands.main(["prefetch-map", str(plain.path)]) == 0
    assert str(map_path(plain)) in capsys.readouterr().out
    assert commands.main(["prefetch-map", str(split.path), "--format", "2"]) == 2
    assert "cannot hold this model" in capsys.readouterr().err
