"""Where a side-file may be written, and what is already there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import CheckpointError, OutputError, ReadError, SideFileError
from mbolt_mlx.core.head import read_head
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.header import read_header_of
from mbolt_mlx.storage.locate import HEAD_BYTES, SideFile, check_source, open_side_file
from mbolt_mlx.storage.manifest import FORMAT, Manifest, manifest_path
from mbolt_mlx.storage.plan import Plan


def check_target(target: Path, checkpoint: Checkpoint) -> None:
    """Refuse places where a side-file would harm the model, or cannot be written.

    Raises:
        OutputError: with the reason.
    """
    for shard in checkpoint.shards:
        if files.is_same_file(target, shard.path):
            raise OutputError(f"this is the model's own {shard.file}", path=target)
    if target.is_symlink():
        raise OutputError("a link; name the file itself", path=target)
    if target.is_dir():
        raise OutputError("a folder; name a file in it", path=target)
    if not target.name or target.name.startswith("."):
        raise OutputError("not a name for a side-file", path=target)
    folder = target.parent
    if not folder.is_dir():
        raise OutputError("no such folder", path=folder)
    holders = {checkpoint.path.resolve(), *(s.path.resolve().parent for s in checkpoint.shards)}
    here = folder.resolve()
    if target.suffix.lower() == ".safetensors" and holders & {here, *here.parents}:
        raise OutputError(
            "inside the model's folder a name that ends in .safetensors would be loaded as weights",
            path=target, hint="choose another folder or another ending",
        )  # fmt: skip


def existing(
    target: Path,
    checkpoint: Checkpoint,
    layers: Sequence[ExpertLayer],
    plan: Plan,
    *,
    force: bool,
    any_order: bool,
) -> SideFile | None:
    """The side-file at ``target`` if it is just what ``plan`` would write; None to write it.

    With ``any_order`` its blocks may lie in another order than the plan's.

    Raises:
        OutputError: when what is there is not a side-file, not even a damaged one, or one of
            another source (``force`` allows the latter to be replaced).
    """
    manifest = manifest_path(target)
    if not target.exists():
        if manifest.exists() and not _is_manifest(manifest):
            raise OutputError("exists and is not the manifest of a side-file", path=manifest)
        return None
    try:
        metadata = read_header_of(target).metadata
    except CheckpointError:
        metadata = _damaged(target)
    if metadata.get("format") != FORMAT:
        raise OutputError(
            "exists and is not a side-file", path=target, hint="choose another name or remove it"
        )
    if force:
        return None
    if metadata.get("source_stamp") != plan.source_stamp:
        raise _other_source(target)
    try:
        found = open_side_file(target, checkpoint, layers)
    except SideFileError:
        _check_same_source(target, checkpoint)
        return None
    planned = {layer.source.layer: layer for layer in plan.layers}
    for entry in found.manifest.layers:
        layer = planned[entry.layer]
        places = tuple(piece.offset for piece in entry.pieces)
        if places != layer.piece_offsets:
            return None
        if not any_order and not (entry.offsets == layer.starts).all():
            return None
    return found


def _damaged(target: Path) -> dict[str, str]:
    """What the beginning of a file, or the manifest beside it, says that it was; else nothing."""
    try:
        head = read_head(target, HEAD_BYTES).decode("utf-8", "replace")
        stamp = re.search(r'"source_stamp" *: *"([^"]*)"', head)
        if f'"{FORMAT}"' in head and stamp:
            return {"format": FORMAT, "source_stamp": stamp[1]}
        beside = Manifest.read(manifest_path(target))
        return {"format": FORMAT, "source_stamp": beside.source.stamp}
    except (ReadError, SideFileError):
        return {}


def _check_same_source(target: Path, checkpoint: Checkpoint) -> None:
    """Refuse when the whole side-file ``target`` is of another source with the same headers."""
    try:
        manifest = Manifest.read(manifest_path(target))
    except SideFileError:
        return  # without a manifest it is of no use to anyone
    try:
        check_source(target, manifest.source, checkpoint)
    except SideFileError as error:
        raise _other_source(target) from error


def _other_source(target: Path) -> OutputError:
    return OutputError(
        "exists and is the side-file of another source, or of this one before it changed",
        path=target, hint="choose another name, or --force to replace it",
    )  # fmt: skip


def _is_manifest(path: Path) -> bool:
    try:
        return f'"{FORMAT}"'.encode() in files.read_whole(path, limit=1 << 30)[:4096]
    except ReadError:
        return False
