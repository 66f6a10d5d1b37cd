"""``mbolt-mlx trace-stats``: what a trace says of a model's routing."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from mbolt_mlx.cli.traces import add_trace, open_trace, share
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.trace_stats import trace_stats

HELP = "show a trace's entropy, heat, lift, working set and hit-rate curve"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add_trace(parser, option=False)
    parser.add_argument("--layers", action="store_true", help="show each layer too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the figures; returns the exit status."""
    trace, _ = open_trace(args)
    found = trace_stats(trace)
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found, args.layers)))
    return 0


def lines(found: dict[str, Any], by_layer: bool = False) -> list[str]:
    """The figures for people."""
    experts, top_k = (", ".join(map(str, found[key])) for key in ("experts", "top_k"))
    most = math.log2(max(found["experts"]))
    token = found["token_bytes"]
    rows = [
        ("model", found["model"] or "not named"),
        ("layers", f"{found['layers']} of {experts} experts, {top_k} a token"),
        (
            "tokens",
            f"{found['prefill_tokens']} prefill, {found['decode_tokens']} decode, in "
            f"{found['passes']} passes and {found['sessions']} sessions",
        ),
        *([("experts a token", format_size(token))] if token else []),
        ("entropy", f"{found['entropy_bits']:.2f} bits of {most:.2f}"),
        ("never used", f"{found['never_used']} experts"),
    ]
    if found["reuse"] is not None:
        rows.append(("reuse", f"{found['reuse']:.0%} of a token's experts served the one before"))
    if found["lift_mean"] is not None:
        rows.append(("lift", f"{found['lift_mean']:.2f} (1: experts fire independently)"))
    sets = ", ".join(f"{n:.1f} in {window}" for window, n in found["working_set"].items())
    rows.append(("working set", f"experts a layer: {sets} tokens"))
    out = [f"{name:<16}{value}" for name, value in rows]
    curve = found["hit_rates"]
    head = list(next(iter(curve.values())))
    out += ["", "decode hit rate by the share of experts in memory"]
    out.append(f"{'':<16}" + "".join(f"{float(r):>8.0%}" for r in head))
    for policy, rates in curve.items():
        out.append(f"{policy:<16}" + "".join(f"{share(rates[r]):>8}" for r in head))
    if by_layer:
        out += ["", f"{'layer':>5} {'entropy':>8} {'reuse':>6} {'unused':>7}  hottest"]
        for y in found["by_layer"]:
            reuse = f"{y['reuse']:.0%}" if y["reuse"] is not None else "-"
            out.append(
                f"{y['layer']:>5} {y['entropy_bits']:>8.2f} {reuse:>6} {y['never_used']:>7}  "
                + " ".join(map(str, y["hottest"]))
            )
    return out
