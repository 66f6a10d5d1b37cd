"""Every architecture with experts gives the logits of stock mlx-lm, bit for bit, on the CPU."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

import mbolt_mlx
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.engine.locate import experts_of
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.experts import find_experts
from tests.engine import architectures

# 8 experts, top-2: as many slots as a token uses, and half of the experts.
TOP_K, HALF = 0.01, 0.5
PROMPT = mx.array([[(37 * i + 11) % 300 for i in range(40)]])
BATCH = mx.array([[3, 141, 59], [26, 53, 58], [97, 93, 23], [84, 62, 64]])
MODULES = sorted(set(architectures.CONFIGS) - set(architectures.REFUSED))


@pytest.fixture(autouse=True)
def only_the_model(monkeypatch):
    """No tokenizers, and no compiled kernels: they would take minutes to build."""
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda *args, **kwargs: None)
    mx.disable_compile()
    yield
    mx.enable_compile()


def containers(model) -> dict:
    """The expert containers of ``model`` by path."""
    found = {}
    for path, module in model.named_modules():
        children = module.children().values()
        if sum(isinstance(c, (SwitchLinear, QuantizedSwitchLinear)) for c in children) > 1:
            found[path] = module
    return found


def run(model) -> list[np.ndarray]:
    """Logits of a prompt, three steps after it, and a batch of four with a step."""
    out = []
    cache = make_prompt_cache(model)
    tokens = PROMPT
    for _ in range(4):
        y = model(tokens, cache=cache)
        out.append(np.array(y.astype(mx.float32)))
        tokens = mx.argmax(y[:, -1, :], axis=-1)[:, None]
    cache = make_prompt_cache(model)
    for step in (BATCH[:, :2], BATCH[:, 2:]):
        out.append(np.array(model(step, cache=cache).astype(mx.float32)))
    return out


def run_containers(model) -> list[np.ndarray]:
    """What each expert container gives for a prompt, single tokens and a batch."""
    out = []
    for number, (_, container) in enumerate(sorted(containers(model).items())):
        generator = np.random.default_rng(number)
        for tokens in (40, 1, 1, 4):
            width = next(c for c in container.children().values() if "weight" in c).input_dims
            x = mx.array(generator.normal(size=(tokens, width)).astype(np.float32))
            chosen = [generator.permutation(architectures.EXPERTS)[:2] for _ in range(tokens)]
            out.append(np.array(container(x, mx.array(np.array(chosen, np.uint32)))))
    return out


def same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for number, (have, want) in enumerate(zip(found, wanted, strict=True)):
        assert np.isfinite(want).all()
        assert have.tobytes() == want.tobytes(), f"call {number}"


def side_file(folder: Path, path: Path) -> Path:
    checkpoint = Checkpoint.open(folder)
    coalesce(checkpoint, experts_of(checkpoint), path, progress=False)
    return path


def agree(checkpoint: Checkpoint) -> None:
    """What names alone tell of the bytes is never other than what the model's sanitize does."""
    try:
        by_name = find_experts(checkpoint)
    except UnsupportedError:
        return
    followed = experts_of(checkpoint)
    for one, two in zip(by_name, followed, strict=True):
        assert (one.layer, one.experts, one.pieces) == (two.layer, two.experts, two.pieces)
        assert np.array_equal(one.files, two.files)
        assert np.array_equal(one.offsets, two.offsets)


def test_every_module_with_experts_is_here() -> None:
    assert architectures.expert_modules() == set(architectures.CONFIGS) | set(
        architectures.EXCEPTIONS
    )


@pytest.mark.parametrize("module", MODULES)
def test_architecture(module: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    folder = architectures.make(tmp_path / "model", module)
    stock, _ = load_model(folder)
    layers = len(containers(stock))
    forward = run_containers if module in architectures.METAL_ONLY else run
    wanted = forward(stock)
    assert layers > 0
    del stock
    packed = side_file(folder, tmp_path / "experts.safetensors")
    agree(Checkpoint.open(folder))
    for resident in (TOP_K, HALF):
        for source in (packed, None):
            model, _ = mbolt_mlx.load(str(folder), resident=resident, side_file=source)
            stats = mbolt_mlx.stats(model)
            assert stats.offloaded_layers == layers == len(stats.slots)
            assert all(n < stats.experts[layer] for layer, n in stats.slots.items())
            same(forward(model), wanted)
            if forward is run:
                stats = mbolt_mlx.stats(model)
                assert stats.decode.misses > 0
                assert stats.prefill.misses > 4 * layers  # the routers do use many experts


@pytest.mark.parametrize("module", sorted(architectures.REFUSED))
def test_refused_before_a_weight_is_read(module: str, tmp_path: Path) -> None:
    folder = architectures.make(tmp_path / "model", module)
    with pytest.raises(UnsupportedError, match=architectures.REFUSED[module]):
        mbolt_mlx.load(str(folder), resident=HALF)
