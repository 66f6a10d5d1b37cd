"""Fixtures shared by all tests. The model folders are read-only: copy before changing one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports huggingface_hub: no test may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.makers import make_model  # noqa: E402


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """Keep side-files that a test makes out of the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models_dir) -> Path:
    """float32, stacked experts, one file."""
    return make_model(models_dir / "float32")


@pytest.fixture(scope="session")
def tiny_model_q4(models_dir) -> Path:
    """affine 4-bit: nine pieces an expert."""
    return make_model(models_dir / "affine4", mode="affine4")


@pytest.fixture(scope="session")
def tiny_model_sharded(models_dir) -> Path:
    """float32 in three files; every expert straddles files."""
    return make_model(models_dir / "sharded", shards=3)


@pytest.fixture(scope="session")
def tiny_model_per_expert(models_dir) -> Path:
    """float32, experts named one by one, in two files."""
    return make_model(models_dir / "per-expert", per_expert=True, shards=2)
