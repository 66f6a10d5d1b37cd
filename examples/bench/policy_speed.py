#!/usr/bin/env python3
"""Decode under each residency policy: does a better hit rate pay for what the policy costs?

    python examples/bench/policy_speed.py --model MODELS/f32

Each run is a fresh process, cold, under the limits, on the side-file; residencies and policies take
turns. A ratio is a policy's tok/s ÷ that of lru in the same round. "Reads" is what the fewer (or
more) bytes would gain at the limit, "choosing" what the policy's own code costs more than lru's:
timed alone, on a replay of the same model's routing. Where a layer has no more slots than a token
needs, nothing can be chosen, and the ratio shows the cost alone. Random weights route with some
locality (make_model.py's --emb-scale); --model takes any model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import record

from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, Trace, read_trace

POLICIES = ("lru", "decayed", "markov")


def choosing(trace: Trace, resident: float, repeats: int = 3) -> dict[str, float]:
    """Policy → seconds a token of all that it decides, and of nothing else."""
    took: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    alone = trace.part(p for p in trace.passes if p.phase == DECODE)
    for _ in range(repeats):
        for policy in POLICIES:
            start = time.process_time()
            replay(alone, Setup(policy, resident=resident))
            took[policy].append(time.process_time() - start)
    return {policy: statistics.median(mine) / alone.tokens() for policy, mine in took.items()}


def compared(
    runs: list[dict[str, Any]], resident: float, costs: dict[str, float], rate: float
) -> list[dict[str, Any]]:
    """A row a policy: speed and hits, the ratio to lru, and what it is made of (ms a token)."""
    lru = {r["round"]: r for r in runs if r["policy"] == POLICIES[0]}
    rows = []
    for policy in POLICIES:
        mine = [r for r in runs if r["policy"] == policy and r["round"] in lru]
        fewer = [
            lru[r["round"]]["decode_bytes_per_token"] - r["decode_bytes_per_token"] for r in mine
        ]
        saved = [1e3 / lru[r["round"]]["decode_tps"] - 1e3 / r["decode_tps"] for r in mine]
        rows.append(
            {
                "resident": resident,
                "policy": policy,
                "decode_tps": common.report.spread(r["decode_tps"] for r in mine),
                "hit_rate": common.median(mine, "decode_hit_rate"),
                "misses_per_token": common.median(mine, "decode_misses_per_token"),
                "ratio": common.report.spread(
                    r["decode_tps"] / lru[r["round"]]["decode_tps"] for r in mine
                ),
                "saved_ms": common.report.spread(saved),
                "reads_ms": 1e3 * statistics.median(fewer) / rate,
                "choosing_ms": 1e3 * (costs[policy] - costs[POLICIES[0]]),
                "cold": all(r["cold"] for r in mine),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"\n{'resident':>8} {'policy':<8} {'tok/s':>6} {'hits':>6} {'misses':>7} "
        f"{'÷ lru':>18} {'saved ms':>9} {'reads':>7} {'choosing':>9}"
    )
    for row in rows:
        ratio = row["ratio"]
        shown = f"{ratio['median']:.3f} [{ratio['min']:.3f}-{ratio['max']:.3f}]"
        print(
            f"{row['resident']:>8g} {row['policy']:<8} {row['decode_tps']['median']:>6.2f} "
            f"{row['hit_rate']:>6.1%} {row['misses_per_token']:>7.1f} {shown:>18} "
            f"{row['saved_ms']['median']:>+9.1f} {row['reads_ms']:>+7.1f} "
            f"{row['choosing_ms']:>+9.2f}"
        )
    print(
        "\nms a token against lru; saved is measured: reads less choosing where nothing hides them"
    )


def main() -> int:
    parser = common.parser_of(__doc__, pairs=2, prefill=12, decode=24, residents="0.1,0.2,0.3")
    parser.add_argument("--trace-tokens", type=int, default=64, help="default: %(default)s")
    parser.set_defaults(read_mbps=400)
    args = parser.parse_args()
    limits = common.limits_of(args)
    base = common.job_of(args)
    jobs = [
        common.replace(base, resident=resident, policy=policy)
        for resident in args.resident
        for policy in POLICIES
    ]
    runs = common.rounds(jobs, args.pairs, common.runner(limits), f"policies, {limits.name}")
    options = ("--threads", 4, "--repeat", 2, "--bytes", 512 << 20)
    rate = common.probe(limits, "rate", base.side_file, *options)["bytes_per_s"]
    with tempfile.TemporaryDirectory() as place:
        path = record.record(args.model, Path(place) / "trace", args.prefill, args.trace_tokens)
        trace = read_trace(path)
    rows = []
    for n, resident in enumerate(args.resident):
        first = n * len(POLICIES)
        mine = [
            r for r in runs if first <= r["setting"] < first + len(POLICIES) and "error" not in r
        ]
        if mine:
            rows += compared(mine, resident, choosing(trace, resident), rate)
    common.save(
        args,
        f"policy-speed-{args.model.name}-{limits.name}",
        runs,
        limits=common.asdict(limits),
        policy_speed={"drive_bytes_per_s": rate, "rows": rows},
    )
    show(rows)
    failed = any("error" in run for run in runs)
    return 1 if failed or not all(row["cold"] for row in rows) else 0


if __name__ == "__main__":
    common.main(main)
