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
    for entry in matrix:
        if entry["reason"]:
            print(f"{entry['architecture']}: {entry['reason']}")
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
