"""A side-file of computed experts is trusted only where the same mlx-lm would compute the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mbolt_mlx
from mbolt_mlx.cli import main
from mbolt_mlx.core.errors import SideFileError, UnsupportedError
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.computed import versions
from mbolt_mlx.storage.locate import default_side_file
from mbolt_mlx.storage.manifest import manifest_path
from tests.engine import architectures, raw
from tests.engine.test_architectures import TOP_K, only_the_model  # noqa: F401

HERE = versions()


def other_patch(version: str) -> str:
    return ".".join([*version.split(".")[:2], "999"])


def other_minor(version: str) -> str:
    major, minor, *rest = version.split(".")
    return ".".join([major, str(int(minor) + 1), *rest])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A model whose experts are computed, and its side-file in the default place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, config = architectures.build("llama4")
    tensors = raw.RAW["llama4"]["transposed"](raw.converted(model))
    folder = architectures.save(tmp_path / "model", tensors, config)
    assert main.main(["coalesce", "-q", "--model", str(folder)]) == 0
    return folder


def place(folder: Path) -> Path:
    return default_side_file(Checkpoint.open(folder))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the manifest; returns the side-file."""
    path = manifest_path(place(folder))
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return place(folder)


def logits(folder: Path, side_file: Any = "auto") -> bytes:
    model, _ = mbolt_mlx.load(str(folder), resident=TOP_K, side_file=side_file)
    return np.array(model(mx.array([[1, 2, 3, 4]]))).tobytes()


def test_the_versions_are_written_and_the_same_ones_are_trusted(folder, caplog) -> None:
    made = json.loads(manifest_path(place(folder)).read_text())["computed"]
    assert HERE.keys() == {"mlx_lm", "mlx"}
    assert {key: made[key] for key in HERE} == HERE
    caplog.set_level(logging.WARNING)
    logits(folder)
    assert "computed" not in caplog.text


@pytest.mark.parametrize("key", HERE)
@pytest.mark.parametrize("side_file", ["auto", "named"])
def test_another_patch_is_said_in_one_line(folder, key, side_file, caplog) -> None:
    wanted = logits(folder)
    path = edit(folder, lambda m: m["computed"].update({key: other_patch(HERE[key])}))
    caplog.set_level(logging.WARNING)
    assert logits(folder, path if side_file == "named" else "auto") == wanted
    said = [record.getMessage() for record in caplog.records if "computed" in record.getMessage()]
    assert len(said) == 1 and "\n" not in said[0]
    for word in (str(path), other_patch(HERE[key]), HERE[key], "verify --full"):
        assert word in said[0]
    assert main.main(["verify", "-q", "--full", "--model", str(folder)]) == 0


@pytest.mark.parametrize("key", HERE)
def test_another_minor_is_refused(folder, key, capsys) -> None:
    wanted = logits(folder)
    then = other_minor(HERE[key])
    path = edit(folder, lambda m: m["computed"].update({key: then}))
    with pytest.raises(SideFileError, match="may convert the files otherwise") as caught:
        logits(folder, path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    assert f"expected {HERE[key]}, found {then}; write it again with mbolt-mlx coalesce" in text
    # What the engine finds by itself says the same, and there is nothing else to read.
    with pytest.raises(UnsupportedError, match=f"cannot be used: .*found {then}.* run mbolt-mlx"):
        logits(folder)
    assert main.main(["verify", "-q", "--model", str(folder)]) == 1
    assert f"found {then}" in capsys.readouterr().err
    # The hint is true: no --force is needed.
    assert main.main(["coalesce", "-q", "--model", str(folder)]) == 0
    assert logits(folder) == wanted


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no version": (lambda m: m["computed"].pop("mlx_lm"), "found no version"),
    "version no text": (lambda m: m["computed"].update(mlx_lm=0.32), "found no version"),
    "not said to be computed": (lambda m: m.update(computed=None), "found the source's own bytes"),
    "no layers": (lambda m: m["computed"].pop("layers"), "found the source's own bytes"),
    "one layer less": (
        lambda m: m["computed"]["layers"].popitem(), "found the source's own bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_manifest_does_not_say_is_not_trusted(folder, name) -> None:
    change, words = CHANGES[name]
    path = edit(folder, change)
    with pytest.raises(SideFileError, match=words):
        logits(folder, path)


def test_computed_bytes_do_not_stand_for_the_files_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = architectures.make(tmp_path / "model", "qwen3_moe")
    assert main.main(["coalesce", "-q", "--model", str(folder)]) == 0
    made = {"by": "x", "layers": {"model.layers.1.mlp.switch_mlp": {}}, **HERE}
    path = edit(folder, lambda m: m.update(computed=made))
    with pytest.raises(SideFileError, match="found what mlx-lm computes"):
        logits(folder, path)
    logits(folder)  # the files are read instead
