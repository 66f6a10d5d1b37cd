"""``mbolt-mlx models``: the names that --model knows, and what each model asks of the machine."""

from __future__ import annotations

import argparse

from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.names import DEMO, short_names

HELP = "list the short names of models, with their sizes"


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print one line a name."""
    rows = [("name", "repository", "an expert", "all experts", "a token, all missed")]
    rows.append((DEMO, "(ships with mbolt-mlx)", "", "", ""))
    for name, model in sorted(short_names().items(), key=lambda item: item[0].casefold()):
        sizes = [model.sizes[k] for k in ("expert_bytes", "all_experts_bytes", "token_bytes")]
        rows.append((name, model.repositories[name], *map(format_size, sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = "  ".join(cell.rjust(w) for cell, w in zip(row[2:], widths[2:], strict=True))
        print(f"{left}  {right}".rstrip())
    return 0
