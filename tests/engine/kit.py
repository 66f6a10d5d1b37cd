"""What the engine's tests share: stock results to compare with, and faults at one seam."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np

import mbolt_mlx
from mbolt_mlx.core import files
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.experts import find_experts

ROOT = Path(__file__).parents[2]


def ids(*shape: int, seed: int = 0) -> mx.array:
    """Random token ids."""
    return mx.array(np.random.default_rng(seed).integers(0, 256, shape))


def prefill_then_decode(model, prompt: mx.array, steps: int) -> list[np.ndarray]:
    """Logits of a prompt ``[batch, length]`` and of ``steps`` forced tokens after it."""
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    out = [np.array(model(prompt, cache=cache))]
    forced = ids(prompt.shape[0], max(1, steps), seed=99)
    for step in range(steps):
        out.append(np.array(model(forced[:, step : step + 1], cache=cache)))
    return out


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Bit for bit, NaN included."""
    assert len(got) == len(wanted)
    for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes(), f"step {step}: {np.abs(a - b).max()} apart"


def make_side_file(model_dir: Path, output: Path) -> Path:
    checkpoint = Checkpoint.open(model_dir)
    coalesce(checkpoint, find_experts(checkpoint), output, progress=False)
    return output


def load(path, **options):
    """The model alone; from the shards unless told otherwise."""
    options.setdefault("side_file", None)
    return mbolt_mlx.load(str(path), **options)[0]


def layers_of(model) -> list:
    """The offloaded layers of a loaded model."""
    return [layer for _, layer, _ in model._mbolt._layers]


class Faults:
    """Stands between the engine and the drive: ``os.preadv`` as ``core.files`` sees it.

    ``plan`` is asked at each call with (call number, fd, offset) and gives an exception to raise,
    or None. Calls are counted from the moment this is made.
    """

    def __init__(self, monkeypatch, plan: Callable[[int, int, int], BaseException | None]) -> None:
        self.calls = 0
        self.plan = plan
        self._real = os.preadv
        self._undo = monkeypatch
        monkeypatch.setattr(files.os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        self.calls += 1
        error = self.plan(self.calls, fd, offset)
        if error is not None:
            raise error
        return self._real(fd, buffers, offset)

    def clear(self) -> None:
        self.plan = lambda *_: None


def eio() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def run_python(code: str, *args: str, before: str = "", timeout: float = 120) -> str:
    """Run ``code`` in a fresh interpreter and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", before + code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
