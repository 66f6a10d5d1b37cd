"""``mbolt-gguf profile``: read the order and heat of a rewritten file back as perms.json."""

from __future__ import annotations

import argparse
import sys

from mbolt_gguf.profile import read_profile
from mbolt_mlx.profile.perms import write_perms

HELP = "read the order, heat and cliques of a rewritten file back, as perms.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file, any file of a split model")
    parser.add_argument("-o", "--output", required=True, metavar="PERMS.json")


def run(args: argparse.Namespace) -> int:
    """Write the profile; returns the exit status."""
    perms = read_profile(args.file)
    write_perms(args.output, perms)
    heat = "with heat" if any(map(any, perms.heat.values())) else "no heat"
    print(
        f"mbolt-gguf profile: {args.output}: {len(perms.experts)} layers, "
        f"order {perms.document['order']}, {heat}",
        file=sys.stderr,
    )
    return 0
