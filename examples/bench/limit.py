#!/usr/bin/env python3
"""How close decoding is to what the machine allows.

    python examples/bench/limit.py --model MODELS/f32 --read-mbps 400
    python examples/bench/limit.py --model MODELS/f32 --from examples/bench/results/compare-….json

    (stock compute time a token + missed bytes a token ÷ the drive's rate) ÷ measured time a token

1 is computing and reading one after the other without loss; only overlap of both gets past 1. The
drive's rate is that of large direct reads under the same limits. --from takes the figures of a run
of compare.py with --with-stock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
from compare import compare


def ratios(data: dict[str, Any]) -> dict[str, Any]:
    """The spread of the ratio over our runs, and what it is made of (seconds a token)."""
    compute = 1 / common.median(common.good(data["runs"], "mlx-lm"), "decode_tps")
    rate = data["drive"]["bytes_per_s"]
    ours = common.good(data["runs"], "mbolt")
    reading = [r["decode_bytes_per_token"] / rate for r in ours]
    return {
        "ratio": common.report.spread(
            (compute + s) * r["decode_tps"] for s, r in zip(reading, ours, strict=True)
        ),
        "compute_s": compute,
        "read_s": common.report.spread(reading),
        "measured_s": common.report.spread(1 / r["decode_tps"] for r in ours),
        "drive_bytes_per_s": rate,
    }


def source(parser: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments, and the document: that of --from, or a fresh run of ours and stock."""
    parser.add_argument("--from", dest="source", type=Path, help="JSON of compare.py")
    args = parser.parse_args()
    if args.source is None:
        return args, compare(args, ["mbolt", "mlx-lm"], 0)
    data = json.loads(args.source.read_text())
    first = common.good(data["runs"], "mbolt")[0]
    args.prefill, args.decode = first["prefill_tokens"], first["decode_tokens"]
    return args, data


def main() -> int:
    args, data = source(common.parser_of(__doc__))
    found = ratios(data)
    where = args.source or "this run"
    print(f"{where}: drive {found['drive_bytes_per_s'] / 1e6:.0f} MB/s")
    print(f"stock computes {found['compute_s'] * 1e3:.0f} ms a token")
    common.show("reading alone, s a token", found["read_s"])
    common.show("measured, s a token", found["measured_s"])
    common.show("limit / measured", found["ratio"], ">= 1.0")
    if args.source:
        data["limit"] = found
        common.report.write(args.source, data)
    return 0 if found["ratio"]["median"] >= 1.0 else 1


if __name__ == "__main__":
    common.main(main)
