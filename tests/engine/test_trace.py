"""Arrays followed through the code of mlx-lm's models."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_moe

from mbolt_mlx.engine.trace import is_traced, tracing, wrap
from mbolt_mlx.storage.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    tensors = {
        "stack": mx.random.normal((4, 12, 8)),
        "one": mx.random.normal((12, 8)),
        "two": mx.random.normal((12, 8)),
        "bytes": mx.random.randint(0, 255, (4, 6, 2, 16)).astype(mx.uint8),
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(folder)
    arrays = mx.load(str(folder / "model.safetensors"))
    raw = (folder / "model.safetensors").read_bytes()
    return {n: wrap(n, a, checkpoint.tensors[n]) for n, a in arrays.items()}, raw


# What is done, by what it gives; all of it is ranges of the file.
RANGES = {
    "split": lambda m, t: m.split(t["stack"], 2, axis=1)[1],
    "split at": lambda m, t: m.split(t["stack"], [3, 6], axis=1)[1],
    "halves": lambda m, t: t["stack"][..., 6:, :],
    "contiguous": lambda m, t: m.contiguous(m.split(t["stack"], 2, axis=-2)[0]),
    "some": lambda m, t: t["stack"][1:3],
    "one more": lambda m, t: m.expand_dims(t["stack"][2], 0),
    "stack": lambda m, t: m.stack([t["two"], t["one"]]),
    "concatenate": lambda m, t: m.concatenate([t["stack"], m.expand_dims(t["one"], 0)]),
    "blocks": lambda m, t: t["bytes"].view(mx.uint32).flatten(-2),
    "twice turned": lambda m, t: t["stack"].swapaxes(1, 2).transpose(0, 2, 1),
    "moved": lambda m, t: m.moveaxis(m.moveaxis(t["stack"], 2, 1), 1, 2),
    "same type": lambda m, t: t["stack"].astype(mx.float32),
    "reshape": lambda m, t: m.reshape(t["stack"], (4, 3, 4, 8)),
}
COMPUTED = {
    "sum": lambda m, t: t["stack"] + 1,
    "from the right": lambda m, t: -8 * t["stack"],
    "turned": lambda m, t: t["stack"].swapaxes(1, 2),
    "every other": lambda m, t: m.contiguous(t["stack"][..., ::2, :]),
    "other type": lambda m, t: t["stack"].astype(mx.bfloat16),
    "picked": lambda m, t: t["stack"][mx.array([1, 0])],
    "side by side": lambda m, t: m.concatenate([t["one"], t["two"]], axis=1),
    "stacked last": lambda m, t: m.stack([t["one"], t["two"]], axis=1),
    "unknown": lambda m, t: m.repeat(t["stack"], 2, axis=1),
    "in pieces": lambda m, t: t["stack"].reshape(-1, 8)[3:7] * 1,
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name, traced):
    arrays, raw = traced
    with tracing():
        found = RANGES[name](qwen3_moe.mx, arrays)
    assert is_traced(found) and isinstance(found, mx.array)
    rows = found.origin.rows()
    for (_, offset), row in zip(rows, found.array, strict=True):
        wanted = np.array(row).tobytes()
        assert raw[offset : offset + len(wanted)] == wanted


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_has_no_place(name, traced):
    arrays, _ = traced
    with tracing():
        found = COMPUTED[name](qwen3_moe.mx, arrays)
    assert is_traced(found) and found.sources
    assert found.origin is None or found.origin.rows() is None


def test_what_is_written_into_has_no_place(traced):
    arrays, _ = traced
    with tracing():
        array = qwen3_moe.mx.contiguous(arrays["one"])
        array[0] = 1
    assert array.origin is None


def test_plain_arrays_stay_plain(traced):
    with tracing():
        assert type(qwen3_moe.mx.stack([mx.zeros(2), mx.ones(2)])) is mx.array
        assert qwen3_moe.mx.float32 is mx.float32 and qwen3_moe.mx.array is mx.array


def test_the_models_get_their_mlx_back():
    with pytest.raises(RuntimeError), tracing():
        assert qwen3_moe.mx is not mx
        raise RuntimeError
    assert qwen3_moe.mx is mx
