"""Route CSV: one line for each expert that a token chose in a layer.

Comment lines give the model (``# model=… n_layer=48 n_expert=128 n_expert_used=6``) and the bytes
of each layer's experts (``# layer=0 expert_bytes=…``); then a heading and
``turn,phase,step,layer,slot,expert,weight,residency,expert_bytes`` (phase 0 is prefill, 1 decode).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mbolt_mlx.core.errors import TraceError
from mbolt_mlx.profile.traces import (
    DECODE,
    EXPERTS_MAX,
    PREFILL,
    LayerInfo,
    Pass,
    Trace,
    make_trace,
)

HEADING = "turn,phase,step,layer,slot,expert"
_COLUMNS = 9
_NUMBER = re.compile("[0-9]{1,18}")


def is_route_csv(data: bytes) -> bool:
    """Whether ``data`` begins as a route CSV file does."""
    return data.startswith((b"# route_trace", b"turn,phase,step,"))


def decode(data: bytes, path: str | Path | None = None, *, experts: int | None = None) -> Trace:
    """Read a route CSV file.

    A line that the end of the file cuts short, and the incomplete layer before it, are left out.

    Raises:
        TraceError: naming the line that has no meaning.
    """
    text = data.decode("utf-8", "replace")
    whole = text.endswith("\n")
    lines = text.split("\n")
    if not whole:
        lines.pop()
    known, sizes = _comments(lines, path)
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for number, line in enumerate(lines, 1):
        if not line or line[0] == "#" or line.startswith("turn,"):
            continue
        parts = line.split(",")
        try:
            turn, phase, step, layer, slot, expert = map(int, parts[:6])
        except ValueError:
            raise _bad(path, number, "is not a route") from None
        if len(parts) != _COLUMNS or phase not in (0, 1) or min(turn, step, layer, slot) < 0:
            raise _bad(path, number, "is not a route")
        if not 0 <= expert < EXPERTS_MAX:
            raise _bad(path, number, f"has the expert {expert}, which no model has")
        group = groups.setdefault((turn, phase, step, layer), [])
        if slot != len(group):
            raise _bad(path, number, f"has slot {slot} where {len(group)} comes next")
        group.append(expert)
    return _trace(groups, known, sizes, experts, path, [] if whole else ["the last line is cut"])


def _comments(lines: list[str], path: str | Path | None) -> tuple[dict[str, str], dict[int, int]]:
    """(the model's keys, layer → bytes of an expert) from the comment lines."""
    known: dict[str, str] = {}
    sizes: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.startswith("#"):
            if line.startswith("turn,"):
                break
            continue
        pairs = dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
        if "layer" not in pairs:
            known.update(pairs)
            continue
        try:
            sizes[int(pairs["layer"])] = int(pairs["expert_bytes"])
        except (KeyError, ValueError):
            raise _bad(path, number, "does not give a layer's expert_bytes") from None
    return known, sizes


def _trace(
    groups: dict[tuple[int, int, int, int], list[int]],
    known: dict[str, str],
    sizes: dict[int, int],
    experts: int | None,
    path: str | Path | None,
    notes: list[str],
) -> Trace:
    if not groups:
        raise TraceError("the trace holds no routes", path=path)
    widths = np.bincount([len(g) for g in groups.values()])
    usual = _number(known, "n_expert_used") or int(widths.argmax())
    last = next(reversed(groups))
    if len(groups[last]) != usual:
        del groups[last]
        notes.append("the last layer is incomplete and was left out")
    total = experts or _number(known, "n_expert")
    if total is None:
        total = 1 + max(max(g) for g in groups.values())
        notes.append(f"the trace does not give the number of experts; {total} were seen")
    # The passes in the order of their first line; a prompt is one pass, a decoded token another.
    passes: dict[tuple[int, ...], dict[int, list[list[int]]]] = {}
    for (turn, phase, step, layer), chosen in groups.items():
        key = (turn, 0) if phase == 0 else (turn, 1, step)
        passes.setdefault(key, {}).setdefault(layer, []).append(chosen)
    layers = {
        layer: LayerInfo(total, usual, sizes.get(layer))
        for layer in sorted({key[3] for key in groups})
    }
    turns = {turn: n for n, turn in enumerate(dict.fromkeys(key[0] for key in passes))}
    return make_trace(
        (
            Pass(
                PREFILL if key[1] == 0 else DECODE,
                {layer: _matrix(rows, layer, path) for layer, rows in sorted(chosen.items())},
                turns[key[0]],
            )
            for key, chosen in passes.items()
        ),
        layers,
        model=Path(known.get("model", "")).name,
        notes=notes,
        path=path,
    )


def _matrix(rows: list[list[int]], layer: int, path: str | Path | None) -> np.ndarray:
    width = len(rows[0])
    if any(len(row) != width for row in rows):
        raise TraceError(f"layer {layer} chose differently many experts in one pass", path=path)
    return np.array(rows, np.int32)


def _number(known: dict[str, str], key: str) -> int | None:
    value = known.get(key, "")
    return int(value) if _NUMBER.fullmatch(value) and int(value) > 0 else None


def _bad(path: str | Path | None, number: int, what: str) -> TraceError:
    return TraceError(f"line {number} {what}", path=path)
