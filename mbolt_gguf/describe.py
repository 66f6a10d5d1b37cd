"""What a model consists of, as JSON values and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mbolt_gguf import tensor_names
from mbolt_gguf.experts import MoeLayer, Slices, find_experts
from mbolt_gguf.interleaved import PIECE_ALIGN
from mbolt_gguf.model import Model
from mbolt_gguf.types import type_name
from mbolt_mlx.core.errors import GgufError
from mbolt_mlx.core.sizes import format_size

FORMAT, VERSION = "mbolt-map", 1
KEY_VERSION, KEY_LAYOUT = "mbolt.version", "mbolt.layout"
_BLOCKS_MAX = 1 << 16
_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")


def describe(model: Model) -> dict[str, Any]:
    """All that ``map`` tells of a model; sizes in bytes.

    A token's reads are those of every layer but the MTP ones, which only drafting runs.

    Raises:
        GgufError: when its experts are malformed.
        UnsupportedError: when it has none.
    """
    layers = find_experts(model)
    count = max(_block_count(model), layers[-1].layer + 1)
    mtp = _mtp_layers(model, count)
    used = [y for y in layers if y.layer not in mtp]
    experts = sum(s.tensor.nbytes for y in layers for s in y.weights)
    shared = _shared(model)
    with_experts = {y.layer for y in layers}
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": str(model.path),
        "architecture": model.arch,
        "files": [{"path": str(f.path), "bytes": f.size} for f in model.files],
        "bytes": model.size,
        "layers": count,
        "expert_layers": [y.layer for y in layers],
        "dense_layers": [n for n in range(count) if n not in with_experts],
        "mtp_layers": mtp,
        "experts": sorted({y.experts for y in layers}),
        "top_k": sorted({y.top_k for y in layers}),
        "expert_groups": max(y.experts // y.group_size if y.group_size else 1 for y in layers),
        "shared_experts": shared,
        "expert_bytes": experts,
        "other_bytes": sum(t.nbytes for t in model.tensors.values()) - experts,
        "rewritten": _rewritten(model),
        "interleaved": all(y.interleaved for y in layers),
        "permutable": not any(y.obstacles for y in layers),
        "obstacles": [
            {"tensor": tensor, "why": why} for y in layers for tensor, why in y.obstacles
        ],
        "token": {
            "present": {
                "reads": sum(y.top_k * len(y.weights) for y in used),
                "bytes": sum(y.top_k * s.nbytes for y in used for s in y.weights),
            },
            "interleaved": {
                "reads": sum(y.top_k for y in used),
                "bytes": sum(y.top_k * _block_bytes(y) for y in used),
            },
        },
        "groups": [_group(alike) for alike in _alike(layers)],
    }


def _block_count(model: Model) -> int:
    found = model.get("block_count", 0)
    if type(found) is not int or not 0 <= found <= _BLOCKS_MAX:
        raise GgufError(
            f"{model.arch}.block_count has no meaning",
            path=model.path, expected=f"0 to {_BLOCKS_MAX}", found=found,
        )  # fmt: skip
    return found


def _mtp_layers(model: Model, count: int) -> list[int]:
    """The last blocks, which predict further tokens; llama.cpp counts them in block_count."""
    found = model.get("nextn_predict_layers", 0)
    return list(range(max(0, count - found), count)) if type(found) is int and found > 0 else []


def _shared(model: Model) -> dict[str, Any] | None:
    """The shared experts, which every token uses and which are no slices."""
    found: dict[int, int] = {}
    for name, tensor in model.tensors.items():
        parsed = tensor_names.parse(name)
        if parsed and parsed[1] in _SHARED:
            found[parsed[0]] = found.get(parsed[0], 0) + tensor.nbytes
    if not found:
        return None
    count = model.get("expert_shared_count")
    return {
        "count": count if type(count) is int else None,
        "layers": sorted(found),
        "bytes": sum(found.values()),
    }


def _rewritten(model: Model) -> dict[str, Any] | None:
    version = model.get(KEY_VERSION)
    return None if version is None else {"version": version, "layout": model.get(KEY_LAYOUT)}


def _block_bytes(layer: MoeLayer) -> int:
    """Bytes that one expert's read takes when its pieces lie in one block."""
    if layer.interleaved:
        return layer.weights[0].nbytes
    *before, last = layer.weights
    return sum(-(-s.nbytes // PIECE_ALIGN) * PIECE_ALIGN for s in before) + last.nbytes


def _alike(layers: Sequence[MoeLayer]) -> Iterable[list[MoeLayer]]:
    groups: dict[Any, list[MoeLayer]] = {}
    for y in layers:
        parts = tuple((s.role, s.type, s.shape, s.stride) for s in (*y.pieces, *y.small, *y.router))
        groups.setdefault((y.experts, y.top_k, y.interleaved, parts), []).append(y)
    return groups.values()


def _group(alike: list[MoeLayer]) -> dict[str, Any]:
    first = alike[0]
    return {
        "layers": [y.layer for y in alike],
        "experts": first.experts,
        "top_k": first.top_k,
        "group_size": first.group_size,
        "interleaved": first.interleaved,
        "expert_bytes": first.expert_bytes,
        "stride": first.weights[0].stride if first.interleaved else None,
        "slices": [_slices(s) for s in first.pieces],
        "small": [_slices(s) for s in first.small],
        "router": [_slices(s) for s in first.router],
    }


def _slices(s: Slices) -> dict[str, Any]:
    parsed = tensor_names.parse(s.name)
    stem = ".".join(filter(None, parsed[1:])) if parsed else s.name
    return {
        "name": stem,
        "role": s.role,
        "type": type_name(s.type),
        "shape": list(s.shape),
        "bytes": s.nbytes,
        "stride": s.stride,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """``describe``'s answer for people."""
    files, experts = found["files"], "/".join(map(str, found["experts"]))
    out = [
        f"{found['model']}: {found['architecture']}, {format_size(found['bytes'])}"
        + (f" in {len(files)} files" if len(files) > 1 else ""),
        f"{len(found['expert_layers'])} of {found['layers']} layers have experts: {experts} each, "
        f"{'/'.join(map(str, found['top_k']))} a token"
        + (f", in {found['expert_groups']} groups" if found["expert_groups"] > 1 else ""),
        f"{format_size(found['expert_bytes'])} of experts, "
        f"{format_size(found['other_bytes'])} of everything else",
    ]
    for key, what in (("dense_layers", "without experts"), ("mtp_layers", "for drafting (MTP)")):
        if found[key]:
            out.append(f"layers {what}: {ranges(found[key])}")
    if found["shared_experts"]:
        shared = found["shared_experts"]
        out.append(
            f"shared experts in {len(shared['layers'])} layers, {format_size(shared['bytes'])}: "
            "kept in memory, as every token uses them"
        )
    for group in found["groups"]:
        out += ["", *_group_lines(group)]
    present, block = found["token"]["present"], found["token"]["interleaved"]
    out += ["", "A token reads, with nothing in memory:"]
    out.append(
        f"  as the file is   {present['reads']:>6} reads, {format_size(present['bytes'])}, "
        f"{format_size(present['bytes'] / present['reads'])} each"
    )
    if not found["interleaved"]:
        out.append(
            f"  interleaved      {block['reads']:>6} reads, {format_size(block['bytes'])}, "
            f"{format_size(block['bytes'] / block['reads'])} each"
        )
    out.append("")
    written = found["rewritten"]
    if written:
        out.append(f"Rewritten by mbolt {written['version']}, layout {written['layout']}.")
    else:
        out.append("Not rewritten.")
    if found["obstacles"]:
        first = found["obstacles"][0]
        out.append(f"Its experts cannot be reordered: {first['tensor']}: {first['why']}.")
    elif found["expert_groups"] > 1:
        out.append("Its experts can be reordered inside their routing groups only.")
    return out


def _group_lines(group: dict[str, Any]) -> list[str]:
    out = [
        f"layers {ranges(group['layers'])}: {group['experts']} experts of "
        f"{format_size(group['expert_bytes'])}, {group['top_k']} a token"
        + (f", one block of {group['stride']} bytes each" if group["interleaved"] else "")
    ]
    for kind in ("slices", "small", "router"):
        for s in group[kind]:
            shape = " × ".join(map(str, s["shape"])) or "1"
            out.append(f"  {s['name']:<26} {s['type']:<8} {shape:>14} {s['bytes']:>12} bytes")
    return out


def ranges(numbers: Sequence[int]) -> str:
    """``numbers``, rising, in words: "0-3, 5, 7-9"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)
