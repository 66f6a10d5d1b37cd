"""``mbolt-gguf prefetch-map``: where each expert lies, for the patched llama.cpp."""

from __future__ import annotations

import argparse

from mbolt_gguf.blocks import AUTO, choose_blocks
from mbolt_gguf.cli.blocks import CHOICES, DRIVE_HELP, law_of
from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import read_map, write_map
from mbolt_mlx.core import files

HELP = "write where each expert's bytes lie, for MBOLT_PREFETCH of the patched llama.cpp"
_SIZE_MAX = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, any file of a split model")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="default: in the user's cache, where run looks"
    )
    parser.add_argument(
        "--format",
        type=int,
        choices=(2, 3),
        help="version to write (default: 2 where it can hold the model, else 3)",
    )
    parser.add_argument(
        "--blocks",
        choices=CHOICES,
        default=AUTO,
        help="of an interleaved file: one read an expert (whole), or its slices apart, so that "
        "computing begins earlier with --prefetch-mode willneed (slices); auto: whole, or what "
        "suits the drive",
    )
    parser.add_argument("--drive", metavar="PROBE.json", help=DRIVE_HELP)


def run(args: argparse.Namespace) -> int:
    """Write the map and say where; returns the exit status."""
    model = Model.open(args.model)
    law, blocks = law_of(args.drive), args.blocks
    if blocks == AUTO:
        blocks = choose_blocks(find_experts(model), law)
    place = write_map(model, args.output, version=args.format, blocks=blocks)
    written = read_map(files.read_whole(place, limit=_SIZE_MAX), place)
    layers = len({record.layer for record in written.records})
    count = len({file.path for file in written.files})
    # A file that is named more than once is one whose blocks are read slice by slice.
    how = ", blocks read slice by slice" if count < len(written.files) else ""
    print(
        f"{place}: MBPF v{written.version}, {layers} layers, {len(written.records)} tensors or "
        f"slices in {count} file{'s' if count > 1 else ''}{how}"
    )
    return 0
