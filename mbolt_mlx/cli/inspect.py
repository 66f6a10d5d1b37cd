"""``mbolt-mlx inspect``: what a model or a side-file holds, from headers only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mbolt_mlx.cli.experts import named_experts
from mbolt_mlx.core.memory import total_memory
from mbolt_mlx.core.places import user_path
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import estimate
from mbolt_mlx.storage.experts import ExpertLayer, configs
from mbolt_mlx.storage.locate import read_side_file

HELP = "show a model's layers, experts and pieces, or what a side-file holds"
MEMORY_SHARE = 0.7
_TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "num_activated_experts",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("model", help="a folder, a hub repository, a short name, or a side-file")
    parser.add_argument("--revision", help="revision of the hub repository")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what ``args.model`` consists of; returns the exit status."""
    path = user_path(args.model)
    if path.is_file() and path.suffix.lower() != ".gguf":  # of which resolve says what to do
        found = describe_side_file(path)
        lines = _side_file_lines
    else:
        from mbolt_mlx.names import resolve

        folder = resolve(args.model, revision=args.revision, progress=sys.stderr.isatty())
        checkpoint = Checkpoint.open(folder)
        found = describe_model(checkpoint, named_experts(checkpoint))
        lines = _model_lines
        for warning in checkpoint.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(lines(found)))
        for group in found["groups"]:
            print()
            _print_group(group)
    return 0


def describe_model(checkpoint: Checkpoint, layers: Sequence[ExpertLayer]) -> dict[str, Any]:
    """All that ``inspect`` tells of a model, as JSON values; sizes in bytes."""
    experts = sum(y.experts * y.block_bytes for y in layers)
    dense = sum(t.nbytes for t in checkpoint.tensors.values()) - experts
    top_k = _top_k(checkpoint.config, layers)
    memory = total_memory()
    room = MEMORY_SHARE * memory - dense
    return {
        "model": str(checkpoint.path),
        "architecture": checkpoint.config.get("model_type"),
        "files": len(checkpoint.shards),
        "layers": _number_of_layers(checkpoint.config),
        "expert_layers": len(layers),
        "experts": sorted({y.experts for y in layers}),
        "top_k": top_k,
        "expert_bytes": experts,
        "dense_bytes": dense,
        "side_file_bytes": estimate(layers),
        "bytes_per_token": top_k and sum(top_k * y.block_bytes for y in layers),
        "memory_bytes": memory,
        "fits_at_resident": round(max(0.0, min(1.0, room / experts)), 3),
        "groups": [_group(found) for found in _alike(layers)],
    }


def describe_side_file(path: Path) -> dict[str, Any]:
    """All that ``inspect`` tells of a side-file, as JSON values; sizes in bytes.

    Raises:
        SideFileError, CheckpointError: when it or its manifest is malformed.
    """
    header, manifest = read_side_file(path)
    groups: dict[Any, list[Any]] = {}
    for layer in manifest.layers:
        groups.setdefault((layer.experts, layer.block_bytes, layer.pieces), []).append(layer)
    return {
        "side_file": str(path),
        "bytes": header.size,
        "tool": manifest.tool,
        "created": manifest.created,
        "source": {
            "name": manifest.source.name,
            "revision": manifest.source.revision,
            "files": len(manifest.source.shards),
            "bytes": sum(s.size for s in manifest.source.shards),
            "stamp": manifest.source.stamp,
        },
        "alignment": {"block": manifest.alignment.block, "piece": manifest.alignment.piece},
        "order": manifest.order,
        "expert_layers": len(manifest.layers),
        "blocks": sum(y.experts for y in manifest.layers),
        "groups": [
            {
                "layers": [y.layer for y in alike],
                "module": alike[0].module,
                "experts": experts,
                "block_bytes": block,
                "pieces": [p.as_dict() for p in pieces],
            }
            for (experts, block, pieces), alike in groups.items()
        ],
    }


