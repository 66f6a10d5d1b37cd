"""The drive that a command reckons with: a probe's file, constants, or the default."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.sizes import parse_size
from mbolt_mlx.profile.law import DEFAULT_LAW, Law
from mbolt_mlx.profile.probe import open_probe, read_probe


def size_of(option: str) -> Callable[[str], int]:
    """What parses the size that ``option`` takes, and names it in its error."""

    def parse(text: str) -> int:
        try:
            return parse_size(text)
        except UsageError as error:
            raise UsageError(f"{option} {error.message}", hint=error.hint) from None

    return parse


def add_drive(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a drive."""
    group = parser.add_argument_group("drive")
    group.add_argument("--drive", metavar="PROBE.json", help="what `mbolt-mlx probe --json` wrote")
    group.add_argument(
        "--bandwidth",
        type=size_of("--bandwidth"),
        metavar="SIZE",
        help="bytes a second, such as 3GB",
    )
    group.add_argument("--t-op", type=float, metavar="µs", help="microseconds that a read adds")


def open_law(args: argparse.Namespace) -> Law:
    """The drive's law: the probe's, with ``--bandwidth`` and ``--t-op`` in place of its constants.

    Raises:
        UsageError: for a constant below zero.
    """
    law = read_probe(open_probe(args.drive)) if args.drive else DEFAULT_LAW
    if args.t_op is not None and not 0 <= args.t_op < 1e9:
        raise UsageError("--t-op is in microseconds, at least 0", found=args.t_op)
    return Law(
        law.t_op if args.t_op is None else args.t_op * 1e-6,
        law.bandwidth if args.bandwidth is None else float(args.bandwidth),
        law.slower,
    )
