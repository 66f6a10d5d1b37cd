"""Models, their side-files and stock's results, each made once."""

from __future__ import annotations

import functools

import mlx_lm
import pytest

from mbolt_mlx.engine import lanes, rows
from tests.engine.kit import make_side_file, prefill_then_decode
from tests.makers import make_model


@pytest.fixture(autouse=True)
def as_large_ones(monkeypatch):
    """The tests' tiny experts are shared out between streams, and their prompts put in order in
    place, as large ones are. A few tokens at a time are not."""
    monkeypatch.setattr(lanes, "LEAST_BYTES", 0)
    monkeypatch.setattr(rows, "_IN_PLACE_BYTES", 8 << 10)


@pytest.fixture(scope="session")
def make(models_dir):
    """``make_model`` by its arguments, each folder made once."""

    @functools.cache
    def made(**shape):
        name = "-".join(f"{k}{v}" for k, v in shape.items()) or "default"
        return make_model(models_dir / f"engine-{name}", **shape)

    return made


@pytest.fixture(scope="session")
def side_file_of(tmp_path_factory):
    """The side-file of a model folder, made once, beside no model."""
    folder = tmp_path_factory.mktemp("side-files")

    @functools.cache
    def made(model_dir):
        return make_side_file(model_dir, folder / f"{model_dir.name}.experts")

    return made


@pytest.fixture(scope="session")
def stock():
    """What mlx-lm loads from a folder."""
    return functools.cache(lambda path: mlx_lm.load(str(path)))


@pytest.fixture(scope="session")
def stock_logits(stock):
    """Stock's logits for a prompt made by ``kit.ids`` and some forced tokens."""
    from tests.engine.kit import ids

    return functools.cache(
        lambda path, batch, length, steps: prefill_then_decode(
            stock(path)[0], ids(batch, length), steps
        )
    )
