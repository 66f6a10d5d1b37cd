"""``mbolt-mlx support``: which architectures run, from which files."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mbolt_mlx.resources import resource

HELP = "list the architectures and formats that run, and what is refused"
DATA = "manifests/support.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = (
        "Every module of mlx-lm with experts: whether it runs, which layouts of its files are read "
        "as they lie, and which are written to a side-file by `mbolt-mlx coalesce` first. The "
        "tests compare each with stock mlx-lm, bit for bit."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the matrix; returns the exit status."""
    matrix = support()
    if args.json:
        print(json.dumps(matrix, indent=2))
        return 0
    rows = [("architecture", "status", "read as they lie", "after coalesce")]
    rows += [tuple(row(entry)) for entry in matrix]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(line.rstrip())
    formats = max((entry["formats"] for entry in matrix), key=len)
    print(f"\nformats: {', '.join(formats)}")
    print("\n".join(remarks(matrix)))
    return 0


def support() -> list[dict[str, Any]]:
    """The matrix: ``architecture``, ``status``, ``formats``, ``layouts`` and ``reason`` of each."""
    return json.loads(resource(DATA).read_text(encoding="utf-8"))


def row(entry: dict[str, Any]) -> list[str]:
    """The cells of one architecture's line."""
    layouts = entry["layouts"]
    return [
        entry["architecture"],
        entry["status"],
        ", ".join(name for name, how in layouts.items() if how == "files") or "-",
        ", ".join(name for name, how in layouts.items() if how == "side-file") or "-",
    ]


def remarks(matrix: list[dict[str, Any]]) -> list[str]:
    """A line for each architecture that needs words, and one on layouts that are refused."""
    lines = [f"{e['architecture']}: {e['reason']}" for e in matrix if e["reason"]]
    refused: dict[str, list[str]] = {}
    for entry in matrix:
        for name, how in entry["layouts"].items():
            if how == "refused":
                refused.setdefault(name, []).append(entry["architecture"])
    found = "; ".join(f"{name} ({', '.join(who)})" for name, who in sorted(refused.items()))
    return [*lines, f"refused, as mlx-lm does not load them either: {found}"]
