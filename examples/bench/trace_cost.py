#!/usr/bin/env python3
"""What `--trace` costs: decode with and without recording, in one process, taking turns.

    python examples/bench/trace_cost.py --models demo MODELS/q8

The demo model computes so little that recording weighs most there. At each residency a model is
loaded once and decodes on and on; recording is switched on and off every --decode tokens, every
other pair the other way round, so that whatever slows the machine down for a while falls on both.
Compressing and writing fall on recorded blocks as they come. Reads go through the page cache, so
that no drive is in it. The ratio is that of the totals, recorded ÷ not, with the range that holds
95 % of what drawing pairs anew gives; for time, and for the processor time of all threads. "Alone"
is the recorder's own work, opening and closing included, timed by writing the same trace again
without a model.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import common
import numpy as np

from mbolt_mlx import names
from mbolt_mlx.bench import measure, tokens, worker
from mbolt_mlx.engine.record import recorded
from mbolt_mlx.engine.runtime import engine_of
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import DECODE, read_trace

TARGET = 1.02
KINDS = ("plain", "recorded")
# Blocks before the first pair.
WARM_UP = 4


def ratio(pairs: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Recorded ÷ plain of all ``pairs`` together, and its 95 % range by drawing pairs anew."""
    values = np.array([[p["recorded"][key], p["plain"][key]] for p in pairs])
    drawn = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    sums = values[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    recorded, plain = values.sum(axis=0)
    return {"ratio": recorded / plain, "low": float(low), "high": float(high)}


def cost(args: Namespace, model: Path, resident: float) -> dict[str, Any]:
    """All pairs of one model at one residency."""
    engine = worker.MboltEngine()
    engine.load(
        measure.Job("mbolt", str(model), [], [], resident=resident, side_file=None, direct=False)
    )
    fetcher = engine_of(engine.model)._fetcher
    length = args.decode
    ids = tokens.forced_tokens(args.prefill + 4096, tokens.vocabulary(model))
    cache = engine.make_cache()
    measure.prefill(engine, cache, ids[: args.prefill], args.prefill)
    rest = itertools.cycle(ids[args.prefill :])

    def block() -> dict[str, float]:
        took, _ = common.decode_block(engine, cache, list(itertools.islice(rest, length)))
        return {"time_s": took.time_s, "cpu_s": took.cpu_s}

    for _ in range(WARM_UP):
        block()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace"
        with recorded(engine.model, trace, name="trace"):
            note = fetcher.note
            began = time.perf_counter()
            while len(pairs) < args.pairs or time.perf_counter() - began < args.seconds:
                pair = {}
                for kind in KINDS if len(pairs) % 2 == 0 else KINDS[::-1]:
                    fetcher.note = note if kind == "recorded" else None
                    pair[kind] = block()
                pairs.append(pair)
        nbytes = trace.stat().st_size
        noted = read_trace(trace)
        repeats = 3
        before = common.Counters.read()
        for _ in range(repeats):
            write_trace(trace, noted)
        alone = common.Counters.read().since(before).time_s / repeats / len(pairs) / length
    seconds = sum(p["plain"]["time_s"] for p in pairs)
    return {
        "model": model.name,
        "resident": resident,
        "tokens_a_block": length,
        "decode_tps": len(pairs) * length / seconds,
        "trace_bytes_per_token": nbytes / len(pairs) / length,
        "recorded_tokens": noted.tokens(DECODE),
        "alone_s_per_token": alone,
        # Microseconds: time plain and recorded, processor time plain and recorded.
        "pairs": [
            [round(1e6 * p[kind][key]) for key in ("time_s", "cpu_s") for kind in KINDS]
            for p in pairs
        ],
        "time": ratio(pairs, "time_s"),
        "cpu": ratio(pairs, "cpu_s"),
    }


def main() -> int:
    parser = common.parser_of(
        __doc__, pairs=50, prefill=4, decode=2, residents="0.5,1.0", models=True
    )
    parser.add_argument(
        "--seconds", type=float, default=40, help="of each, at least (default: %(default)s)"
    )
    args = parser.parse_args()
    models = [names.resolve(str(model)) for model in args.models]
    found = []
    for model in models:
        for resident in args.resident:
            one = cost(args, model, resident)
            found.append(one)
            speed = one["decode_tps"]
            print(
                f"{one['model']} at {resident:g}: {speed:.1f} tok/s, "
                f"{one['trace_bytes_per_token']:.0f} bytes of trace a token; alone: "
                f"{one['alone_s_per_token'] * 1e6:.0f} us a token, "
                f"{one['alone_s_per_token'] * speed:.2%} of the time"
            )
            for name, key in (("time", "time"), ("processor time", "cpu")):
                print(
                    f"  recorded ÷ not, {name}: {one[key]['ratio']:.3f} "
                    f"[{one[key]['low']:.3f}-{one[key]['high']:.3f}]  target <= {TARGET}",
                    flush=True,
                )
    args.model = models[0]
    common.save(args, "trace-cost", [], trace_cost=found)
    return 0 if max(one[key]["ratio"] for one in found for key in ("time", "cpu")) <= TARGET else 1


if __name__ == "__main__":
    common.main(main)
