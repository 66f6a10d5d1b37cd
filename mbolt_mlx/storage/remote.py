"""A model on the hub, known from its headers alone: a few requests, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mbolt_mlx import hub
from mbolt_mlx.core.errors import CheckpointError
from mbolt_mlx.storage.checkpoint import Checkpoint, Shard, Tensor

TIMEOUT = 20


def open_remote(repository: str, *, revision: str | None = None) -> Checkpoint:
    """The config and tensors of ``ORG/NAME``, by range requests for the headers only.

    Offsets count from the start of each file's data, because the headers' own lengths are not
    asked for: sizes and pieces are right, places are not. Nothing can be read through it.

    Raises:
        NamesError: the hub cannot be reached, or has no such repository.
        CheckpointError: its config or headers are malformed.
    """
    from huggingface_hub import HfApi, hf_hub_download

    here = "it is not in the cache"
    hub.reach(repository, revision, here)
    try:
        path = hf_hub_download(repository, "config.json", revision=revision)
        found = HfApi().get_safetensors_metadata(repository, revision=revision, timeout=TIMEOUT)
    except Exception as error:
        raise hub.explain(error, repository, revision, here) from error
    try:
        config = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the config cannot be read: {error}", path=path) from error
    if not isinstance(config, dict):
        raise CheckpointError("the config is not an object", path=path)
    return _checkpoint(repository, config, found.files_metadata)


def _checkpoint(repository: str, config: dict[str, Any], headers: Any) -> Checkpoint:
    folder = Path(repository)
    shards, tensors = [], {}
    for number, (file, header) in enumerate(sorted(headers.items())):
        size = 0
        for name, known in header.tensors.items():
            first, end = known.data_offsets
            if name in tensors:
                raise CheckpointError("in two files", path=folder / file, tensor=name)
            tensors[name] = Tensor(
                name, number, known.dtype, tuple(known.shape), int(first), int(end - first)
            )
            size = max(size, int(end))
        shards.append(Shard(folder / file, file, size, 0, "", tuple(header.tensors), 0))
    if not tensors:
        raise CheckpointError("the model's files hold no tensors", path=folder)
    return Checkpoint(folder, config, tuple(shards), tensors)
