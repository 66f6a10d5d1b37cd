"""Opening, finding and verifying side-files: what is believed and what is refused."""

import json
import os
import shutil
import struct
import time

import numpy as np
import pytest

from mbolt_mlx.core.errors import SideFileError, VerifyError
from mbolt_mlx.storage import coalesce as rewriter
from mbolt_mlx.storage import gather
from mbolt_mlx.storage.checkpoint import Checkpoint, Shard, Tensor
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.experts import ExpertLayer, Piece, find_experts
from mbolt_mlx.storage.locate import (
    cache_folder,
    default_side_file,
    find_side_file,
    open_side_file,
)
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from mbolt_mlx.storage.plan import make_plan
from mbolt_mlx.storage.stamp import SAMPLED_PAGES, source_of, stamp_of
from mbolt_mlx.storage.verify import check_schema, verify
from tests.storage.made import expert_tensors, model, safetensors


def opened(folder):
    checkpoint = Checkpoint.open(folder)
    return checkpoint, find_experts(checkpoint)


class Pair:
    """A model of its own and its side-file."""

    def __init__(self, folder, target):
        self.folder, self.target, self.manifest = folder, target, manifest_path(target)
        coalesce(*opened(folder), target)

    def refused(self, *words):
        with pytest.raises(SideFileError) as caught:
            open_side_file(self.target, *opened(self.folder))
        for word in (str(self.target), *words):
            assert word in str(caught.value), str(caught.value)

    def differs(self, *words, full=True):
        with pytest.raises(VerifyError) as caught:
            verify(*opened(self.folder), self.target, full=full, progress=False)
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert caught.value.exit_code == 1
        return caught.value

    def edit(self, change):
        found = json.loads(self.manifest.read_text())
        change(found)
        self.manifest.write_text(json.dumps(found))

    @property
    def shard(self):
        return Checkpoint.open(self.folder).shards[0].path

    def entry(self, layer=0):
        return Manifest.read(self.manifest).layers[layer]


def flip(path, at, *, keep_time=False):
    stat = path.stat()
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def pair(tmp_path):
    tensors = expert_tensors(hidden=100, width=33, single=True)
    files = {"model-a.safetensors": {}, "model-b.safetensors": {}}
    for i, (name, t) in enumerate(tensors.items()):
        files[f"model-{'ab'[i % 2]}.safetensors"][name] = t
    return Pair(model(tmp_path / "model", files), tmp_path / "side.safetensors")


def test_good_one_opens_and_verifies(pair):
    assert open_side_file(pair.target, *opened(pair.folder)).path == pair.target
    report = verify(*opened(pair.folder), pair.target, progress=False)
    assert report.blocks == report.of_blocks == 8
    assert verify(*opened(pair.folder), pair.target, full=False, progress=False).blocks == 8


# --- the source changed


def test_source_with_other_bytes_and_another_time(pair):
    checkpoint = Checkpoint.open(pair.folder)
    t = next(t for t in checkpoint.tensors.values() if t.shard == 0)
    flip(pair.shard, t.offset)  # in the first page, which is always sampled
    pair.refused("source changed", "model-a.safetensors", "coalesce")
    pair.differs("source changed", full=False)


def test_source_with_the_same_bytes_and_another_time_is_the_same(pair):
    os.utime(pair.shard, ns=(5, 5))
    open_side_file(pair.target, *opened(pair.folder))


def test_source_changed_in_place_with_the_same_time_is_found_by_full_verify_only(pair):
    checkpoint, layers = opened(pair.folder)
    at = int(layers[1].offsets[2, 3])
    flip(checkpoint.shards[layers[1].files[2, 3]].path, at + 7, keep_time=True)
    open_side_file(pair.target, *opened(pair.folder))
    pair.differs(
        "layer 1, expert 3, down_proj.weight (its byte 7)", "the source changed after", "0x"
    )


def test_source_of_another_size(pair):
    names = list(Checkpoint.open(pair.folder).tensors)
    tensors = {n: t for n, t in expert_tensors(hidden=100, width=33, single=True).items()}
    own = {n: tensors[n] for n in names if Checkpoint.open(pair.folder).tensors[n].shard == 0}
    safetensors(pair.shard, {**own, "more": ("F32", [3])})
    pair.refused("source changed", "another size")


def test_source_of_another_revision(pair):
    """Same size, but tensors in another order: the header's hash tells."""
    raw = pair.shard.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].replace(b'"format": "mlx"', b'"format": "pt" ')
    pair.shard.write_bytes(raw[:8] + header + raw[8 + length :])
    pair.refused("source changed", "another header")


def test_source_with_one_file_more(pair):
    safetensors(pair.folder / "model-c.safetensors", {"extra": ("F32", [1])})
    pair.refused("another model", "model-c.safetensors")


