#!/usr/bin/env python3
"""What `--trace` costs: decode with and without recording, in one process, taking turns.

    python examples/bench/trace_cost.py --models demo MODELS/q8

The demo model computes so little that recording weighs most there. At each residency a model is
loaded once; then blocks of about --block-seconds decode the same tokens, recorded and not, every
other pair the other way round. Opening, writing and closing the trace are in the block that is
recorded. Reads go through the page cache, so that no drive is in it. A ratio is that of a pair,
recorded ÷ not, median [least-most]; for time, and for the processor time of all threads. "Alone" is
the recorder's own work, timed by writing the same trace again without a model; where every expert
is in memory, recording also waits for the router, which is in the ratio only.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common

from mbolt_mlx import names
from mbolt_mlx.bench import measure, tokens, worker
from mbolt_mlx.engine.record import recorded
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import DECODE, read_trace

TARGET = 1.02


def block(
    engine: worker.MboltEngine, prompt: list[int], ids: list[int], trace: Path | None
) -> dict[str, float]:
    """Decode ``ids`` after ``prompt``, recorded to ``trace`` if given; seconds and CPU seconds."""
    cache = engine.make_cache()
    measure.prefill(engine, cache, prompt, len(prompt))
    before = common.Counters.read()
    with recorded(engine.model, trace, name="trace") if trace else nullcontext():
        common.decode_block(engine, cache, ids)
    took = common.Counters.read().since(before)
    return {"time_s": took.time_s, "cpu_s": took.cpu_s}


def cost(args: Namespace, model: Path, resident: float) -> dict[str, Any]:
    """All pairs of one model at one residency."""
    engine = worker.MboltEngine()
    engine.load(
        measure.Job("mbolt", str(model), [], [], resident=resident, side_file=None, direct=False)
    )
    vocabulary = tokens.vocabulary(model)
    ids = tokens.forced_tokens(args.prefill + args.decode, vocabulary)
    prompt, warm_up = ids[: args.prefill], ids[args.prefill :]
    block(engine, prompt, warm_up, None)
    slow = block(engine, prompt, warm_up, None)["time_s"] / args.decode
    length = max(args.decode, round(args.block_seconds / slow))
    ids = tokens.forced_tokens(args.prefill + args.pairs * length, vocabulary)
    pairs = []
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace"
        for n in range(args.pairs):
            first = args.prefill + n * length
            pair = {}
            for kind in ("plain", "recorded") if n % 2 == 0 else ("recorded", "plain"):
                where = trace if kind == "recorded" else None
                pair[kind] = block(engine, prompt, ids[first : first + length], where)
            pairs.append(pair)
        nbytes = trace.stat().st_size
        noted = read_trace(trace)
        before = common.Counters.read()
        for _ in range(args.pairs):
            write_trace(trace, noted)
        alone = common.Counters.read().since(before).time_s / args.pairs / length
    found: dict[str, Any] = {
        "model": model.name,
        "resident": resident,
        "tokens_a_block": length,
        "decode_tps": common.report.spread(length / p["plain"]["time_s"] for p in pairs),
        "trace_bytes_per_token": nbytes / length,
        "recorded_tokens": noted.tokens(DECODE),
        "alone_s_per_token": alone,
        "pairs": pairs,
    }
    for key in ("time_s", "cpu_s"):
        found[f"ratio_{key}"] = common.report.spread(
            p["recorded"][key] / p["plain"][key] for p in pairs
        )
        total = {kind: sum(p[kind][key] for p in pairs) for kind in ("plain", "recorded")}
        found[f"ratio_of_totals_{key}"] = total["recorded"] / total["plain"]
    return found


def main() -> int:
    parser = common.parser_of(
        __doc__, pairs=40, prefill=4, decode=8, residents="0.5,1.0", models=True
    )
    parser.add_argument("--block-seconds", type=float, default=0.5, help="default: %(default)s")
    args = parser.parse_args()
    models = [names.resolve(str(model)) for model in args.models]
    found = []
    for model in models:
        for resident in args.resident:
            one = cost(args, model, resident)
            found.append(one)
            speed = one["decode_tps"]["median"]
            print(
                f"{one['model']} at {resident:g}: {speed:.1f} tok/s, "
                f"{one['trace_bytes_per_token']:.0f} bytes of trace a token"
            )
            common.show("  recorded ÷ not, time", one["ratio_time_s"], f"<= {TARGET}")
            common.show("  recorded ÷ not, processor time", one["ratio_cpu_s"], f"<= {TARGET}")
            totals = one["ratio_of_totals_time_s"], one["ratio_of_totals_cpu_s"]
            print(
                f"  of the totals: {totals[0]:.3f}, {totals[1]:.3f}; alone: "
                f"{one['alone_s_per_token'] * 1e6:.0f} us a token, "
                f"{one['alone_s_per_token'] * speed:.2%} of the time",
                flush=True,
            )
    args.model = models[0]
    common.save(args, "trace-cost", [], trace_cost=found)
    worst = max(one[f"ratio_{key}"]["median"] for one in found for key in ("time_s", "cpu_s"))
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    common.main(main)
