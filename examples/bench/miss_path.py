#!/usr/bin/env python3
"""Processor time of a miss: all that the engine does to bring an expert in, and the read alone.

    python examples/bench/miss_path.py MODEL SIDE_FILE --slots 16

What the router chooses is recorded while random tokens are decoded. Then the engine's own code is
led through the recorded choices, layer by layer and token by token, without computing: the policy's
score, the plan, evictions, requests, merging, reading into the slots, waiting ("us"). The read
itself, which is no work of the engine, is told in two ways: once more the same, with each system
call that reads, starts reads or waits for them timed by its own thread's processor clock
("us_timed", of which "us_reading" in the calls); and as many direct reads of an expert's bytes into
one of as many buffers, by bare calls one after the other ("read_alone_us"). In turn, processor time
of the whole process; the result is one line of JSON, which says whether the kernel's own queue was
used ("asynchronous").
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import mbolt_mlx
from mbolt_mlx.core import aio, files, reads
from mbolt_mlx.core.schedule import plan_call
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.engine.runtime import engine_of

PAGE = 4096
PROMPT = 32

Choices = list[tuple[int, np.ndarray]]


def record(model: Any, decode: int) -> Choices:
    """(layer, choices ``[1, top_k]``) of ``decode`` tokens after a prompt."""
    ids = common.tokens.forced_tokens(PROMPT + decode, model.args.vocab_size)
    cache, fetcher = make_prompt_cache(model), engine_of(model)._fetcher
    mx.eval(model(mx.array([ids[:PROMPT]]), cache=cache))
    chosen: Choices = []
    fetcher.note = lambda layer, tokens: chosen.append((layer, tokens.copy()))
    try:
        for token in ids[PROMPT:]:
            mx.eval(model(mx.array([[token]]), cache=cache))
    finally:
        fetcher.note = None
    return chosen


def bring_in(layers: dict[int, OffloadedLayer], chosen: Choices) -> tuple[float, int]:
    """Processor seconds, and misses, of a forward's work but for computing."""
    missed = 0
    start = time.process_time()
    for number, tokens in chosen:
        layer = layers[number]
        plan = plan_call(layer.resident, tokens, layer.slots.store.file_order)
        if plan.misses:
            batch = reads.Batch()
            for step in plan.steps:
                layer.read(step, batch)
            layer.ready(batch, len(plan.misses))
        layer.resident.policy.use(tokens)
        missed += len(plan.misses)
    return time.process_time() - start, missed


class ReadClock:
    """Processor seconds, by each thread's own clock, of the calls that read.

    Made before the model is loaded, because a queue looks its calls up when it is made.
    """

    def __init__(self) -> None:
        self._took: list[float] | None = None
        files.pread_into = self._timed(files.pread_into)
        setup, destroy, submit, events = aio._CALLS
        aio._CALLS = [setup, destroy, self._timed(submit), self._timed(events)]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def timed(*args: Any, **options: Any) -> Any:
            took = self._took
            if took is None:
                return call(*args, **options)
            start = clock()
            try:
                return call(*args, **options)
            finally:
                took.append(clock() - start)

        return timed

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """The list to which each call adds its seconds."""
        took: list[float] = []
        self._took = took
        try:
            yield took
        finally:
            self._took = None


class BareReads:
    """Direct reads of ``nbytes`` at random places of ``path``, into ``count`` buffers in turn."""

    def __init__(self, path: Path, nbytes: int, count: int) -> None:
        self._fd = files.open_read(path, direct=True)
        nbytes = -(-nbytes // PAGE) * PAGE
        self._places = (files.size_and_mtime(self._fd)[0] - nbytes) // PAGE
        self._buffers = reads.slot_buffers(count, nbytes)
        self._rng = np.random.default_rng(0)
        self.seconds(count)

    def seconds(self, count: int) -> float:
        """Processor seconds of ``count`` reads."""
        offsets = (self._rng.integers(0, self._places + 1, count) * PAGE).tolist()
        start = time.process_time()
        for n, offset in enumerate(offsets):
            files.pread_into(self._fd, [self._buffers[n % len(self._buffers)]], offset)
        return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("side_file", type=Path)
    parser.add_argument("--slots", type=int, default=16, help="a layer (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    args = parser.parse_args()
    clock = ReadClock()
    experts = json.loads((args.model / "config.json").read_text())["num_experts"]
    model, _ = mbolt_mlx.load(
        args.model, resident=args.slots / experts, side_file=args.side_file, direct=True
    )
    chosen = record(model, args.decode)
    layers = {layer.slots.store.layer: layer for _, layer, _ in engine_of(model)._layers}
    some = next(iter(layers.values()))
    bare = BareReads(args.side_file, some.slots.store.expert_bytes, some.slots.count * len(layers))
    bring_in(layers, chosen)
    runs = []
    for _ in range(args.rounds):
        took, missed = bring_in(layers, chosen)
        with clock.running() as reading:
            timed, again = bring_in(layers, chosen)
        runs.append(
            {
                "misses": missed,
                "us": 1e6 * took / missed,
                "us_timed": 1e6 * timed / again,
                "us_reading": 1e6 * sum(reading) / again,
                "read_alone_us": 1e6 * bare.seconds(missed) / missed,
            }
        )
    queued = some.fetcher.asynchronous
    document = {"calls": len(chosen), "layers": len(layers), "asynchronous": queued, "runs": runs}
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    common.main(main)
