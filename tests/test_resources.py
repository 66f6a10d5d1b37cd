"""Shipped files are found, wherever the command is run from."""

import json

import pytest

from mbolt_mlx.core.errors import NamesError
from mbolt_mlx.resources import resource


def test_manifests_patches_and_the_demo_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(resource("manifests/schemas/model.schema.json").read_text())
    assert (resource("llama_patch") / "README.md").is_file()
    assert (resource("demo") / "config.json").is_file()
    assert resource("manifests").is_absolute()


def test_what_is_missing_is_named():
    with pytest.raises(NamesError, match="manifests/none is missing from this installation"):
        resource("manifests/none")
