#!/usr/bin/env python3
"""What a profile from one kind of text is worth on the same kind and on others.

    python examples/traces/record.py demo CORPUS -o TRACES
    python examples/bench/domains.py TRACES [--resident 0.25] [--sessions 4] [--json OUT.json]

TRACES holds DOMAIN.tune.trace and DOMAIN.judge.trace. Each domain's tune trace is profiled; each
domain's judge trace is replayed on one block an expert in the order of ids (coalesced), in the
chain order of the profile, and in that order with the profile's hottest experts in memory at the
start. Each document is replayed as a process of its own, since a seed helps only once. Printed are
reads a decoded token, and for the seed also the experts that the prompt missed. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mbolt_mlx.core.counts import Counts  # noqa: E402
from mbolt_mlx.profile.counts import total  # noqa: E402
from mbolt_mlx.profile.layout import Readable, lay_out  # noqa: E402
from mbolt_mlx.profile.perms import make_perms  # noqa: E402
from mbolt_mlx.profile.replay import Setup, replay  # noqa: E402
from mbolt_mlx.profile.traces import DECODE, Trace, read_trace  # noqa: E402

TUNE, JUDGE = ".tune.trace", ".judge.trace"


def by_session(trace: Trace) -> list[Trace]:
    """One trace a session."""
    sessions = sorted({one.session for one in trace.passes})
    return [trace.part(p for p in trace.passes if p.session == one) for one in sessions]


def counted(
    sessions: Sequence[Trace],
    ranges: Mapping[int, Sequence[Readable]],
    resident: float,
    heat: Mapping[int, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Sums over processes that each begin with nothing, or with the hottest, in memory."""
    setup = Setup(resident=resident, heat=heat)
    found = [replay(one, setup, ranges) for one in sessions]
    prefill: Counts = total(one.prefill for one in found)
    decode: Counts = total(one.decode for one in found)
    return {
        "reads_per_token": decode.per_token("reads"),
        "misses_per_token": decode.per_token("misses"),
        "prefill_misses_per_session": prefill.misses / len(sessions),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, metavar="TRACES")
    parser.add_argument("--resident", type=float, default=0.25)
    parser.add_argument(
        "--sessions", type=int, default=4, help="documents judged a domain (%(default)s)"
    )
    parser.add_argument("--json", metavar="OUT.json")
    args = parser.parse_args()
    domains = sorted(p.name.removesuffix(TUNE) for p in args.traces.glob("*" + TUNE))
    if not domains:
        parser.error(f"{args.traces}: no DOMAIN{TUNE} there; make them with examples/traces")
    judge = {d: by_session(read_trace(args.traces / (d + JUDGE)))[: args.sessions] for d in domains}
    perms = {d: make_perms(read_trace(args.traces / (d + TUNE))) for d in domains}
    rows = []
    print(
        "| judged on | profile | coalesced | chain | + heat seed | prompt misses: without, with |"
    )
    print("|---|---|---|---|---|---|")
    for domain, sessions in judge.items():
        layers = sessions[0].layers
        plain = counted(sessions, lay_out("coalesced", layers), args.resident)
        for profile, one in perms.items():
            ranges = lay_out("coalesced+chain", layers, one.orders)
            found = {
                "coalesced": plain,
                "chain": counted(sessions, ranges, args.resident),
                "chain, heat seed": counted(sessions, ranges, args.resident, one.heat),
            }
            rows.append({"judged_on": domain, "profile": profile, "layouts": found})
            reads = " | ".join(f"{one['reads_per_token']:.2f}" for one in found.values())
            missed = [found[n]["prefill_misses_per_session"] for n in ("chain", "chain, heat seed")]
            print(
                f"| {domain} | {profile} | {reads} | {missed[0]:.1f}, {missed[1]:.1f} |", flush=True
            )
    if args.json:
        document = {
            "resident": args.resident,
            "decode_tokens": {d: sum(t.tokens(DECODE) for t in some) for d, some in judge.items()},
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
