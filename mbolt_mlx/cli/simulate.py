"""``mbolt-mlx simulate``: replay a trace under a policy, a memory, a layout and a drive."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mbolt_mlx.cli.arguments import fraction
from mbolt_mlx.cli.drive import add_drive, open_law, size_of
from mbolt_mlx.cli.traces import add_trace, open_trace, share
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.residency import DEFAULT_POLICY, POLICIES
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.counts import Counts, PassCounts, bootstrap
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.layout import LAYOUTS, lay_out
from mbolt_mlx.profile.perms import read_perms
from mbolt_mlx.profile.probe import law_document
from mbolt_mlx.profile.replay import SCOPES, Setup, replay

HELP = "replay a trace: hits, reads, bytes and time under any policy, memory, layout and drive"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add_trace(parser)
    add = parser.add_argument
    add(
        "--policy",
        choices=["default", *POLICIES, "belady"],
        default="default",
        help=f"who stays in memory (default: {DEFAULT_POLICY}); belady is the optimum",
    )
    add(
        "--scope",
        choices=SCOPES,
        default="layer",
        help="slots for each layer, bytes for all, or slots for each size of expert "
        "(default: layer, as the engine)",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--resident", type=fraction, metavar="FRACTION", help="of the experts")
    size.add_argument(
        "--budget", type=size_of("--budget"), metavar="SIZE", help="bytes for experts"
    )
    add("--layout", choices=list(LAYOUTS), help="where the experts lie (default: coalesced)")
    add("--perms", metavar="FILE", help="perms.json, for the layouts in an order of it")
    add("--seed-heat", action="store_true", help="start with the hottest experts of --perms")
    add(
        "--merge-gap",
        type=int,
        metavar="BYTES",
        help="read over gaps of up to so many bytes (default: as the engine; less than a page for "
        "a GGUF file)",
    )
    add_drive(parser)
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit status."""
    if args.merge_gap is not None and args.merge_gap < 0:
        raise UsageError("--merge-gap is at least 0", found=args.merge_gap)
    trace, headers = open_trace(args)
    perms = read_perms(args.perms) if args.perms else None
    if args.seed_heat and perms is None:
        raise UsageError("--seed-heat needs --perms")
    if perms is not None:
        trace.check_model(perms.experts, args.perms, than=" than this profile")
    layout = args.layout or "coalesced"
    if headers is not None:
        ranges = headers.ranges(layout, perms)
    else:
        ranges = lay_out(layout, trace.layers, perms.orders if perms else None)
    gap = args.merge_gap
    if gap is None and headers is not None:
        gap = headers.merge_gap
    law = open_law(args)
    setup = Setup(
        args.policy,
        args.scope,
        resident=args.resident,
        budget=args.budget,
        merge_gap=gap,
        heat=perms.heat if args.seed_heat and perms else None,
    )
    counts = replay(trace, setup, ranges)
    best = None
    if args.scope == "layer" and args.policy != "belady":
        best = replay(trace, Setup("belady", resident=args.resident, budget=args.budget))
    found = {
        "trace": args.trace,
        "policy": DEFAULT_POLICY if args.policy == "default" else args.policy,
        "scope": args.scope,
        "layout": layout,
        **summary(counts, law),
        "belady_decode_hit_rate": best.decode.hit_rate if best and best.decode.tokens else None,
        **law_document(law),
    }
    print(json.dumps(found, indent=2) if args.json else table(found))
    return 0


def summary(counts: PassCounts, law: Law) -> dict[str, Any]:
    """The figures of a replay, as JSON values; those without a phase's name are of decoding.

    Rates and averages of a phase without tokens are None.
    """
    out: dict[str, Any] = {}
    for phase, one in (("prefill", counts.prefill), ("decode", counts.decode)):
        out[f"{phase}_hit_rate"] = one.hit_rate if one.tokens else None
        for name in ("tokens", "hits", "misses", "reads", "bytes", "evictions"):
            out[f"{phase}_{name}"] = getattr(one, name)
        out[f"{phase}_ms_per_token"] = _ms(one, law)
    decode = counts.decode
    rates = counts.hits_by_pass()
    out["decode_hit_rate_range"] = list(bootstrap(rates)) if decode.tokens else None
    for name in ("misses", "reads", "bytes"):
        out[f"{name}_per_token"] = decode.per_token(name) if decode.tokens else None
    out["ms_per_token"] = _ms(decode, law)
    return out


def _ms(counts: Counts, law: Law) -> float | None:
    if not counts.tokens:
        return None
    return 1e3 * law.seconds(counts.per_token("reads"), counts.per_token("bytes"))


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    rows = [
        ("replayed", f"{found['policy']}, scope {found['scope']}, layout {found['layout']}"),
        ("tokens", f"{found['prefill_tokens']} prefill, {found['decode_tokens']} decode"),
        *_decoded(found),
        ("prefill misses", f"{found['prefill_misses']} in {found['prefill_reads']} reads"),
    ]
    return "\n".join(f"{name:<18}{value}" for name, value in rows)


def _decoded(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows about decoding, each "-" where nothing was decoded."""
    best = found["belady_decode_hit_rate"]
    if not found["decode_tokens"]:
        names = ("decode hit rate", *(f"{n} a token" for n in ("misses", "reads", "bytes")))
        return [(name, "-") for name in (*names, "reading a token")]
    low, high = found["decode_hit_rate_range"]
    return [
        (
            "decode hit rate",
            f"{share(found['decode_hit_rate'])} (95 % range {share(low)} to {share(high)})",
        ),
        *([("optimum (Belady)", share(best))] if best is not None else []),
        ("misses a token", f"{found['misses_per_token']:.2f}"),
        ("reads a token", f"{found['reads_per_token']:.2f}"),
        ("bytes a token", format_size(found["bytes_per_token"])),
        (
            "reading a token",
            f"{found['ms_per_token']:.1f} ms at {found['t_op_s'] * 1e6:.0f} µs a read and "
            f"{format_size(found['bytes_per_s'])}/s",
        ),
    ]
