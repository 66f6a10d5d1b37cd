"""``mbolt-mlx profile``: read the order and heat of a side-file back as perms.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from mbolt_mlx.profile.perms import in_file_order, write_perms
from mbolt_mlx.storage.locate import read_side_file

HELP = "read the order and heat of a side-file's experts back, as perms.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("side_file", metavar="SIDE_FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="perms.json")


def run(args: argparse.Namespace) -> int:
    """Write the profile; returns the exit status."""
    path = Path(args.side_file)
    _, manifest = read_side_file(path)
    order = {y.layer: np.argsort(y.offsets, kind="stable").tolist() for y in manifest.layers}
    heat = {y.layer: list(y.heat) for y in manifest.layers if y.heat is not None}
    kind = str(manifest.order.get("kind"))
    perms = in_file_order(order, heat, model=manifest.source.name or "", kind=kind)
    write_perms(args.output, perms)
    with_heat = f"heat of {len(heat)} layers" if heat else "no heat"
    print(
        f"mbolt-mlx profile: {args.output}: {len(order)} layers, order {kind}, {with_heat}",
        file=sys.stderr,
    )
    return 0
