#!/usr/bin/env python3
"""Residency policies on routing traces: hit rates with ranges, and the gap to the optimum.

    python examples/bench/policies.py TRACE... [--train 0] [--json OUT.json]

A table a trace: decode hits of LRU, the decayed count and Markov, with slots for each layer and
with a pool for each size of expert, beside Belady's optimum for a layer's own slots. Nothing is
timed and nothing is read but the traces. With ``--train F`` only what comes after the first F of a
trace is counted (whole sessions where it has several).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mbolt_mlx.profile.compare import POLICIES, RESIDENTS, compare, held_out, table  # noqa: E402
from mbolt_mlx.profile.traces import DECODE, read_trace  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--train", type=float, default=0.0, help="first part that is not counted")
    parser.add_argument("--residents", default=",".join(map(str, RESIDENTS)))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", metavar="OUT.json")
    args = parser.parse_args()
    found, closed = {}, []
    for path in args.traces:
        trace = held_out(read_trace(path), args.train)
        rows = compare(
            trace,
            residents=[float(part) for part in args.residents.split(",")],
            policies=args.policies.split(","),
        )
        found[Path(path).name] = {
            "sessions": trace.sessions,
            "decode_tokens": trace.tokens(DECODE),
            "rows": rows,
        }
        closed += [
            row["gap_closed"]
            for row in rows
            if (row["policy"], row["scope"]) == ("markov", "layer")
            and row["resident"] in (0.1, 0.2)
        ]
        print(f"\n### {Path(path).name}: {trace.tokens(DECODE)} decoded tokens\n")
        print(table(rows), flush=True)
    mean = sum(closed) / len(closed) if closed else float("nan")
    print(f"\ngap closed by markov, slots a layer, mean over 10 and 20 %: {100 * mean:.1f} %")
    if args.json:
        text = json.dumps({"train": args.train, "traces": found}, indent=1)
        Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
