"""``mbolt-mlx plot``: pictures of traces and of what a replay says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mbolt_mlx.cli.arguments import fraction
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import TraceError, UsageError
from mbolt_mlx.profile import charts
from mbolt_mlx.profile.perms import make_perms, read_perms
from mbolt_mlx.profile.traces import Trace, read_trace

HELP = "draw hit rates, reads by layout, predicted against measured, or which experts fire together"
_SOURCES = {"side_file": "side-file", "shards": "own files"}
_SIZE_MAX, _MS_MAX = 64 << 20, 1e12
KINDS = ("hits", "layouts", "measured", "coactivation")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="traces; for `measured`, the JSON of gates or of plan_check.py",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".png, .svg or .pdf")
    parser.add_argument("--perms", metavar="FILE", help="for `layouts` (default: of the trace)")
    parser.add_argument("--resident", type=fraction, default=0.2, metavar="FRACTION")
    parser.add_argument("--layer", type=int, help="for `coactivation` (default: the middle one)")


def run(args: argparse.Namespace) -> int:
    """Draw; returns the exit status."""
    if args.kind == "measured":
        done = charts.measured([p for path in args.files for p in _points(path)], args.output)
    elif args.kind == "hits":
        names = [_name(path) for path in args.files]
        names = names if len({*names}) == len(names) else args.files
        traces = {name: _decoded(path) for name, path in zip(names, args.files, strict=True)}
        done = charts.hit_rates(traces, args.output)
    else:
        if len(args.files) != 1:
            raise UsageError(f"`{args.kind}` draws one trace", found=f"{len(args.files)} files")
        trace = _decoded(args.files[0])
        if args.kind == "layouts":
            perms = read_perms(args.perms) if args.perms else make_perms(trace, phase=None)
            trace.check_model(perms.experts, args.perms, than=" than this profile")
            done = charts.layouts(trace, perms, args.output, resident=args.resident)
        else:
            middle = list(trace.layers)[len(trace.layers) // 2]
            layer = middle if args.layer is None else args.layer
            done = charts.coactivation(trace, layer, args.output)
    print(f"mbolt-mlx plot: {done}", file=sys.stderr)
    return 0


def _decoded(path: str) -> Trace:
    trace = read_trace(path)
    trace.need_decoded(path)
    return trace


def _name(path: str) -> str:
    return Path(path).name.split(".")[0]


def _points(path: str) -> list[dict]:
    """Predicted and measured milliseconds a token in what `gate` or plan_check.py wrote."""
    try:
        document = json.loads(files.read_whole(path, limit=_SIZE_MAX))
        if "plan_check" in document:
            rows = document["plan_check"]["rows"]
            labels = [f"{row['model']}, {_SOURCES[row['source']]}" for row in rows]
        else:
            rows = document["rows"]
            name = document.get("name", Path(path).stem)
            labels = [f"{name}, {row['layout']}" for row in rows]
        points = [
            {
                "label": label,
                "predicted": float(row["predicted_ms_per_token"]),
                "measured": float(row["measured_ms_per_token"]),
            }
            for label, row in zip(labels, rows, strict=True)
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
        raise TraceError("not what `gate` or plan_check.py wrote", path=path) from None
    if not points:
        raise TraceError("there are no rows to draw", path=path)
    for number, point in enumerate(points):
        for name in ("predicted", "measured"):
            if not 0 < point[name] < _MS_MAX:  # nor not a number
                raise TraceError(
                    f"row {number}: {name}_ms_per_token has no meaning",
                    path=path,
                    expected="milliseconds above 0",
                    found=f"{point[name]:g}",
                )
    return points