def test_model_of_another_folder(pair, tiny_model):
    with pytest.raises(SideFileError, match="another model"):
        open_side_file(pair.target, *opened(tiny_model))


# --- the side-file changed


def test_one_flipped_bit_in_a_block(pair):
    entry = pair.entry(1)
    at = int(entry.offsets[2]) + entry.pieces[1].offset + 11
    flip(pair.target, at)
    error = pair.differs("layer 1, expert 2, up_proj.weight (its byte 11)", "damaged", f"byte {at}")
    assert error.offset == at
    pair.differs("layer 1, expert 2", full=False)


def test_the_first_of_many_differences_is_named(pair):
    entry = pair.entry(0)
    for expert in (3, 2, 1):
        flip(pair.target, int(entry.offsets[expert]) + 100)
    pair.differs("layer 0, expert 1, gate_proj.weight (its byte 100)")


def test_flipped_bit_in_the_padding(pair):
    entry = pair.entry(0)
    flip(pair.target, int(entry.offsets[1]) + entry.block_bytes - 1)
    pair.differs("layer 0, expert 1, the padding", "damaged")


def test_flipped_bit_in_a_block_larger_than_a_window(pair, monkeypatch):
    monkeypatch.setattr(gather, "WINDOW_BYTES", 16384)
    entry = pair.entry(1)
    flip(pair.target, int(entry.offsets[3]) + entry.pieces[2].offset + 9000)
    pair.differs("layer 1, expert 3, down_proj.weight (its byte 9000)")


def test_two_swapped_blocks(pair):
    entry = pair.entry(0)
    raw = bytearray(pair.target.read_bytes())
    a, b, n = int(entry.offsets[0]), int(entry.offsets[1]), entry.block_bytes
    raw[a : a + n], raw[b : b + n] = raw[b : b + n], raw[a : a + n]
    pair.target.write_bytes(raw)
    pair.differs("layer 0, expert 0, gate_proj.weight")


@pytest.mark.parametrize("keep", [0, 7, 100, 16384, 50_000, -1])
def test_truncated(pair, keep):
    raw = pair.target.read_bytes()
    pair.target.write_bytes(raw[:keep])
    pair.refused("not a whole side-file")


def test_deleted(pair):
    pair.target.unlink()
    pair.refused("no such file")


def test_bytes_appended(pair):
    with open(pair.target, "ab") as f:
        f.write(b"x")
    pair.refused("bytes after the last tensor")


def test_side_file_is_a_folder_or_a_plain_checkpoint(pair, tiny_model):
    with pytest.raises(SideFileError, match="not a regular file"):
        open_side_file(pair.folder, *opened(pair.folder))
    shutil.copy(tiny_model / "model.safetensors", pair.target)
    pair.refused("not a side-file")


# --- the manifest changed


def test_manifest_absent(pair):
    pair.manifest.unlink()
    pair.refused("manifest", "absent")


def test_manifest_of_another_model(pair, tiny_model, tmp_path):
    coalesce(*opened(tiny_model), tmp_path / "other")
    shutil.copy(manifest_path(tmp_path / "other"), pair.manifest)
    pair.refused("another source")


def test_side_file_of_another_model_beside_this_manifest(pair, tiny_model, tmp_path):
    coalesce(*opened(tiny_model), tmp_path / "other")
    shutil.copy(tmp_path / "other", pair.target)
    pair.refused("another source")


def set_layer(key, value):
    return lambda m: m["layers"][0].update({key: value})


def swap_offsets(m):
    offsets = m["layers"][0]["offsets"]
    offsets[0], offsets[1] = offsets[1], offsets[0]


def swap_layers(m):
    a, b = m["layers"][:2]
    for key in ("offsets", "checksums"):
        a[key], b[key] = b[key], a[key]


def swap_pieces(m):
    """gate and up have the same size: only the digest tells."""
    pieces = m["layers"][0]["pieces"]
    pieces[0]["name"], pieces[1]["name"] = pieces[1]["name"], pieces[0]["name"]


