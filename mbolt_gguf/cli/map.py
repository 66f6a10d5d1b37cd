"""``mbolt-gguf map``: what a GGUF model consists of and what a token reads, from headers only."""

from __future__ import annotations

import argparse
import json

from mbolt_gguf.describe import describe, lines
from mbolt_gguf.model import Model
from mbolt_mlx.core.report import write_report

HELP = "show a model's layers, experts and slices, and what a token reads"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, any file of a split model")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Print what the model consists of; returns the exit status."""
    found = describe(Model.open(args.model))
    if args.json is None:
        print("\n".join(lines(found)))
        return 0
    if args.json == "-":
        print(json.dumps(found, indent=2))
    else:
        write_report(args.json, found)
    return 0
