"""Fixtures for tests that run llama.cpp: built once, from the cache when it is there.

Tests take `llama`, and `user_cache` too for commands that look for the binaries.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mbolt_gguf.evaluate import AS_IT_IS, DRIVER, STOCK_DRIVER, Run, Way, evaluate
from mbolt_gguf.model import Model
from mbolt_mlx.profile.perms import Perms, make_perms
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace

# The user's own, before a test's private cache takes its place.
_CACHE = os.environ.get("XDG_CACHE_HOME")


@dataclass(frozen=True)
class Llama:
    """``patched`` and ``stock`` are drivers on the patched and on the unmodified library, which is
    shared; ``preload`` is for that one (there on Linux)."""

    patched: Path
    stock: Path
    preload: Path | None = None

    def run(self, model: Path, tokens: Sequence[int], way: Way = AS_IT_IS, **options) -> Run:
        """Evaluate ``tokens`` with the patched library."""
        return evaluate(model, tokens, way, driver=self.patched, **options)

    def stock_run(self, model: Path, tokens: Sequence[int], way: Way = AS_IT_IS) -> Run:
        """Logits of the unmodified library."""
        return evaluate(model, tokens, way, driver=self.stock, routes=False)


@pytest.fixture(scope="session")
def llama() -> Llama:
    """llama.cpp with our patches and without, and a driver for each."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")) or not shutil.which(
        "cmake"
    ):
        pytest.skip("no C++ compiler or no cmake")
    from mbolt_gguf import build

    with pytest.MonkeyPatch.context() as patch:
        _restore(patch)
        found = build.binaries()
        targets = [DRIVER, STOCK_DRIVER, *({build.PRELOAD} & set(build.TARGETS))]
        if not found or not set(targets) <= found.keys():
            found = build.build(targets=targets)
    return Llama(found[DRIVER], found[STOCK_DRIVER], found.get(build.PRELOAD))


@pytest.fixture
def user_cache(llama, monkeypatch) -> None:
    """The user's cache instead of a private one, for commands that look for what was built."""
    _restore(monkeypatch)


@pytest.fixture
def quick_path(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one with room: a rewrite waits for the drive otherwise."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="mbolt-test-", dir=memory) as name:
        yield Path(name)


def _restore(patch: pytest.MonkeyPatch) -> None:
    if _CACHE is None:
        patch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        patch.setenv("XDG_CACHE_HOME", _CACHE)


def some_tokens(count: int = 48, seed: int = 1) -> list[int]:
    """Ids of bytes and merges in the vocabulary of `makers`."""
    return np.random.default_rng(seed).integers(0, 262, count).tolist()


def random_perms(model: Path, seed: int = 0, *, skip: Sequence[int] = ()) -> Perms:
    """A profile of a made-up trace of ``model``, of all its layers with experts but ``skip``."""
    from mbolt_gguf.experts import find_experts

    rng = np.random.default_rng(seed)
    layers = [y for y in find_experts(Model.open(model)) if y.layer not in skip]
    infos = {y.layer: LayerInfo(y.experts, y.top_k) for y in layers}
    passes = [
        Pass(
            "decode",
            {
                n: np.sort(rng.choice(i.experts, (1, i.top_k), replace=False, p=_skewed(i.experts)))
                for n, i in infos.items()
            },
        )
        for _ in range(40)
    ]
    return make_perms(make_trace(passes, infos))


def _skewed(count: int) -> np.ndarray:
    weights = 1.0 / (1.0 + np.roll(np.arange(count), count // 3))
    return weights / weights.sum()