EDITS = {
    "two offsets swapped": swap_offsets,
    "two layers swapped": swap_layers,
    "two pieces swapped": swap_pieces,
    "checksum": lambda m: m["layers"][0]["checksums"].__setitem__(0, "0" * 32),
    "checksum that is none": lambda m: m["layers"][0]["checksums"].__setitem__(0, "x" * 32),
    "checksum too short": lambda m: m["layers"][0]["checksums"].__setitem__(0, "0" * 31),
    "offset not aligned": lambda m: m["layers"][0]["offsets"].__setitem__(0, 16385),
    "offset beyond the end": lambda m: m["layers"][0]["offsets"].__setitem__(0, 1 << 40),
    "offset huge": lambda m: m["layers"][0]["offsets"].__setitem__(0, 1 << 70),
    "offset negative": lambda m: m["layers"][0]["offsets"].__setitem__(0, -16384),
    "offset a float": lambda m: m["layers"][0]["offsets"].__setitem__(0, 16384.0),
    "offset true": lambda m: m["layers"][0]["offsets"].__setitem__(0, True),
    "offset twice": lambda m: m["layers"][0]["offsets"].__setitem__(
        0, m["layers"][0]["offsets"][1]
    ),
    "offsets too few": lambda m: m["layers"][0]["offsets"].pop(),
    "checksums too many": lambda m: m["layers"][0]["checksums"].append("0" * 32),
    "experts": set_layer("experts", 3),
    "experts none": set_layer("experts", 0),
    "module": set_layer("module", "model.layers.9.mlp.switch_mlp"),
    "module a number": set_layer("module", 9),
    "layer twice": set_layer("layer", 1),
    "layer beyond": set_layer("layer", 77),
    "block_bytes": set_layer("block_bytes", 16384),
    "block_bytes not aligned": set_layer("block_bytes", 65535),
    "pieces none": set_layer("pieces", []),
    "pieces not a list": set_layer("pieces", {}),
    "piece outside": lambda m: m["layers"][0]["pieces"][-1].update(offset=1 << 30),
    "piece over another": lambda m: m["layers"][0]["pieces"][1].update(offset=0),
    "piece size": lambda m: m["layers"][0]["pieces"][0].update(bytes=4),
    "piece dtype": lambda m: m["layers"][0]["pieces"][0].update(dtype="I32"),
    "piece dtype unknown": lambda m: m["layers"][0]["pieces"][0].update(dtype="Q4"),
    "piece shape": lambda m: m["layers"][0]["pieces"][0].update(shape=[100, 33]),
    "piece shape negative": lambda m: m["layers"][0]["pieces"][0].update(shape=[-33, -100]),
    "piece twice": lambda m: m["layers"][0]["pieces"][1].update(name="gate_proj.weight"),
    "heat too short": set_layer("heat", [1.0]),
    "heat of words": set_layer("heat", ["a"] * 4),
    "a layer removed": lambda m: m["layers"].pop(),
    "no layers": lambda m: m.update(layers=[]),
    "layers null": lambda m: m.update(layers=[None]),
    "source absent": lambda m: m.pop("source"),
    "source stamp": lambda m: m["source"].update(stamp="0" * 64),
    "shard size": lambda m: m["source"]["shards"][0].update(size=1),
    "shard hash": lambda m: m["source"]["shards"][0].update(header_sha256="no"),
    "shard removed": lambda m: m["source"]["shards"].pop(),
    "version 2": lambda m: m.update(version=2),
    "version a string": lambda m: m.update(version="1"),
    "format": lambda m: m.update(format="other"),
    "computed by a newer one": lambda m: m.update(computed={"sanitize": "x"}),
    "alignment none": lambda m: m["alignment"].update(block=0),
    "order absent": lambda m: m.pop("order"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifest_is_refused_at_opening(pair, name):
    pair.edit(EDITS[name])
    pair.refused()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"format": 1, "format": 2}']
)
def test_manifest_that_is_no_manifest(pair, text):
    pair.manifest.write_text(text)
    pair.refused()


def test_unknown_keys_and_heat_are_accepted(pair):
    def change(m):
        m["future"] = m["source"]["future"] = {"a": 1}
        m["layers"][0].update(heat=[0.5, 1, 0, 2], tier_hint=[0, 1, 1, 0], future=1)

    pair.edit(change)
    side = open_side_file(pair.target, *opened(pair.folder))
    assert side.manifest.layers[0].heat == (0.5, 1, 0, 2)
    check_schema(pair.manifest)


def test_manifest_survives_reading_and_writing(pair, tmp_path):
    first = Manifest.read(pair.manifest)
    first.write(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == pair.manifest.read_bytes()


def test_schema_names_the_key_that_breaks_it(pair):
    pair.edit(lambda m: m["layers"][1]["pieces"][0].update(bytes="many"))
    with pytest.raises(VerifyError, match=r"layers\[1\].pieces\[0\].bytes"):
        check_schema(pair.manifest)


# --- stamps and places


def test_stamp_does_not_depend_on_order_or_time(pair):
    source = source_of(Checkpoint.open(pair.folder), sample=True)
    assert stamp_of(source.shards[::-1]) == source.stamp
    os.utime(pair.shard, ns=(9, 9))
    assert source_of(Checkpoint.open(pair.folder)).stamp == source.stamp


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 20])
def test_samples_of_files_of_any_size(tmp_path, size):
    path = safetensors(tmp_path / "model.safetensors", {"x": ("U8", [size]), "y": ("U8", [1])})
    (tmp_path / "config.json").write_text("{}")
    before = source_of(Checkpoint.open(tmp_path), sample=True).shards[0].sample_sha256
    flip(path, path.stat().st_size - 1)
    assert source_of(Checkpoint.open(tmp_path), sample=True).shards[0].sample_sha256 != before
    assert SAMPLED_PAGES == 64


