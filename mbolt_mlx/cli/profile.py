"""``mbolt-mlx profile``: read the order and heat of a side-file back as perms.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from mbolt_mlx.core.report import check_report
from mbolt_mlx.profile.perms import FORMAT, in_file_order, write_perms
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.locate import check_is_side_file, present_side_file, read_side_file

HELP = "read the order and heat of a side-file's experts back, as perms.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "side_file",
        metavar="SIDE_FILE",
        help="a side-file, or a model (a folder, a repository, a short name) whose side-file is "
        "in the user's cache",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="perms.json")


def run(args: argparse.Namespace) -> int:
    """Write the profile; returns the exit status."""
    check_report(args.output, FORMAT)
    path = _side_file(args.side_file)
    check_is_side_file(path)
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


def _side_file(text: str) -> Path:
    """The file ``text``, or the side-file of the model that is called so."""
    from mbolt_mlx.names import resolve

    path = Path(text)
    if path.suffix == ".safetensors" or (path.exists() and not path.is_dir()):
        return path
    return present_side_file(Checkpoint.open(resolve(text)), text)
