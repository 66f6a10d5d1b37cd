#!/usr/bin/env python3
"""Decode with every expert in memory: ours against stock mlx-lm, in one process, taking turns.

    python examples/bench/interleaved_stock.py --model MODELS/f32

Both models are loaded, both follow the same tokens, and they change over every 16 tokens, so that
whatever else the machine does falls on both. Each block of ours is compared with stock's block of
the same tokens: the ratio of times, stock ÷ ours, is above 1 where ours is faster. Logits must be
the same bytes. Needs memory for the model twice.
"""

from __future__ import annotations

import common

from mbolt_mlx.bench import measure, worker

BLOCK = 16


def main() -> int:
    parser = common.parser_of(__doc__, prefill=16, decode=512)
    args = parser.parse_args()
    args.resident = 1.0
    job = common.job_of(args, cold=False, direct=None)
    engines = {"mbolt": worker.MboltEngine(), "mlx-lm": worker.StockEngine()}
    caches = {}
    for name, engine in engines.items():
        engine.load(job if name == "mbolt" else common.stock(job))
        caches[name] = engine.make_cache()
        measure.prefill(engine, caches[name], job.prompt, job.prefill_step_size)
    blocks, same = [], True
    for first in range(0, len(job.decode), BLOCK):
        ids = job.decode[first : first + BLOCK]
        order = list(engines) if first // BLOCK % 2 == 0 else list(reversed(engines))
        times, logits = {}, {}
        for name in order:
            took, logits[name] = common.decode_block(engines[name], caches[name], ids)
            times[name] = took.time_s
        same = same and logits["mbolt"] == logits["mlx-lm"]
        blocks.append({"tokens": len(ids), "first": order[0], "seconds": times})
    total = {name: sum(b["seconds"][name] for b in blocks) for name in engines}
    ratio = common.report.spread(b["seconds"]["mlx-lm"] / b["seconds"]["mbolt"] for b in blocks)
    counts = engines["mbolt"].counts()
    found = {
        "ratio_of_totals": total["mlx-lm"] / total["mbolt"],
        "ratio": ratio,
        "same_logits": same,
        "decode_tps": {name: len(job.decode) / total[name] for name in engines},
        "blocks": blocks,
        "decode_misses": counts.misses,
    }
    common.save(args, f"interleaved-{args.model.name}", [], interleaved=found)
    for name, speed in found["decode_tps"].items():
        print(f"{name}: {speed:.2f} tok/s over {len(job.decode)} tokens")
    common.show("stock time / our time, a block", ratio, ">= 0.97")
    print(f"of the totals: {found['ratio_of_totals']:.3f}; logits {'same' if same else 'DIFFER'}")
    return 0 if same and found["ratio_of_totals"] >= 0.97 else 1


if __name__ == "__main__":
    common.main(main)