def test_default_place_is_the_users_cache(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint, layers = opened(pair.folder)
    place = default_side_file(checkpoint)
    stamp = source_of(checkpoint).stamp
    assert place == tmp_path / "cache" / "mbolt" / stamp[:16] / "experts.safetensors"
    assert find_side_file(checkpoint, layers) == (None, None)
    place.parent.mkdir(parents=True)
    coalesce(checkpoint, layers, place)
    side, reason = find_side_file(checkpoint, layers)
    assert side.path == place and reason is None
    manifest_path(place).unlink()
    side, reason = find_side_file(checkpoint, layers)
    assert side is None and "manifest" in reason


def test_relative_xdg_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder().is_absolute()


def test_two_models_with_the_same_headers_do_not_fight_over_one_place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "first", tmp_path / "second"
    model(first)
    model(second)
    raw = bytearray((second / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (second / "model.safetensors").write_bytes(raw)
    for folder in (first, second):
        checkpoint, layers = opened(folder)
        place = default_side_file(checkpoint)
        place.parent.mkdir(parents=True, exist_ok=True)
        coalesce(checkpoint, layers, place)
    places = [default_side_file(Checkpoint.open(f)) for f in (first, second)]
    assert places[0] != places[1] and places[0].parent == places[1].parent
    for folder, place in zip((first, second), places, strict=True):
        assert find_side_file(*opened(folder))[0].path == place


def test_source_that_changed_leaves_a_reason_why_its_side_file_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = model(tmp_path / "m")
    checkpoint, layers = opened(folder)
    place = default_side_file(checkpoint)
    place.parent.mkdir(parents=True)
    coalesce(checkpoint, layers, place)
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    side, reason = find_side_file(*opened(folder))
    assert side is None and "source changed" in reason


def test_two_readers_of_one_side_file(pair):
    one, two = (open_side_file(pair.target, *opened(pair.folder)) for _ in range(2))
    assert one.manifest.as_dict() == two.manifest.as_dict()


def test_replacing_it_does_not_harm_who_has_it_open(pair):
    with open(pair.target, "rb") as f:
        before = f.read()
        coalesce(*opened(pair.folder), pair.target, force=True)
        f.seek(0)
        assert f.read() == before


def test_opening_94_layers_of_128_experts_is_quick(tmp_path, monkeypatch):
    """The size of Qwen3-235B at 4 bits, 128 GB, as a sparse file."""
    pieces = []
    for q in ("gate_proj", "up_proj", "down_proj"):
        pieces.append(Piece(f"{q}.weight", "U32", (1536, 512), 3145728))
        pieces += [Piece(f"{q}.{p}", "BF16", (1536, 64), 196608) for p in ("scales", "biases")]
    blank = np.zeros((9, 128), np.int64)
    layers = tuple(
        ExpertLayer(i, f"model.layers.{i}.mlp.switch_mlp", 128, tuple(pieces), blank, blank)
        for i in range(94)
    )
    shard = Shard(tmp_path / "m", "model.safetensors", 9, 0, "0" * 64, (), 9)
    checkpoint = Checkpoint(tmp_path, {}, (shard,), {"x": Tensor("x", 0, "U8", (0,), 9, 0)})
    source = source_of(checkpoint)
    plan = make_plan(layers, source.stamp)
    rng = np.random.default_rng(0)
    entries = tuple(y.entry([rng.bytes(16).hex() for _ in range(128)]) for y in plan.layers)
    target = tmp_path / "side"
    with open(target, "wb") as f:
        f.write(plan.header(entries))
        f.truncate(plan.size)
    assert plan.size > 127e9
    order = {"kind": "file", "profile_sha256": None}
    Manifest("test", "now", source, plan.alignment, order, entries).write(manifest_path(target))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        side = open_side_file(target, checkpoint, layers)
        times.append(time.perf_counter() - started)
    print(f"opened in {min(times) * 1e3:.0f} ms")
    assert sum(y.experts for y in side.manifest.layers) == 12_032
    assert min(times) < 2


def test_layers_of_other_geometry(pair):
    checkpoint, layers = opened(pair.folder)
    with pytest.raises(SideFileError, match="layer 1 is only in the side-file"):
        open_side_file(pair.target, checkpoint, layers[:1])


def test_verify_does_not_need_the_default_threads(pair, monkeypatch):
    monkeypatch.setattr(rewriter, "THREADS", 1)
    coalesce(*opened(pair.folder), pair.target, force=True)
    verify(*opened(pair.folder), pair.target, progress=False)
