"""The benchmark's JSON and its table."""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mbolt_mlx.core.output import write_whole

FORMAT, VERSION = "mbolt-bench", 1
# Every run has these keys; a run that failed has the first five and "error".
KEYS = (
    "engine",
    "resident",
    "side_file",
    "policy",
    "cold",
    "prefill_tps",
    "ttft_s",
    "decode_tps",
    "decode_hit_rate",
    "decode_misses_per_token",
    "decode_reads_per_token",
    "decode_bytes_per_token",
    "read_wait_s_per_token",
    "readback_wait_s_per_token",
    "drive_read_bytes",
    "peak_rss_bytes",
    "slot_bytes",
    "dense_bytes",
)


def document(
    machine: dict[str, Any], runs: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """The whole JSON: machine, runs with the fixed keys first, a summary, and ``more``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        **more,
        "runs": [ordered(run) for run in runs],
        "summary": summarise(runs),
    }


def ordered(run: dict[str, Any]) -> dict[str, Any]:
    """``run`` with the fixed keys first and in order."""
    first = KEYS[:5] if "error" in run else KEYS
    return {**{key: run.get(key) for key in first}, **run}


def write(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write ``data`` as JSON to ``path``, whole or not at all.

    Raises:
        OutputError: if it cannot be written.
    """
    write_whole(path, json.dumps(data, indent=1).encode() + b"\n")


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, least and most of the ``values`` that are there, and how many; None without any."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {
        "median": statistics.median(known),
        "min": min(known),
        "max": max(known),
        "count": len(known),
    }


def grouped(runs: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of the same setting together, in the order of the settings."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda r: (r.get("setting", 0), r.get("order", 0))):
        groups.setdefault((run["engine"], run.get("setting")), []).append(run)
    return list(groups.values())


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a setting: the spread of every figure over its runs, and whether text agrees.

    ``logits``: "same" as the first setting's with the same model, tokens and chunks, in every run,
    or "differ"; None where that is unknown.
    """
    references: dict[tuple[Any, ...], set[Any]] = {}
    out = []
    for group in grouped(runs):
        good = [r for r in group if "error" not in r]
        entry = {key: (good or group)[0].get(key) for key in KEYS[:4]}
        entry["cold"] = bool(good) and all(r.get("cold") for r in good)
        entry["runs"] = len(group)
        entry["errors"] = len(group) - len(good)
        entry["logits"] = None
        digests = {r.get("logits_sha256") for r in good} - {None}
        if digests:
            same_work = tuple(good[0].get(key) for key in _SAME_WORK)
            reference = references.setdefault(same_work, digests)
            entry["logits"] = "same" if digests == reference and len(digests) == 1 else "differ"
        for key in KEYS[5:]:
            entry[key] = spread(r.get(key) for r in good)
        out.append(entry)
    return out


_SAME_WORK = ("model", "tokens_sha256", "prefill_step_size")
_COLUMNS = (
    # heading, key, factor, digits, with range
    ("prefill tok/s", "prefill_tps", 1, 1, True),
    ("first token s", "ttft_s", 1, 2, False),
    ("decode tok/s", "decode_tps", 1, 2, True),
    ("hit %", "decode_hit_rate", 100, 1, False),
    ("misses/tok", "decode_misses_per_token", 1, 1, False),
    ("reads/tok", "decode_reads_per_token", 1, 1, False),
    ("MB/tok", "decode_bytes_per_token", 1e-6, 1, False),
    ("read wait ms", "read_wait_s_per_token", 1e3, 1, False),
    ("readback ms", "readback_wait_s_per_token", 1e3, 1, False),
    ("peak MB", "peak_rss_bytes", 1e-6, 0, False),
)


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as text: medians, and least to most where it matters."""
    head = ["engine", "resident", "from", "cold", "runs", *(c[0] for c in _COLUMNS), "logits"]
    rows = [head]
    for entry in summary:
        source = "memory" if entry["engine"] == "mlx-lm" else "shards"
        if entry["side_file"]:
            source = "side-file"
        runs = str(entry["runs"] - entry["errors"])
        if entry["errors"]:
            runs += f" ({entry['errors']} failed)"
        row = [
            entry["engine"],
            "-" if entry["resident"] is None else f"{entry['resident']:.3g}",
            source,
            "yes" if entry["cold"] else "no",
            runs,
        ]
        for _, key, factor, digits, with_range in _COLUMNS:
            row.append(_cell(entry[key], factor, digits, with_range))
        rows.append([*row, entry["logits"] or "-"])
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if n in (0, 2) else c.rjust(w)
            for n, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cell(value: dict[str, float] | None, factor: float, digits: int, with_range: bool) -> str:
    if value is None:
        return "-"
    text = f"{value['median'] * factor:.{digits}f}"
    if with_range and value["count"] > 1:
        text += f" [{value['min'] * factor:.{digits}f}-{value['max'] * factor:.{digits}f}]"
    return text
