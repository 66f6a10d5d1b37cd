"""From what the user calls a model to the folder that holds it."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_mlx import hub
from mbolt_mlx.core.errors import CheckpointError, NamesError, UnsupportedError
from mbolt_mlx.core.places import user_path
from mbolt_mlx.resources import resource

DEMO = "demo"

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ModelManifest:
    """What is known of a model beforehand; sizes in bytes, of the repository's quantisation."""

    name: str
    repository: str
    also: Mapping[str, str]
    architecture: str
    geometry: Mapping[str, int]
    config: Mapping[str, int | str | list]
    quantisation: Mapping[str, Any]
    sizes: Mapping[str, int]
    sources: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> ModelManifest:
        """Read one file of manifests/models/; keys that are not known are ignored."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                name=data["name"],
                repository=data["repository"],
                also=data.get("also", {}),
                architecture=data["architecture"],
                geometry=data["geometry"],
                config=data["config"],
                quantisation=data["quantisation"],
                sizes=data["sizes"],
                sources=tuple(data["sources"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NamesError(f"not a model manifest ({error})", path=path) from error

    @property
    def repositories(self) -> dict[str, str]:
        """Every short name with its repository."""
        return {self.name: self.repository, **self.also}


@functools.cache
def known_models() -> tuple[ModelManifest, ...]:
    """All manifests that ship, by name."""
    folder = resource("manifests/models")
    return tuple(ModelManifest.read(path) for path in sorted(folder.glob("*.json")))


def short_names() -> dict[str, ModelManifest]:
    """Every short name with its manifest."""
    return {name: model for model in known_models() for name in model.repositories}


def match_short_name(name: str) -> str | None:
    """Return the short name that ``name`` means, or None.

    Case does not matter, and a leading part up to a hyphen is enough when only one name has it.

    Raises:
        NamesError: several names begin that way.
    """
    names = short_names()
    wanted = name.casefold()
    for known in names:
        if known.casefold() == wanted:
            return known
    found = [known for known in names if known.casefold().startswith(wanted + "-")]
    if len(found) > 1:
        raise NamesError(f"{name!r} could be {', '.join(found)}", hint="give one of them")
    return found[0] if found else None


def manifest_for(name: str | os.PathLike[str]) -> ModelManifest | None:
    """Return the manifest of a short name or of a repository that a manifest names, or None."""
    text = os.fspath(name)
    if "/" not in text:
        short = match_short_name(text) if text else None
        return short_names()[short] if short else None
    wanted = text.casefold()
    for model in known_models():
        if any(repository.casefold() == wanted for repository in model.repositories.values()):
            return model
    return None


def check_config(
    manifest: ModelManifest, config: Mapping[str, Any], *, path: Path | None = None
) -> None:
    """Refuse a config.json whose geometry is not the manifest's.

    Raises:
        UnsupportedError: names the first key that differs.
    """
    for key, expected in manifest.config.items():
        found = config.get(key)
        allowed = expected if isinstance(expected, list) else [expected]
        if found not in allowed:
            raise UnsupportedError(
                f"this is not the {manifest.name} that is known here: {key} differs",
                path=path,
                expected=" or ".join(map(str, allowed)),
                found="nothing" if found is None else found,
                hint=f"give the folder itself ({path.parent}) to load it as it is"
                if path
                else None,
            )


def resolve(
    name: str | os.PathLike[str], *, revision: str | None = None, progress: bool = True
) -> Path:
    """Return the folder of the model that ``name`` means.

    In this order: an existing folder; ``demo``, the model that ships; a short name
    (manifests/models/); a hub repository ``ORG/NAME``. A repository comes from the hub's cache
    when it is complete there, without asking the network, and is downloaded otherwise, only the
    files that are needed. ``HF_HOME`` and ``HF_HUB_OFFLINE`` are honoured.

    Args:
        revision: a branch, tag or commit of the repository.
        progress: show the download on stderr.

    Raises:
        NamesError: there is no such model, or it cannot be reached.
        UnsupportedError: a known name whose config.json says something else.
    """
    text = os.fspath(name)
    if not text.strip():
        raise NamesError("the model has no name", hint=_what_to_give())
    path = user_path(text)
    # A folder of the user's that happens to be called demo counts only when it is a model.
    if path.exists() and (text != DEMO or (path / "config.json").exists()):
        if not path.is_dir():
            gguf = path.suffix.lower() == ".gguf"
            hint = "for GGUF models there is mbolt-gguf" if gguf else None
            raise NamesError("a model is a folder, not a file", path=path, hint=hint)
        return path
    if path.is_symlink():
        raise NamesError("broken link: the folder it points to does not exist", path=path)
    if not isinstance(name, str):
        raise NamesError("no such folder", path=path)
    if text == DEMO:
        return resource("demo")
    short = match_short_name(text) if "/" not in text else None
    if short is not None:
        manifest = short_names()[short]
        repository = manifest.repositories[short]
    elif _REPOSITORY.fullmatch(text):
        manifest, repository = manifest_for(text), text
    else:
        raise _unknown(text)
    folder = hub.snapshot(repository, revision=revision, progress=progress)
    if manifest is not None:
        check_config(manifest, read_config(folder), path=folder / "config.json")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's config.json.

    Raises:
        CheckpointError: it is absent, unreadable or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError("no config.json: not a model folder", path=folder) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"config.json cannot be read ({error})", path=path) from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a JSON object", path=path)
    return config


def _what_to_give() -> str:
    return "give a folder, a repository ORG/NAME, demo, or a name that `mbolt-mlx models` lists"


def _unknown(text: str) -> NamesError:
    if "/" in text or "\\" in text or text.startswith((".", "~")):
        return NamesError("no such folder", path=text)
    names = [DEMO, *short_names()]
    lower = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(text.casefold(), lower, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(lower[c] for c in close)}?" if close else _what_to_give()
    return NamesError(f"no folder and no known model is called {text!r}", hint=hint)
