"""The drive that a command reckons with: a probe's file, constants, or the default."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mbolt_mlx.core.errors import ReadError, TraceError, UsageError
from mbolt_mlx.core.sizes import parse_size
from mbolt_mlx.profile.law import DEFAULT_LAW, Law
from mbolt_mlx.profile.probe import read_laws, read_probe


def add_drive(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a drive."""
    group = parser.add_argument_group("drive")
    group.add_argument("--drive", metavar="PROBE.json", help="what `mbolt-mlx probe --json` wrote")
    group.add_argument(
        "--bandwidth", type=parse_size, metavar="SIZE", help="bytes a second, such as 3GB"
    )
    group.add_argument("--t-op", type=float, metavar="µs", help="microseconds that a read adds")


def open_probe(path: str) -> dict[str, Any]:
    """The JSON of a probe.

    Raises:
        ReadError: when it cannot be read.
        TraceError: when it is not JSON, or no probe.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ReadError(f"cannot open: {error.strerror}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}", path=path) from error
    if not isinstance(document, dict):
        raise TraceError("not the result of a probe", path=path)
    try:
        read_probe(document)
        read_laws(document)
    except TraceError as error:
        raise TraceError(error.message, path=path, found=error.found) from None
    return document


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
