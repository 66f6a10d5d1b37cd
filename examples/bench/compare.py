#!/usr/bin/env python3
"""Ours against mlx-vlm's expert offload, in alternating pairs under the same limits.

    python examples/bench/compare.py --model MODELS/f32 --read-mbps 400
    python examples/bench/compare.py --model MODELS/f32 --prefill 300 --decode 1 --read-mbps 400

Each run is a fresh process with the page cache of the machine dropped, --memory in all (page cache
included), the same readahead, the same token ids and as many experts in memory. --with-stock also
runs mlx-lm with everything in memory, before and after: that is the compute time which limit.py and
prefill.py take from the JSON. The drive's rate under the same limits is measured before and
after. With --memory-limit ours takes as many experts as fit in it, where --memory leaves the other
engine a page cache instead. Ratios are ours ÷ theirs of each pair: median [least-most].
"""

from __future__ import annotations

from typing import Any

import common


def compare(args: Any, engines: list[str], stock_rounds: int) -> dict[str, Any]:
    """Run ``engines`` and return the document, with the drive's rate under the same limits."""
    limits = common.limits_of(args)
    equal = common.job_of(args)
    ours = equal
    if args.memory_limit:
        ours = common.replace(equal, resident=None, memory_limit=args.memory_limit)
    made = {
        "mbolt": lambda: ours,
        "mlx-vlm": lambda: common.rival(equal, args.rival_python),
        "mlx-lm": lambda: common.stock(equal),
    }
    jobs = [made[name]() for name in engines]
    run = common.runner(limits, args.rival_python)

    def rate() -> float:
        options = ("--threads", 4, "--repeat", 3, "--bytes", 512 << 20)
        return common.probe(limits, "rate", ours.side_file, *options)["bytes_per_s"]

    before = rate()
    # Half of stock's runs before the pairs and half after, so that a drift falls on both alike.
    first = stock_rounds - stock_rounds // 2
    alone = common.rounds([made["mlx-lm"]()], first, run, "stock") if first else []
    runs = common.rounds(jobs, args.pairs, run, f"{limits.name}, prompt {args.prefill}")
    if stock_rounds > first:
        alone += common.rounds([made["mlx-lm"]()], stock_rounds - first, run, "stock")
    for n, entry in enumerate(alone):
        entry.update(round=n, setting=len(jobs), order=n if n < first else len(runs) + n)
    for entry in runs:
        entry["order"] += first
    runs = sorted(runs + alone, key=lambda entry: entry["order"])
    after = rate()
    ratios = {
        key: common.pair_ratio(runs, key, "mbolt", engines[-1])
        for key in ("decode_tps", "prefill_tps", "ttft_s", "peak_rss_bytes", "drive_read_bytes")
    }
    return common.save(
        args,
        f"compare-{engines[-1]}-{args.model.name}-{limits.name}-{args.prefill}"
        + ("-all-memory" if args.memory_limit else ""),
        runs,
        limits=common.asdict(limits),
        drive={"bytes_per_s": (before + after) / 2, "before": before, "after": after},
        ratios=ratios,
    )


def main() -> int:
    parser = common.parser_of(__doc__)
    parser.add_argument(
        "--against", choices=["mlx-vlm", "mlx-lm"], default="mlx-vlm", help="(%(default)s)"
    )
    parser.add_argument(
        "--with-stock", type=int, default=0, metavar="N", help="also N runs of mlx-lm in memory"
    )
    parser.add_argument("--memory-limit", help="ours: this much for the process, not --resident")
    args = parser.parse_args()
    data = compare(args, ["mbolt", args.against], args.with_stock)
    print()
    for key, value in data["ratios"].items():
        common.show(f"ours / {args.against}, {key}", value)
    warm = [r for r in common.good(data["runs"], "mbolt") if not r["cold"]]
    if warm:
        print(f"{len(warm)} of our runs were not cold: {warm[0]['cold_reason']}")
    return 1 if warm or any("error" in r for r in data["runs"]) else 0


if __name__ == "__main__":
    common.main(main)
