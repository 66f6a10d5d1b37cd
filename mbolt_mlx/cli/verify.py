"""``mbolt-mlx verify``: prove a side-file against the model it was made of."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mbolt_mlx.cli.experts import open_experts
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.locate import present_side_file
from mbolt_mlx.storage.verify import verify

HELP = "compare a side-file with its model, byte for byte"
DESCRIPTION = """\
Compare a side-file with the model it was made of. Exit status 1 and the first difference (layer,
expert, piece, byte) when they differ.

Without --full: the manifest, the source's names, sizes, header hashes and times, the geometry, and
64 blocks spread over the file. A source that was changed in place, with the same size, header and
time, is surely found only by --full."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model", required=True, help="a folder, a hub repository, or a short name"
    )
    parser.add_argument("--revision", help="revision of the hub repository")
    parser.add_argument(
        "--side-file", type=Path, help="the side-file (default: the one in the user's cache)"
    )
    parser.add_argument(
        "--full", action="store_true", help="every byte of every expert, all checksums, padding"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Compare what ``args`` name; returns 0, or raises with the first difference."""
    from mbolt_mlx.names import resolve

    checkpoint = Checkpoint.open(
        resolve(args.model, revision=args.revision, progress=not args.quiet)
    )
    side_file = args.side_file or present_side_file(checkpoint, args.model)
    layers, computer = open_experts(checkpoint)
    report = verify(
        checkpoint,
        layers,
        side_file,
        full=args.full,
        progress=not args.quiet,
        computer=computer,
    )
    if not args.quiet:
        part = "all" if report.full else f"{report.blocks} of"
        print(
            f"{report.path}: {part} {report.of_blocks} blocks are the model's own bytes "
            f"({format_size(report.bytes)} in {report.seconds:.1f} s)",
            file=sys.stderr,
        )
        if not report.full:
            print("--full compares every byte", file=sys.stderr)
    return 0
