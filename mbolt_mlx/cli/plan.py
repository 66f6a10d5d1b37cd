"""``mbolt-mlx plan``: memory, speed and disk of a model, before it is downloaded or rewritten."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from mbolt_mlx.cli.arguments import MODEL_HELP, fraction
from mbolt_mlx.cli.drive import add_drive, open_law, size_of
from mbolt_mlx.cli.headers import open_headers
from mbolt_mlx.cli.traces import check_traced
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.memory import total_memory
from mbolt_mlx.core.places import cache_folder, user_path
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.perms import read_perms
from mbolt_mlx.profile.plan import RESIDENTS, Assumptions, make_plan, speed
from mbolt_mlx.profile.probe import open_probe, read_laws
from mbolt_mlx.profile.traces import read_trace

# Beyond any model's context, and any machine's time for a token.
_CONTEXT_MAX, _COMPUTE_MS = 1 << 30, (1e-3, 1e7)
HELP = "say what a model will need and how fast it will be, from its headers alone"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    add("--model", required=True, help=MODEL_HELP)
    add("--revision", help="revision of the hub repository")
    add(
        "--memory",
        type=size_of("--memory"),
        metavar="SIZE",
        help="for the whole process (default: 70 %% of this machine's)",
    )
    add(
        "--resident",
        metavar="FRACTIONS",
        help=f"plan for these, comma-separated (default: {','.join(f'{r:g}' for r in RESIDENTS)})",
    )
    add("--trace", metavar="FILE", help="of this model, for its hit rates")
    add("--perms", metavar="FILE", help="its profile, to weigh a profile order (with --trace)")
    add("--context", type=int, metavar="N", help="positions to make room for")
    add(
        "--compute-ms",
        type=float,
        metavar="MS",
        help="milliseconds a token with every expert in memory (1000 ÷ its tok/s)",
    )
    add("--side-file", metavar="FILE", help="where the side-file would go, for the free space")
    add_drive(parser)
    add(
        "--limit",
        type=size_of("--limit"),
        metavar="SIZE",
        help="bytes a second that a control group or a cloud volume allows; --drive then tells of "
        "the drive without it",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    residents = (
        [fraction(part) for part in args.resident.split(",")] if args.resident else RESIDENTS
    )
    if args.perms and not args.trace:
        raise UsageError("--perms needs --trace")
    if args.context is not None and not 1 <= args.context <= _CONTEXT_MAX:
        raise UsageError(
            f"--context is from 1 to {_CONTEXT_MAX} positions",
            found=args.context if abs(args.context) < 1 << 80 else "a longer number",
        )
    headers = open_headers(args.model, revision=args.revision)
    notes = []
    if headers.remote:
        notes.append("the model: from its headers on the hub; nothing was downloaded")
    if args.memory is None:
        notes.append("memory: 70 % of this machine's")
    trace = read_trace(args.trace) if args.trace else None
    perms = read_perms(args.perms) if args.perms else None
    if trace is not None:
        trace.need_decoded(args.trace)
        check_traced(trace, headers, args.trace)
    if trace is not None and perms is not None:
        trace.check_model(perms.experts, args.perms, than=" than this profile")
    found = make_plan(
        headers.model(),
        _assumptions(args, notes),
        residents=residents,
        memory=args.memory or int(0.7 * total_memory()),
        trace=trace,
        perms=perms,
        free_bytes=_free(args.side_file),
    )
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found)))
    return 0


def _assumptions(args: argparse.Namespace, notes: list[str]) -> Assumptions:
    law = open_law(args)
    laws = {4: law}
    if args.drive and args.bandwidth is None and args.t_op is None:
        laws |= read_laws(open_probe(args.drive))
        notes.append(f"drive: measured, {args.drive}")
    elif args.bandwidth is None or args.t_op is None:
        notes.append(
            f"drive: {law.t_op * 1e6:.0f} µs a read and {format_size(law.bandwidth)}/s, an Apple "
            "SSD's; `mbolt-mlx probe` measures yours"
        )

    def at(depth: float) -> Law:
        return laws[min(laws, key=lambda d: abs(np.log2(d / depth)))]

    compute = None if args.compute_ms is None else args.compute_ms / 1e3
    if compute is not None and not _COMPUTE_MS[0] <= args.compute_ms <= _COMPUTE_MS[1]:
        low, high = _COMPUTE_MS
        raise UsageError(
            f"--compute-ms is in milliseconds, from {low:g} to {high:g}", found=args.compute_ms
        )
    more = {} if args.context is None else {"context": args.context}
    return Assumptions(law=at, limit=args.limit, compute_s=compute, notes=tuple(notes), **more)


def _free(side_file: str | None) -> int | None:
    """Free bytes where the side-file would go, by default in the user's cache."""
    place = user_path(side_file).parent if side_file else cache_folder()
    while not place.exists() and place != place.parent:
        place = place.parent
    return files.free_space(place)


def lines(found: dict[str, Any]) -> list[str]:
    """The plan for people."""
    model = found["model"]
    out = [
        f"{model['name']}: {model['layers']} layers with experts, "
        f"{format_size(model['expert_bytes'])} of experts, "
        f"{format_size(model['dense_bytes'])} of everything else, "
        f"{format_size(model['token_bytes'])} of experts a token",
        "",
        f"{'resident':>8} {'slots':>7} {'memory':>10} {'hits':>6} {'misses':>7} {'read':>10} "
        f"{'tok/s':>8} {'with side-file':>15}",
        f"{'':>8} {'a layer':>7} {'':>10} {'':>6} {'a token':>7} {'a token':>10}",
    ]
    fits = next((row for row in found["rows"] if "memory_limit" in row), None)
    for row in found["rows"]:
        if fits is not None and row is not fits and _same(row, fits):
            continue
        mark = "  <- fits" if "memory_limit" in row else ""
        out.append(
            f"{row['resident']:>8.1%} {row['slots_per_layer']:>7.1f} "
            f"{format_size(row['memory_bytes']):>10} {row['hit_rate']:>6.1%} "
            f"{row['reads_per_token']:>7.1f} {format_size(row['bytes_per_token']):>10} "
            f"{speed(row['tps_shards']):>8} {speed(row['tps_side_file']):>15}{mark}"
        )
    out += ["", found["verdict"][:1].upper() + found["verdict"][1:] + "."]
    out += ["", "Assumed:"] + [f"  {note}" for note in found["assumed"]]
    return out


def _same(row: dict[str, Any], fits: dict[str, Any]) -> bool:
    """Whether ``row`` would be shown as ``fits`` is."""
    return all(row[key] == fits[key] for key in row)
