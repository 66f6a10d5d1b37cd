"""``mbolt-mlx cluster``: a trace's profile, and the orders of experts that it suggests."""

from __future__ import annotations

import argparse
import sys

from mbolt_mlx.cli.traces import add_trace, open_trace
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.report import check_report
from mbolt_mlx.profile.perms import FORMAT, make_perms, write_perms

HELP = "profile a trace: which experts are hot and which fire together, as perms.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add_trace(parser, option=False)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="perms.json")
    parser.add_argument(
        "--train",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="profile only the first so much of the tokens (default: all)",
    )
    parser.add_argument(
        "--prefill", action="store_true", help="count the prompts' tokens too, not only decoding"
    )


def run(args: argparse.Namespace) -> int:
    """Write the profile; returns the exit status."""
    if not 0.0 < args.train <= 1.0:
        raise UsageError("--train is a fraction over 0 and up to 1", found=args.train)
    check_report(args.output, FORMAT)
    trace, _ = open_trace(args)
    decode = not args.prefill and trace.tokens("decode") > 0
    perms = make_perms(trace, train=args.train, phase="decode" if decode else None)
    write_perms(args.output, perms)
    layers = perms.document["layers"]
    groups = sum(y["n_clusters"] for y in layers) / len(layers)
    quality = sum(y["modularity"] for y in layers) / len(layers)
    print(
        f"{args.prog}: {args.output}: {len(layers)} layers from "
        f"{perms.document['train_tokens']} tokens, {groups:.1f} communities a layer, "
        f"modularity {quality:.3f}",
        file=sys.stderr,
    )
    return 0
