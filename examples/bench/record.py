#!/usr/bin/env python3
"""Record a trace of a model that follows forced tokens: what `generate --trace` records.

    python examples/bench/record.py --model MODELS/f32 --decode 64 --out f32.trace

The tokens are of another seed than those that the benchmarks decode, so that what a trace predicts
is held out. Every expert is in memory meanwhile; that does not change what the router chooses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import common

from mbolt_mlx.bench import measure, tokens, worker
from mbolt_mlx.engine.record import recorded

SEED = 4321


def held_out(args) -> list[int]:
    """The forced tokens of the trace, ``args.prefill`` of the prompt and ``args.decode`` more."""
    count = args.prefill + args.decode
    return tokens.forced_tokens(count, tokens.vocabulary(args.model), seed=SEED)


def main() -> int:
    parser = common.parser_of(__doc__, decode=64)
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out is needed")
    ids = held_out(args)
    job = measure.Job("mbolt", str(args.model.resolve()), ids[: args.prefill], [], resident=1.0)
    job.side_file = None
    engine = worker.MboltEngine()
    engine.load(job)
    cache = engine.make_cache()
    with recorded(engine.model, args.out, name=args.model.name):
        measure.prefill(engine, cache, job.prompt, job.prefill_step_size)
        common.decode_block(engine, cache, ids[args.prefill :])
    print(f"written to {args.out}", file=sys.stderr)
    return 0


def record(model: Path, out: Path, prefill: int, decode: int) -> Path:
    """The same in a process of its own, so that this one stays small. Returns ``out``."""
    options = ("--model", model, "--out", out, "--prefill", prefill, "--decode", decode)
    common.script(__file__, *options)
    return out


if __name__ == "__main__":
    common.main(main)
