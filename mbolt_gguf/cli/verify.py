"""``mbolt-gguf verify``: prove a rewritten model against its original, byte for byte."""

from __future__ import annotations

import argparse
import sys

from mbolt_gguf.verify import verify
from mbolt_mlx.core.sizes import format_size

HELP = "compare a rewritten model with its original, every byte"
DESCRIPTION = """\
Compare a rewritten model with its original: every byte of every tensor through the permutation
that the files carry, interleaved blocks too, and the metadata. Exit status 1 and the first
difference (tensor, expert, byte) when they differ."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("original", metavar="ORIGINAL", help="a GGUF file, any of a split model")
    parser.add_argument("rewritten", metavar="REWRITTEN", help="what was made of it")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Compare what ``args`` name; returns 0, or raises with the first difference."""
    report = verify(args.original, args.rewritten, progress=not args.quiet)
    if not args.quiet:
        how = "interleaved, " if report.interleaved else ""
        print(
            f"{report.path}: every byte is the original's: {report.tensors} tensors, {how}"
            f"{report.moved} of {report.experts} experts at another place "
            f"({format_size(report.bytes)} in {report.seconds:.1f} s)",
            file=sys.stderr,
        )
    return 0
