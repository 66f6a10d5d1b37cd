"""What cannot be done is refused in one line that says what to do instead."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import mbolt_mlx
from mbolt_mlx.core.errors import MboltError, MemoryLimitError, UnsupportedError, UsageError
from tests.engine.kit import ids, load

SHAPE = dict(experts=16, top_k=4)
ATTENTION = ["self_attn.q_proj", "self_attn.v_proj"]
EXPERTS = ["mlp.switch_mlp.gate_proj"]


def refused(kind, *args, **options) -> str:
    """The line with which loading is refused."""
    with pytest.raises(kind) as caught:
        mbolt_mlx.load(*args, side_file=None, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


# --- options


@pytest.mark.parametrize("resident", [0, -1, -0.2, 1.5, float("nan"), float("inf"), 20, "20%"])
def test_a_share_that_is_none(make, resident):
    text = refused(UsageError, str(make(**SHAPE)), resident=resident)
    assert "fraction over 0 and up to 1" in text and str(resident) in text


def test_a_share_and_a_limit(make):
    text = refused(UsageError, str(make(**SHAPE)), resident=0.2, memory_limit="4GB")
    assert "exclude each other" in text


@pytest.mark.parametrize("limit", [0, -1, "0", "-1GB", "1.5 apples", "20%", ""])
def test_a_limit_that_is_none(make, limit):
    refused(UsageError, str(make(**SHAPE)), memory_limit=limit)


@pytest.mark.parametrize("threads", [0, -1, 1000])
def test_a_number_of_threads_that_is_none(make, threads):
    assert "1 to 256" in refused(UsageError, str(make(**SHAPE)), read_threads=threads)


def test_a_policy_that_is_none(make):
    text = refused(UsageError, str(make(**SHAPE)), resident=0.3, policy="fifo")
    assert "'fifo'" in text and "lru" in text and "decayed" in text


def test_too_small_a_limit_says_the_least_that_works(make):
    import re

    from mbolt_mlx.core.sizes import parse_size

    path = str(make(**SHAPE))
    text = refused(MemoryLimitError, path, memory_limit="1MB")
    assert "does not run in 1.00 MB" in text
    least = parse_size(re.search(r"at least ([0-9.]+ [A-Z]B)", text)[1])
    # It is true: just above that it does run.
    model, _ = mbolt_mlx.load(path, memory_limit=int(least * 1.1), side_file=None)
    mx.eval(model(ids(1, 5)))


def test_fewer_slots_than_a_token_uses_are_raised_and_said(make, caplog):
    model = load(make(experts=16, top_k=8), resident=0.1)
    assert set(mbolt_mlx.stats(model).slots.values()) == {8}
    assert "8 a layer" in caplog.text and "top-k" in caplog.text


# --- models


@pytest.fixture
def dense(make, tmp_path):
    """A model without experts, of the same makers."""
    from mlx_lm.models import qwen3
    from mlx_lm.utils import save_config

    path = shutil.copytree(make(**SHAPE), tmp_path / "dense")
    for file in path.glob("model*"):
        file.unlink()
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "qwen3"
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    save_config(config, path / "config.json")
    return path


def test_a_dense_model(dense):
    text = refused(UnsupportedError, str(dense), resident=0.2)
    assert str(dense) in text and ("dense" in text or "experts" in text)
    mlx_lm.load(str(dense))


def edited(make, tmp_path, **changes):
    path = shutil.copytree(make(**SHAPE), tmp_path / "edited")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


@pytest.mark.parametrize("top_k", [0, -1, 17, 99])
def test_more_experts_a_token_than_there_are(make, tmp_path, top_k):
    path = edited(make, tmp_path, num_experts_per_tok=top_k)
    text = refused(UnsupportedError, str(path), resident=0.3)
    assert str(path) in text and f"expected 1 to 16, found {top_k}" in text


def test_an_architecture_that_mlx_lm_does_not_have(make, tmp_path):
    path = edited(make, tmp_path, model_type="made_up_moe")
    text = refused(UnsupportedError, str(path), resident=0.3)
    assert str(path) in text and "made_up_moe" in text


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 3}, {"num_experts": 8}, {"hidden_size": 128}]
)
def test_a_config_that_does_not_fit_the_files(make, tmp_path, changes):
    path = edited(make, tmp_path, **changes)
    assert str(path) in refused(MboltError, str(path), resident=0.3)


def test_no_such_folder(tmp_path):
    text = refused(MboltError, str(tmp_path / "nowhere"), resident=0.3)
    assert "nowhere" in text


# --- adapters


def make_adapter(path, folder, keys, seed=0):
    """Train nothing: LoRA arrays with random values, saved as mlx-lm saves them."""
    folder.mkdir()
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = mlx_lm.load(str(path))[0]
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    rng = np.random.default_rng(seed)
    arrays = {
        name: mx.array(rng.normal(size=array.shape).astype(np.float32) * 0.3)
        for name, array in tree_flatten(model.trainable_parameters())
    }
    assert arrays
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder


def test_an_adapter_on_attention_gives_stocks_logits(make, tmp_path):
    path = make(**SHAPE)
    adapter = str(make_adapter(path, tmp_path / "adapter", ATTENTION))
    theirs = mlx_lm.load(str(path), adapter_path=adapter)[0]
    ours = load(path, adapter_path=adapter, resident=0.25)
    plain = load(path, resident=0.25)
    for shape in [(1, 20), (1, 1), (2, 5)]:
        x = ids(*shape)
        got = np.array(ours(x))
        assert got.tobytes() == np.array(theirs(x)).tobytes()
        assert got.tobytes() != np.array(plain(x)).tobytes()


@pytest.mark.parametrize("keys", [EXPERTS, [*ATTENTION, *EXPERTS]])
def test_an_adapter_on_experts(make, tmp_path, keys):
    path = make(**SHAPE)
    adapter = make_adapter(path, tmp_path / "adapter", keys)
    text = refused(UnsupportedError, str(path), adapter_path=str(adapter), resident=0.3)
    assert text.startswith(f"{adapter}/adapters.safetensors: tensor ")
    assert "offloaded experts cannot be adapted" in text


@pytest.mark.parametrize("what", ["absent", "empty", "broken"])
def test_an_adapter_folder_that_is_none(make, tmp_path, what):
    folder = tmp_path / "adapter"
    if what != "absent":
        folder.mkdir()
    if what == "broken":
        (folder / "adapters.safetensors").write_bytes(b"not a safetensors file")
    text = refused(MboltError, str(make(**SHAPE)), adapter_path=str(folder), resident=0.3)
    assert text.startswith(str(folder))


def test_an_adapter_that_is_none(make, tmp_path):
    text = refused(UsageError, str(make(**SHAPE)), adapter_path=str(tmp_path))
    assert text.startswith(f"{tmp_path}: not the folder of an adapter") and "adapters." in text


@pytest.mark.parametrize("resident", [0.25, 1.0])
@pytest.mark.parametrize("mode", ["none", "affine4"])
def test_lora_on_the_loaded_model(make, mode, resident):
    model = load(make(**SHAPE, mode=mode), resident=resident)
    options = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    before = np.array(model(ids(1, 5)))
    with pytest.raises(UnsupportedError, match="LoRA on offloaded experts is not possible"):
        linear_to_lora_layers(model, 2, {**options, "keys": EXPERTS})
    linear_to_lora_layers(model, 2, {**options, "keys": ATTENTION})
    # A fresh adapter is the identity.
    assert np.allclose(np.array(model(ids(1, 5))), before, atol=1e-4)


def test_quantising_the_loaded_model(make):
    import mlx.nn as nn

    model = load(make(**SHAPE), resident=0.25)
    with pytest.raises(UnsupportedError, match="cannot be quantised in memory"):
        nn.quantize(model, 64, 4)