def _alike(layers: Sequence[ExpertLayer]) -> list[list[ExpertLayer]]:
    groups: dict[Any, list[ExpertLayer]] = {}
    for layer in layers:
        groups.setdefault((layer.experts, layer.pieces), []).append(layer)
    return list(groups.values())


def _group(alike: list[ExpertLayer]) -> dict[str, Any]:
    first = alike[0]
    return {
        "layers": [y.layer for y in alike],
        "module": first.module,
        "experts": first.experts,
        "block_bytes": first.block_bytes,
        "files_per_expert": max(_files_per_expert(y) for y in alike),
        "computed": first.computed,
        "pieces": [
            {"name": p.name, "bytes": p.nbytes, "dtype": p.dtype, "shape": list(p.shape)}
            for p in first.pieces
        ],
    }


def _files_per_expert(layer: ExpertLayer) -> int:
    return max(len(set(column)) for column in layer.files.T.tolist())


def _top_k(config: dict[str, Any], layers: Sequence[ExpertLayer]) -> int | None:
    for inner in configs(config):
        for key in _TOP_K_KEYS:
            value = inner.get(key)
            if type(value) is int and 0 < value <= max(y.experts for y in layers):
                return value
    return None


def _number_of_layers(config: dict[str, Any]) -> int | None:
    for inner in configs(config):
        for key in ("num_hidden_layers", "num_layers", "n_layers"):
            if type(inner.get(key)) is int:
                return inner[key]
    return None


def _model_lines(found: dict[str, Any]) -> list[str]:
    experts = ", ".join(map(str, found["experts"]))
    layers = f"{found['expert_layers']}"
    if found["layers"]:
        layers += f" of {found['layers']}"
    lines = [
        f"model            {found['model']} ({found['architecture']}, {_files(found['files'])})",
        f"expert layers    {layers}",
        f"experts a layer  {experts}, top-{found['top_k'] or '?'}",
        f"all experts      {format_size(found['expert_bytes'])}",
        f"everything else  {format_size(found['dense_bytes'])}",
        f"side-file        {format_size(found['side_file_bytes'])}",
    ]
    if found["bytes_per_token"]:
        lines.append(f"a token uses     {format_size(found['bytes_per_token'])} of experts")
    memory, fits = format_size(found["memory_bytes"]), found["fits_at_resident"]
    if fits > 0:
        lines.append(f"fits             --resident {fits:g} in 70 % of this machine's {memory}")
    else:
        lines.append(f"fits             not: all but the experts exceeds 70 % of {memory}")
    return lines


def _side_file_lines(found: dict[str, Any]) -> list[str]:
    source = found["source"]
    name = source["name"] or "unnamed"
    return [
        f"side-file        {found['side_file']}",
        f"size             {format_size(found['bytes'])}",
        f"written          {found['created']} by {found['tool']}",
        f"source           {name}, {_files(source['files'])}, {format_size(source['bytes'])}",
        f"stamp            {source['stamp']}",
        f"alignment        blocks {found['alignment']['block']}, "
        f"pieces {found['alignment']['piece']}",
        f"order            {found['order'].get('kind')}",
        f"blocks           {found['blocks']} in {found['expert_layers']} layers",
    ]


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _print_group(group: dict[str, Any]) -> None:
    title = (
        f"layers {_ranges(group['layers'])}: {group['experts']} experts of "
        f"{format_size(group['block_bytes'])}, e.g. {group['module']}"
        f"{', computed by mlx-lm' if group.get('computed') else ''}"
    )
    rows = [
        [p["name"], p["dtype"], "×".join(map(str, p["shape"])) or "1", str(p["bytes"])]
        for p in group["pieces"]
    ]
    heads = ["piece", "dtype", "shape", "bytes"]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, justify="right" if head == "bytes" else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    print(title)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(4)]
    for row in [heads, *rows]:
        cells = [c.ljust(w) for c, w in zip(row[:3], widths[:3], strict=True)]
        print("  " + "  ".join([*cells, row[3].rjust(widths[3])]))
