"""A model folder: its config, its shards, and where each tensor's bytes lie.

Only headers are read. Files are opened one at a time and closed again, so the number of shards
does not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import CheckpointError, ReadError
from mbolt_mlx.storage.header import Header, HeaderTensor, parse_json, read_header_of

INDEX = "model.safetensors.index.json"
# What mlx-lm loads as weights: everything in the folder with such a name.
WEIGHTS_GLOB = "model*.safetensors"
_JSON_MAX = 200_000_000
_OF = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: ``shard`` indexes ``Checkpoint.shards``; ``offset`` is absolute in that file."""

    name: str
    shard: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file; ``file`` is its name in the folder, ``size`` its bytes."""

    path: Path
    file: str
    size: int
    mtime_ns: int
    header_sha256: str
    tensors: tuple[str, ...]
    data_start: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder. ``warnings`` are sentences for the user, about things left out."""

    path: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, model_dir: str | Path) -> Checkpoint:
        """Read the headers of all shards in ``model_dir`` and check them against the index.

        Raises:
            CheckpointError: when it is not a model folder, or a file in it is absent, incomplete
                or malformed; the error names the file and the tensor or byte.
        """
        folder = Path(model_dir)
        config = _read_config(folder)
        index = _read_index(folder)
        present = sorted(p.name for p in folder.glob(WEIGHTS_GLOB))
        if index is None:
            _check_numbers(folder, present)
            names = present
        else:
            names = sorted(set(index.values()))
        if not names:
            raise CheckpointError(f"no {WEIGHTS_GLOB} in this folder", path=folder)
        headers = {name: read_header_of(folder / name) for name in names}
        shards, tensors = _collect(folder, headers)
        warnings: list[str] = []
        if index is not None:
            warnings += _check_index(folder, index, shards, tensors)
            for name in present:
                if name not in headers:
                    warnings.append(_check_stray(folder / name, tensors))
        if not tensors:
            raise CheckpointError("the model's files hold no tensors", path=folder)
        return cls(folder, config, shards, tensors, tuple(warnings))


def read_header(
    path: str | Path,
) -> tuple[dict[str, HeaderTensor], dict[str, str], int, str]:
    """Read one safetensors header strictly.

    Returns (tensors by name, metadata, first byte of the data, SHA-256 of all before it).

    Raises:
        CheckpointError: when the file is absent or malformed.
    """
    header = read_header_of(Path(path))
    return header.tensors, header.metadata, header.data_start, header.sha256


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file of the model strictly.

    Raises:
        CheckpointError: when it is absent, unreadable or not JSON.
    """
    try:
        raw = files.read_whole(path, limit=_JSON_MAX)
    except ReadError as error:
        raise CheckpointError(error.message, path=path) from error
    if not raw:
        raise CheckpointError("the file is empty", path=path)
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            "a Git-LFS pointer, not the file itself", path=path, hint="run git lfs pull"
        )
    return parse_json(raw, path, CheckpointError, what)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            "not a folder" if folder.exists() else "no such folder",
            path=folder, hint="a model is a folder with config.json and model*.safetensors",
        )  # fmt: skip
    path = folder / "config.json"
    if not path.exists() and not path.is_symlink():
        raise CheckpointError("not a model folder: it has no config.json", path=folder)
    config = read_json(path, "the config")
    if not isinstance(config, dict):
        raise CheckpointError("the config is not an object", path=path)
    return config


def _read_index(folder: Path) -> dict[str, str] | None:
    """The index's weight map (tensor → file name), or None when there is no index."""
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    index = read_json(path, "the index")
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError("the index has no weight_map object", path=path)
    if not weights:
        raise CheckpointError("the index names no tensors", path=path)
    for tensor, name in weights.items():
        if not isinstance(name, str):
            raise CheckpointError("the index's shard is not a file name", path=path, tensor=tensor)
        if not name or "/" in name or "\\" in name or name in (".", ".."):
            raise CheckpointError(
                "the index names a file outside the folder", path=path, tensor=tensor, found=name
            )
        if not (name.startswith("model") and name.endswith(".safetensors")):
            raise CheckpointError(
                f"the index names a file that mlx-lm does not load (only {WEIGHTS_GLOB})",
                path=path, tensor=tensor, found=name,
            )  # fmt: skip
    return weights


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Without an index, shards named "…-00001-of-00003" must be all there."""
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _OF.match(name)
        if match:
            groups.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    for (stem, count), numbers in groups.items():
        for number in range(1, min(int(count), len(numbers) + 1) + 1):
            if number not in numbers:
                name = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
                raise CheckpointError(
                    "a shard is absent", path=folder / name, hint="download the model again"
                )


def _collect(
    folder: Path, headers: dict[str, Header]
) -> tuple[tuple[Shard, ...], dict[str, Tensor]]:
    shards: list[Shard] = []
    tensors: dict[str, Tensor] = {}
    for number, (file, header) in enumerate(headers.items()):
        for name, t in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"the tensor is also in {shards[tensors[name].shard].file}",
                    path=folder / file, tensor=name, offset=t.offset,
                )  # fmt: skip
            tensors[name] = Tensor(name, number, t.dtype, t.shape, t.offset, t.nbytes)
        shards.append(
            Shard(
                path=folder / file,
                file=file,
                size=header.size,
                mtime_ns=header.mtime_ns,
                header_sha256=header.sha256,
                tensors=tuple(header.tensors),
                data_start=header.data_start,
            )
        )
    return tuple(shards), tensors


def _check_index(
    folder: Path, index: dict[str, str], shards: tuple[Shard, ...], tensors: dict[str, Tensor]
) -> list[str]:
    """The index against the shards' own headers; returns warnings."""
    for name, file in index.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                "the index names a tensor that the shard does not have",
                path=folder / file, tensor=name,
            )  # fmt: skip
        if shards[tensor.shard].file != file:
            raise CheckpointError(
                "the index names another shard for this tensor than the one that has it",
                path=folder / INDEX, tensor=name,
                expected=file, found=shards[tensor.shard].file,
            )  # fmt: skip
    extra = len(tensors) - len(index)
    if extra:
        first = next(name for name in tensors if name not in index)
        return [f"{folder / INDEX}: {extra} tensors of the shards are not named, first {first}"]
    return []


def _check_stray(path: Path, tensors: dict[str, Tensor]) -> str:
    """A weights file that the index does not name; returns the warning about it."""
    header = read_header_of(path)
    clash = next((name for name in header.tensors if name in tensors), None)
    if clash is not None:
        raise CheckpointError(
            f"the index does not name this file, but mlx-lm would load it too (every "
            f"{WEIGHTS_GLOB}), and it holds the same tensor as a shard",
            path=path, tensor=clash, hint="move it out of the folder",
        )  # fmt: skip
    return f"{path}: not named in the index, so it is left out; mlx-lm would load it"
