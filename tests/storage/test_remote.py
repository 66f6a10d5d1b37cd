"""Headers from the hub: what the planner makes of them, without a network."""

from types import SimpleNamespace

import pytest

from mbolt_mlx.core.errors import CheckpointError, NamesError
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import find_experts
from mbolt_mlx.storage.remote import open_remote


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """The tests' own setting forbids the network; here the hub's library is replaced instead."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(tiny_model_sharded, monkeypatch):
    """A hub that holds one tiny model."""
    import huggingface_hub

    local = Checkpoint.open(tiny_model_sharded)

    def headers(self, repository, *, revision=None, timeout=None):
        files = {}
        for number, shard in enumerate(local.shards):
            tensors = {
                t.name: SimpleNamespace(
                    dtype=t.dtype,
                    shape=list(t.shape),
                    data_offsets=(
                        t.offset - shard.data_start,
                        t.offset - shard.data_start + t.nbytes,
                    ),
                )
                for t in local.tensors.values()
                if t.shard == number
            }
            files[shard.file] = SimpleNamespace(tensors=tensors)
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", headers)
    config = str(tiny_model_sharded / "config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: config)
    return local


def test_the_same_layers_and_bytes_as_from_the_files(hub):
    remote = open_remote("org/name")
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in remote.tensors.items()} == {
        n: (t.dtype, t.shape, t.nbytes) for n, t in hub.tensors.items()
    }
    for a, b in zip(find_experts(remote), find_experts(hub), strict=True):
        assert (a.layer, a.experts, a.pieces) == (b.layer, b.experts, b.pieces)


def test_a_hub_that_fails_is_one_line(hub, monkeypatch):
    import huggingface_hub

    def fails(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", fails)
    with pytest.raises(NamesError, match=r"cannot be reached for org/name \(no route\)"):
        open_remote("org/name")


def test_a_hub_that_is_away_is_asked_once(monkeypatch):
    """The hub's own library would try five times, for 23 seconds, and say so each time."""
    import huggingface_hub

    def fails(*args, **kwargs):
        raise OSError("no route to host")

    def never(*args, **kwargs):
        pytest.fail("asked for more")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fails)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", never)
    with pytest.raises(NamesError, match="cannot be reached for org/name"):
        open_remote("org/name")


def test_a_repository_of_another_format_is_one_line(hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import NotASafetensorsRepoError

    def fails(*args, **kwargs):
        raise NotASafetensorsRepoError("org/name is not a safetensors repo.")

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", fails)
    with pytest.raises(NamesError, match="org/name has no safetensors files"):
        open_remote("org/name")


def test_a_config_without_meaning(hub, monkeypatch, tmp_path):
    import huggingface_hub

    for text in ("[]", "{"):
        (tmp_path / "config.json").write_text(text)
        path = str(tmp_path / "config.json")
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, path=path, **k: path)
        with pytest.raises(CheckpointError):
            open_remote("org/name")
