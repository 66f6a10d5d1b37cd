"""``mbolt-gguf prefetch-map``: where each expert lies, for the patched llama.cpp."""

from __future__ import annotations

import argparse

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


def run(args: argparse.Namespace) -> int:
    """Write the map and say where; returns the exit status."""
    model = Model.open(args.model)
    place = write_map(model, args.output, version=args.format)
    written = read_map(files.read_whole(place, limit=_SIZE_MAX), place)
    layers = len({record.layer for record in written.records})
    print(
        f"{place}: MBPF v{written.version}, {layers} layers, {len(written.records)} tensors in "
        f"{len(written.files)} file{'s' if len(written.files) > 1 else ''}"
    )
    return 0
