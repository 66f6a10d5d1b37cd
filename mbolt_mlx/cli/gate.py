"""``mbolt-mlx gate``: predict a replay's reading time, then measure it on this drive."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mbolt_mlx.cli.arguments import GGUF_HELP, MODEL_HELP, fraction
from mbolt_mlx.cli.drive import size_of
from mbolt_mlx.cli.traces import open_trace
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.report import check_report, write_report
from mbolt_mlx.core.residency import POLICIES
from mbolt_mlx.profile.gate import gate, work_of
from mbolt_mlx.profile.layout import LAYOUTS, lay_out
from mbolt_mlx.profile.perms import read_perms
from mbolt_mlx.profile.replay import Setup

FORMAT, VERSION = "mbolt-gate", 1
ERROR = (
    "error a round: median over the rounds of predicted ÷ measured − 1; each round is foretold "
    "from a probe of its own"
)
HELP = "predict a replay's reading time, then read the same from this drive and compare"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.epilog = ERROR
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help=f"for its sizes: {GGUF_HELP}, {MODEL_HELP}; `trace` takes those in the trace",
    )
    add("trace", metavar="TRACE", help="what the router chose")
    add("perms", metavar="PERMS", nargs="?", help="perms.json, for layouts in an order of it")
    add("-o", "--output", required=True, metavar="OUT.json")
    add("--scratch", default=".", metavar="DIR", help="a folder on the drive (default: this one)")
    add("--layouts", metavar="NAMES", help="comma-separated (default: stock, coalesced, +chain)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--resident", type=fraction, metavar="FRACTION", help="default: 0.2")
    size.add_argument(
        "--budget", type=size_of("--budget"), metavar="SIZE", help="bytes for experts"
    )
    add("--policy", choices=["default", *POLICIES], default="default")
    add("--tokens", type=int, metavar="N", help="decoded tokens to replay (default: all)")
    add("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=15.0,
        help="to probe the drive, before each round (default: %(default)g)",
    )
    add("--pieces", type=int, metavar="N", help="places that an expert's bytes lie in (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Predict, measure, write; returns the exit status."""
    for name in ("rounds", "tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is at least 1", found=getattr(args, name))
    if not 0.5 <= args.seconds <= 600:
        raise UsageError("--seconds is from 0.5 to 600", found=args.seconds)
    check_report(args.output, FORMAT)
    works = _works(args)

    def say(text: str) -> None:
        print(f"{args.prog}: {text}", file=sys.stderr)

    found = gate(
        works, args.scratch, rounds=args.rounds, tokens=args.tokens, seconds=args.seconds, step=say
    )
    name = args.trace if args.model == "trace" else args.model
    write_report(args.output, {"format": FORMAT, "version": VERSION, "name": name, **found})
    print("\n".join(lines(found)))
    return 0


def _works(args: argparse.Namespace) -> list[Any]:
    options = argparse.Namespace(
        trace=args.trace,
        model=None if args.model == "trace" else args.model,
        revision=None,
        expert_bytes=None,
        pieces=args.pieces if args.model == "trace" else None,
        decode_batch=1,
    )
    trace, headers = open_trace(options)
    trace.need_decoded(args.trace)
    perms = read_perms(args.perms) if args.perms else None
    if perms is not None:
        trace.check_model(perms.experts, args.perms, than=" than this profile")
    names = args.layouts.split(",") if args.layouts else ["stock", "coalesced"]
    if not args.layouts and perms is not None:
        names.append("coalesced+chain")
    for name in names:
        if name not in LAYOUTS:
            raise UsageError(f"unknown layout {name!r}", expected=" or ".join(LAYOUTS))
        if names.count(name) > 1:
            raise UsageError(f"--layouts names {name} twice", hint="name each layout once")
        if LAYOUTS[name][0] != "ids" and perms is None:
            raise UsageError(
                f"the layout {name} needs an order",
                hint="give PERMS, the perms.json of `mbolt-mlx cluster`, after TRACE",
            )
    resident = 0.2 if args.budget is None and args.resident is None else args.resident
    gap = headers.merge_gap if headers else None
    setup = Setup(args.policy, budget=args.budget, resident=resident, merge_gap=gap)
    orders = perms.orders if perms else None
    return [
        work_of(
            name,
            trace,
            setup,
            headers.ranges(name, perms) if headers else lay_out(name, trace.layers, orders),
        )
        for name in names
    ]


def lines(found: dict[str, Any]) -> list[str]:
    """The comparison for people."""
    out = [
        f"{'layout':<18}{'reads a token':>14}{'MB a token':>12}{'predicted':>12}{'measured':>12}"
        f"{'error a round':>15}"
    ]
    for row in found["rows"]:
        out.append(
            f"{row['layout']:<18}{row['reads_per_token']:>14.1f}"
            f"{row['bytes_per_token'] / 1e6:>12.1f}"
            f"{row['predicted_ms_per_token']:>9.1f} ms{row['measured_ms_per_token']:>9.1f} ms"
            f"{row['error']:>15.0%}"
        )
    return [*out, ERROR, found["verdict"]]
