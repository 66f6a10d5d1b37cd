"""``coalesce_rewrite.py MODEL_DIR -o SIDEFILE``: `mbolt-mlx coalesce` under its first name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mbolt_mlx.cli.coalesce import HELP, add_common, run
from mbolt_mlx.core import commands

__all__ = ["HELP", "configure", "main", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("model", metavar="MODEL_DIR", help="folder of the model, or its name")
    add_common(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return commands.script("coalesce_rewrite.py", "mbolt_mlx.cli.coalesce_rewrite", argv)


if __name__ == "__main__":
    sys.exit(main())
