#!/usr/bin/env python3
"""Prefill: how often each expert is read, and how long the first token takes.

    python examples/bench/prefill.py --model MODELS/f32 --prefill 300 --read-mbps 400
    python examples/bench/prefill.py --model MODELS/f32 --from examples/bench/results/compare-….json

Reads: a run of stock mlx-lm notes which experts each layer and chunk of the prompt needs. Ours must
read no more than those, each once. Time: first token ÷ max(stock's first token, needed bytes ÷ the
drive's rate under the same limits). --from takes the times of a run of compare.py --with-stock.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import common
from limit import source

from mbolt_mlx.bench import plan, worker
from mbolt_mlx.bench.measure import Job

WORKER = "--worker"


class NeedEngine(worker.StockEngine):
    """Stock mlx-lm that counts the different experts of each call of each layer as misses."""

    needed = 0

    def load(self, job: Job) -> None:
        import mlx.core as mx
        import numpy as np
        from mlx_lm.models.switch_layers import SwitchGLU

        super().load(job)
        stock = SwitchGLU.__call__

        def noted(module: Any, x: mx.array, indices: mx.array) -> mx.array:
            self.needed += len(np.unique(np.array(indices)))
            return stock(module, x, indices)

        SwitchGLU.__call__ = noted

    def counts(self) -> worker.Counts:
        return worker.Counts(misses=self.needed)


def main() -> int:
    if sys.argv[1:] == [WORKER]:
        return worker.serve({"mlx-lm-needed": NeedEngine})
    args, data = source(common.parser_of(__doc__, decode=1))
    counting = common.replace(common.stock(common.job_of(args)), engine="mlx-lm-needed")
    need = plan.run_job(counting, command=(sys.executable, str(Path(__file__)), WORKER))
    if "error" in need:
        raise common.MboltError(need["error"])
    needed = need["prefill_misses"]
    ours = common.good(data["runs"], "mbolt")
    expert_bytes = ours[0]["prefill_bytes"] / ours[0]["prefill_misses"]
    compute = common.median(common.good(data["runs"], "mlx-lm"), "ttft_s")
    reading = needed * expert_bytes / data["drive"]["bytes_per_s"]
    found = {
        "needed": needed,
        "misses": common.report.spread(r["prefill_misses"] for r in ours),
        "reads": common.report.spread(r["prefill_reads"] for r in ours),
        "compute_s": compute,
        "read_s": reading,
        "ttft_s": common.report.spread(r["ttft_s"] for r in ours),
        "ratio": common.report.spread(r["ttft_s"] / max(compute, reading) for r in ours),
    }
    print(f"{args.prefill} tokens need {needed} experts, over all layers and chunks")
    common.show("experts read", found["misses"], f"<= {needed}")
    common.show("reads", found["reads"], f"<= {needed}")
    print(f"stock's first token {compute:.2f} s, reading alone {reading:.2f} s")
    common.show("first token, s", found["ttft_s"])
    common.show("first token / max(compute, reading)", found["ratio"], "<= 1.25")
    data["prefill"] = found
    if args.source:
        common.report.write(args.source, data)
    fits = found["misses"]["max"] <= needed and found["ratio"]["median"] <= 1.25
    return 0 if fits else 1


if __name__ == "__main__":
    common.main(main)
