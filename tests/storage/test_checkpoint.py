import json
import os
import resource
import shutil

import pytest

from mbolt_mlx.core.errors import CheckpointError
from mbolt_mlx.storage.checkpoint import INDEX, Checkpoint
from mbolt_mlx.storage.experts import find_experts
from tests.storage.made import expert_tensors, model, safetensors, write_config

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    tensors = expert_tensors()
    names = list(tensors)
    return model(
        tmp_path / "m",
        {
            FIRST: {n: tensors[n] for n in names[:3]},
            SECOND: {n: tensors[n] for n in names[3:]},
        },
        index=True,
    )


def test_tensors_of_all_shards(sharded):
    checkpoint = Checkpoint.open(sharded)
    assert [s.file for s in checkpoint.shards] == [FIRST, SECOND]
    assert len(checkpoint.tensors) == 6 and not checkpoint.warnings
    for t in checkpoint.tensors.values():
        assert t.name in checkpoint.shards[t.shard].tensors


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nothing", "no such folder")


def test_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "f").touch()
    refused(tmp_path / "f", "not a folder")


def test_folder_that_is_no_model(tmp_path):
    refused(tmp_path, "not a model folder", "config.json")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 100_000, "nested"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_broken_config(tmp_path, text, word):
    folder = model(tmp_path / "m")
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", word)


def test_config_is_a_folder(tmp_path):
    folder = model(tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json", "not a regular file")


def test_no_weights(tmp_path):
    write_config(tmp_path)
    refused(tmp_path, "no model*.safetensors")


def test_only_metadata(tmp_path):
    write_config(tmp_path)
    safetensors(tmp_path / "model.safetensors", {})
    refused(tmp_path, "no tensors")


def test_index_names_an_absent_shard(sharded):
    (sharded / SECOND).unlink()
    refused(sharded, SECOND, "No such file", "download")


def test_index_names_an_empty_shard(sharded):
    (sharded / SECOND).write_bytes(b"")
    refused(sharded, SECOND, "empty")


def test_index_names_a_truncated_shard(sharded):
    raw = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(raw[:-1])
    refused(sharded, SECOND, "cut short")


def test_index_names_a_fifo(sharded):
    (sharded / SECOND).unlink()
    os.mkfifo(sharded / SECOND)
    refused(sharded, SECOND, "not a regular file")


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_index_names_a_tensor_that_its_shard_lacks(sharded):
    edit_index(sharded, lambda i: i["weight_map"].update(ghost=FIRST))
    refused(sharded, FIRST, "tensor ghost", "does not have")


def test_index_names_the_wrong_shard(sharded):
    name = "model.layers.0.mlp.switch_mlp.gate_proj.weight"
    edit_index(sharded, lambda i: i["weight_map"].update({name: SECOND}))
    refused(sharded, INDEX, name, f"expected {SECOND}")


@pytest.mark.parametrize("file", ["../x.safetensors", "a/model.safetensors", "", "..", "x.bin"])
def test_index_names_a_file_elsewhere(sharded, file):
    edit_index(sharded, lambda i: i["weight_map"].update(ghost=file))
    refused(sharded, INDEX, "tensor ghost")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_index_that_is_no_index(sharded, index):
    (sharded / INDEX).write_text(index)
    refused(sharded, INDEX)


def test_index_names_a_number(sharded):
    edit_index(sharded, lambda i: i["weight_map"].update(ghost=7))
    refused(sharded, INDEX, "tensor ghost")


def test_index_with_wrong_total_size_is_fine(sharded):
    edit_index(sharded, lambda i: i.update(metadata={"total_size": 3}))
    Checkpoint.open(sharded)


def test_tensors_that_the_index_forgot_are_reported(sharded):
    name = "model.layers.0.mlp.switch_mlp.gate_proj.weight"
    edit_index(sharded, lambda i: i["weight_map"].pop(name))
    checkpoint = Checkpoint.open(sharded)
    assert name in checkpoint.tensors and name in checkpoint.warnings[0]


def test_stray_file_with_the_same_tensors_is_refused(sharded):
    safetensors(sharded / "model.safetensors", expert_tensors())
    refused(sharded, "model.safetensors", "index does not name", "move it out")


def test_stray_file_with_other_tensors_is_reported(sharded):
    safetensors(sharded / "model-extra.safetensors", {"extra": ("F32", [1])})
    checkpoint = Checkpoint.open(sharded)
    assert "model-extra.safetensors" in checkpoint.warnings[0]
    assert "extra" not in checkpoint.tensors


def test_stray_file_that_is_broken(sharded):
    (sharded / "model-x.safetensors").write_bytes(b"broken")
    refused(sharded, "model-x.safetensors")


def test_without_an_index_a_missing_number_is_noticed(sharded):
    (sharded / INDEX).unlink()
    assert len(Checkpoint.open(sharded).shards) == 2
    (sharded / FIRST).unlink()
    refused(sharded, FIRST, "a shard is absent")


def test_same_tensor_in_two_files(tmp_path):
    one = {"x": ("F32", [1])}
    folder = model(tmp_path / "m", {"model-a.safetensors": one, "model-b.safetensors": one})
    refused(folder, "model-b.safetensors", "tensor x", "also in model-a.safetensors")


def test_files_of_other_names_are_not_weights(tmp_path):
    folder = model(tmp_path / "m")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert len(Checkpoint.open(folder).shards) == 1


def test_appledouble_files_are_ignored(sharded):
    for name in (FIRST, "config.json", "model.safetensors"):
        (sharded / f"._{name}").write_bytes(b"\x00\x05\x16\x07 Mac OS X")
    assert len(Checkpoint.open(sharded).shards) == 2


def test_snapshot_of_links(sharded, tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        (snapshot / file.name).symlink_to(f"../../blobs/{i:04x}")
        (tmp_path / "blobs").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "blobs" / f"{i:04x}")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.shards[0].file == FIRST
    broken = (snapshot / SECOND).resolve()
    broken.rename(broken.with_name(broken.name + ".incomplete"))
    refused(snapshot, SECOND, "download was interrupted")


def test_index_that_is_a_broken_link(sharded):
    (sharded / INDEX).unlink()
    (sharded / INDEX).symlink_to("nowhere")
    refused(sharded, INDEX, "cannot open")


def test_144_shards_with_few_open_files(tmp_path):
    tensors = expert_tensors(range(144), 2, 8, 4)
    files = {
        f"model-{i + 1:05d}-of-00144.safetensors": {
            n: t for n, t in tensors.items() if f"layers.{i}." in n
        }
        for i in range(144)
    }
    folder = model(tmp_path / "m", files, index=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 8, hard))
    try:
        assert len(find_experts(Checkpoint.open(folder))) == 144
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
