"""Where side-files lie, and whether one belongs to a model."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mbolt_mlx.core.errors import (
    CheckpointError,
    MboltError,
    ReadError,
    SideFileError,
    UsageError,
    VerifyError,
)
from mbolt_mlx.core.head import read_head
from mbolt_mlx.core.places import cache_folder
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.computed import check_computed
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.header import Header, read_header_of
from mbolt_mlx.storage.manifest import FORMAT, Manifest, layers_digest, manifest_path
from mbolt_mlx.storage.plan import TENSOR_SUFFIX
from mbolt_mlx.storage.stamp import Source, sample_of, source_of

NAME = "experts.safetensors"
#: within so many bytes a side-file says what it is, and of which source
HEAD_BYTES = 4096
_REWRITE = "write it again with mbolt-mlx coalesce"


@dataclass(frozen=True)
class SideFile:
    """A side-file that was found to match its source; ``warnings`` are for the user."""

    path: Path
    manifest: Manifest
    warnings: tuple[str, ...] = ()


def default_side_file(checkpoint: Checkpoint) -> Path:
    """Where the side-file of ``checkpoint`` lies when nobody says otherwise.

    The folder is named by the source's stamp. Two models with the same names, sizes and headers
    (fine-tunes of one another) share it: the second side-file there has part of its samples' hash
    in its name.
    """
    first = _shared_place(checkpoint)
    if not first.exists() or _same_source(first, checkpoint):
        return first
    sampled = source_of(checkpoint, sample=True)
    own = "".join(shard.sample_sha256 or "" for shard in sampled.shards)
    return first.with_name(f"experts-{hashlib.sha256(own.encode()).hexdigest()[:8]}.safetensors")


def present_side_file(checkpoint: Checkpoint, model: str) -> Path:
    """`default_side_file`, which must be there; ``model`` is what the user calls the model.

    Raises:
        SideFileError: when it is not.
        VerifyError: when the one that is there was written before the source changed.
    """
    path = default_side_file(checkpoint)
    if path.exists() or path.is_symlink():
        return path
    shared = _shared_place(checkpoint)
    if shared.exists():  # of a source with the same headers: as the engine takes it
        try:
            check_source(shared, Manifest.read(manifest_path(shared)).source, checkpoint)
        except SideFileError as error:
            raise VerifyError(error.message, path=shared, hint=error.hint) from error
    raise SideFileError(
        "there is no side-file of this model yet", path=checkpoint.path,
        hint=f"run `mbolt-mlx coalesce --model {shlex.quote(model)}`, or name one",
    )  # fmt: skip


def find_side_file(
    checkpoint: Checkpoint, layers: Sequence[ExpertLayer]
) -> tuple[SideFile | None, str | None]:
    """The side-file in the default place, if it matches.

    Returns (side-file, None), (None, why it was refused) or (None, None) when there is none.
    """
    try:
        path = default_side_file(checkpoint)
    except UsageError as error:
        return None, str(error)
    if not path.exists() and not path.is_symlink():
        path = _shared_place(checkpoint)  # if there is one, it tells why it was refused
        if not path.exists():
            return None, None
    try:
        return open_side_file(path, checkpoint, layers), None
    except MboltError as error:
        return None, str(error)


def open_side_file(
    path: str | Path, checkpoint: Checkpoint, layers: Sequence[ExpertLayer]
) -> SideFile:
    """Open the side-file ``path`` and prove that it belongs to ``checkpoint``.

    Compared are names, sizes and header hashes of the source, its times (where only these differ,
    64 sampled pages a shard), the side-file's size and header, the geometry of ``layers``, and of
    computed experts what computed them. A source changed in place with the same size, header and
    time is found by a full verify only.

    Raises:
        SideFileError: with the reason why it cannot be used.
    """
    path = Path(path)
    check_is_side_file(path)
    header = _header(path)
    manifest = Manifest.read(_manifest_of(path))
    check_header(path, header, manifest)
    check_source(path, manifest.source, checkpoint)
    check_geometry(path, manifest, layers)
    return SideFile(path, manifest, check_computed(path, manifest, layers))


def check_is_side_file(path: Path) -> None:
    """Refuse what never was a side-file, by its beginning; a damaged one passes.

    Raises:
        SideFileError: when it is none, is absent, or cannot be read.
    """
    if not path.is_file():
        raise SideFileError("not a regular file" if path.exists() else "no such file", path=path)
    if manifest_path(path).exists():
        return
    try:
        head = read_head(path, HEAD_BYTES)
    except ReadError as error:
        raise SideFileError(error.message, path=path) from error
    if f'"{FORMAT}"'.encode() not in head:
        what = "a safetensors file, but " if head[8:10] == b'{"' else ""
        raise SideFileError(
            f"{what}not a side-file", path=path, hint="mbolt-mlx coalesce writes one"
        )


def read_side_file(path: Path) -> tuple[Header, Manifest]:
    """The header and the manifest of the side-file ``path``, whatever it was made of.

    Raises:
        CheckpointError: when it is no safetensors file.
        SideFileError: when it is no side-file, or its manifest is absent or not its own.
    """
    header = read_header_of(path)
    if header.metadata.get("format") != FORMAT:
        raise SideFileError("a safetensors file, but not a side-file", path=path)
    manifest = Manifest.read(_manifest_of(path))
    check_header(path, header, manifest)
    return header, manifest


def _shared_place(checkpoint: Checkpoint) -> Path:
    return cache_folder() / source_of(checkpoint).stamp[:16] / NAME


def _header(path: Path) -> Header:
    try:
        return read_header_of(path)
    except CheckpointError as error:
        raise SideFileError(
            f"not a whole side-file: {error.message}", path=path, tensor=error.tensor,
            offset=error.offset, expected=error.expected, found=error.found, hint=_REWRITE,
        ) from error  # fmt: skip


def _manifest_of(path: Path) -> Path:
    manifest = manifest_path(path)
    if not manifest.exists():
        raise SideFileError(
            f"its manifest {manifest.name} is absent, so it cannot be trusted", path=path,
            hint=_REWRITE,
        )  # fmt: skip
    return manifest


def check_header(path: Path, header: Header, manifest: Manifest) -> None:
    """That the side-file with ``header`` is the one that ``manifest`` describes.

    Raises:
        SideFileError: when it is another.
    """
    if header.metadata.get("format") != FORMAT:
        raise SideFileError("a safetensors file, but not a side-file", path=path)
    if header.metadata.get("source_stamp") != manifest.source.stamp:
        raise SideFileError("the manifest beside it is of another source", path=path)
    if header.metadata.get("layers_sha256") != layers_digest(manifest.layers):
        raise SideFileError(
            "the manifest beside it does not belong to it, or was edited", path=path, hint=_REWRITE
        )
    for layer in manifest.layers:
        tensor = header.tensors.get(layer.module + TENSOR_SUFFIX)
        if tensor is None or tensor.shape != (layer.experts, layer.block_bytes):
            raise SideFileError(f"it has no blocks of {layer.module}", path=path, hint=_REWRITE)
        first, last = int(layer.offsets.min()), int(layer.offsets.max()) + layer.block_bytes
        if first < tensor.offset or last > tensor.offset + tensor.nbytes:
            raise SideFileError(f"blocks of {layer.module} lie outside its tensor", path=path)


def check_source(path: Path, source: Source, checkpoint: Checkpoint) -> None:
    """That ``source``, of the side-file ``path``, is ``checkpoint`` as it is now.

    Raises:
        SideFileError: naming the shard that changed.
    """
    now = {shard.file: shard for shard in checkpoint.shards}
    then = {shard.file: shard for shard in source.shards}
    if now.keys() != then.keys():
        odd = min(now.keys() ^ then.keys())
        raise SideFileError(
            f"it was made of another model: {odd} is only in {'this' if odd in now else 'that'}",
            path=path, hint=_REWRITE,
        )  # fmt: skip
    for file, shard in now.items():
        for key, what in (("size", "size"), ("header_sha256", "header")):
            before, after = getattr(then[file], key), getattr(shard, key)
            if before != after:
                raise SideFileError(
                    f"the source changed since it was written: {file} has another {what}",
                    path=path, expected=before, found=after, hint=_REWRITE,
                )  # fmt: skip
    for file, shard in now.items():
        if shard.mtime_ns == then[file].mtime_ns:
            continue
        sample = then[file].sample_sha256
        try:
            same = sample is not None and sample_of(shard) == sample
        except ReadError as error:
            raise SideFileError(error.message, path=shard.path) from error
        if not same:
            raise SideFileError(
                f"the source changed since it was written: {file} has another time and other "
                "bytes",
                path=path, hint=_REWRITE,
            )  # fmt: skip


def check_geometry(path: Path, manifest: Manifest, layers: Sequence[ExpertLayer]) -> None:
    """That ``manifest``, of the side-file ``path``, holds exactly the experts of ``layers``.

    Raises:
        SideFileError: naming the layer or piece that differs.
    """
    held = {entry.layer: entry for entry in manifest.layers}
    wanted = {layer.layer: layer for layer in layers}
    if held.keys() != wanted.keys():
        odd = min(held.keys() ^ wanted.keys())
        raise SideFileError(
            f"its layers are not the model's: layer {odd} is only in "
            f"{'the side-file' if odd in held else 'the model'}",
            path=path, hint=_REWRITE,
        )  # fmt: skip
    for number, layer in wanted.items():
        entry = held[number]
        for key in ("module", "experts"):
            if getattr(entry, key) != getattr(layer, key):
                raise SideFileError(
                    f"layer {number} has another {key} than the model",
                    path=path, expected=getattr(layer, key), found=getattr(entry, key),
                    hint=_REWRITE,
                )  # fmt: skip
        has = {(p.name, p.dtype, p.shape, p.nbytes) for p in entry.pieces}
        wants = {(p.name, p.dtype, p.shape, p.nbytes) for p in layer.pieces}
        if has != wants:
            name, dtype, shape, _ = min(has ^ wants)
            raise SideFileError(
                f"layer {number} has other pieces than the model: {name} {dtype} {list(shape)}",
                path=path, hint=_REWRITE,
            )  # fmt: skip


def _same_source(path: Path, checkpoint: Checkpoint) -> bool:
    """Whether the side-file ``path`` was made of ``checkpoint``, or cannot be used by anyone."""
    try:
        manifest = Manifest.read(manifest_path(path))
    except SideFileError:
        return True
    try:
        check_source(path, manifest.source, checkpoint)
    except SideFileError:
        return False
    return True
