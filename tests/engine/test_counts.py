"""What the engine counts is what happens: readbacks, reads, bytes, hits."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

import mbolt_mlx
from mbolt_mlx.core import reads
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.layer import OffloadedLayer
from tests.engine.kit import Faults, ids, layers_of, load

E, K, LAYERS = 16, 4, 3
SHAPE = dict(layers=LAYERS, experts=E, top_k=K)


class Routing:
    """Records each layer's choices and the experts that are read, call by call."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[tuple[int, np.ndarray]] = []
        self.reads: list[tuple[int, list[int]]] = []
        forward, start = OffloadedLayer.forward, Fetcher.start

        def recorded_forward(layer, compute, x, indices):
            choice = np.array(indices)
            self.calls.append((layer.slots.store.layer, choice.reshape(-1, choice.shape[-1])))
            return forward(layer, compute, x, indices)

        def recorded_start(fetcher, slots, experts, into, batch):
            self.reads.append((slots.store.layer, list(experts)))
            return start(fetcher, slots, experts, into, batch)

        monkeypatch.setattr(OffloadedLayer, "forward", recorded_forward)
        monkeypatch.setattr(Fetcher, "start", recorded_start)

    def clear(self) -> None:
        self.calls, self.reads = [], []


def step(model, *shape, seed=0) -> None:
    mx.eval(model(ids(*shape, seed=seed)))


def test_one_readback_a_layer_and_forward(make):
    model = load(make(**SHAPE), resident=0.5)
    for n in range(4):
        step(model, 1, 1, seed=n)
    step(model, 1, 30)
    step(model, 3, 1)
    stats = mbolt_mlx.stats(model)
    assert stats.decode.readbacks == 5 * LAYERS and stats.decode.forwards == 5
    assert stats.decode.tokens == 7
    assert stats.prefill.readbacks == LAYERS and stats.prefill.tokens == 30


def test_a_layer_in_memory_whole_is_the_stock_layer(make, monkeypatch):
    model = load(make(**SHAPE), resident=1.0)
    faults = Faults(monkeypatch, lambda *_: AssertionError("nothing is to be read"))
    step(model, 1, 1)
    step(model, 2, 40)
    stats = mbolt_mlx.stats(model)
    assert stats.decode.readbacks == stats.prefill.readbacks == 0
    assert stats.decode.reads == stats.decode.misses == stats.decode.hits == 0
    assert stats.decode.hit_rate == 1.0 and faults.calls == 0


@pytest.mark.parametrize("resident", [K / E, 0.4, 0.75])
@pytest.mark.parametrize("shape", [(1, 1), (1, 60), (4, 1), (8, 20)])
def test_each_needed_expert_is_read_at_most_once_a_forward(make, monkeypatch, resident, shape):
    model = load(make(**SHAPE), resident=resident)
    routing = Routing(monkeypatch)
    for seed in range(4):
        routing.clear()
        before = {n: set(layer.resident.residents()) for n, layer in enumerate(layers_of(model))}
        step(model, *shape, seed=seed)
        needed = {n: set(np.unique(choice).tolist()) for n, choice in routing.calls}
        read: dict[int, list[int]] = {n: [] for n in needed}
        for n, experts in routing.reads:
            read[n] += experts
        for n, experts in read.items():
            assert len(experts) == len(set(experts))
            assert set(experts) == needed[n] - before[n]


@pytest.mark.parametrize("mode", ["none", "affine4"])
def test_with_a_side_file_a_miss_is_one_read(make, side_file_of, monkeypatch, mode):
    monkeypatch.setattr(reads, "MERGE_MAX", 0)
    path = make(**SHAPE, mode=mode)
    model = load(path, resident=0.25, side_file=side_file_of(path))
    drive = Faults(monkeypatch, lambda *_: None)
    step(model, 1, 50)
    for n in range(20):
        step(model, 1, 1, seed=n)
    stats = mbolt_mlx.stats(model)
    for phase in (stats.prefill, stats.decode):
        assert phase.reads == phase.misses > 0
    assert drive.calls == stats.prefill.reads + stats.decode.reads
    assert (
        stats.decode.bytes == stats.decode.misses * layers_of(model)[0].slots.store.runs[0].nbytes
    )
    assert stats.decode.reads_per_token == stats.decode.misses / 20


def test_neighbours_in_a_side_file_are_read_together(make, side_file_of):
    path = make(**SHAPE)
    model = load(path, resident=0.25, side_file=side_file_of(path))
    step(model, 4, 50)
    prefill = mbolt_mlx.stats(model).prefill
    assert prefill.misses == E * LAYERS and prefill.reads < prefill.misses
    assert prefill.bytes >= prefill.misses * layers_of(model)[0].slots.store.expert_bytes


@pytest.mark.parametrize(("mode", "pieces"), [("none", 3), ("affine4", 9)])
def test_from_the_shards_a_miss_is_a_read_a_piece_and_the_bytes_are_exact(
    make, monkeypatch, mode, pieces
):
    monkeypatch.setattr(reads, "MERGE_MAX", 0)
    model = load(make(**SHAPE, mode=mode), resident=0.25)
    for n in range(10):
        step(model, 1, 1, seed=n)
    decode = mbolt_mlx.stats(model).decode
    assert decode.reads == pieces * decode.misses > 0
    assert decode.bytes == decode.misses * layers_of(model)[0].slots.store.expert_bytes


class PlainLRU:
    """The least recently used by the clock; a token's experts count in the router's order."""

    def __init__(self, slots: int) -> None:
        self.slots, self.last, self.clock = slots, {}, 0
        self.hits = self.misses = self.evictions = 0

    def forward(self, tokens: np.ndarray) -> None:
        wanted = set(tokens.reshape(-1).tolist())
        present = wanted & self.last.keys()
        self.hits += len(present)
        self.misses += len(wanted - present)
        while len(self.last) + len(wanted - present) > self.slots:
            oldest = min(self.last.keys() - wanted, key=self.last.__getitem__)
            del self.last[oldest]
            self.evictions += 1
        for expert in tokens.reshape(-1).tolist():
            self.clock += 1
            self.last[expert] = self.clock


@pytest.mark.parametrize(("resident", "batch"), [(0.25, 1), (0.5, 1), (0.8, 1), (0.95, 2)])
def test_lru_hits_what_a_simulated_lru_hits(make, monkeypatch, resident, batch):
    model = load(make(**SHAPE), resident=resident, policy="lru")
    routing = Routing(monkeypatch)
    rng = np.random.default_rng(0)
    for _ in range(50):
        # A few tokens again and again, so that there is something to hit.
        mx.eval(model(mx.array(rng.integers(0, 12, (batch, 1)) * 7)))
    slots = mbolt_mlx.stats(model).slots
    plain = {n: PlainLRU(slots[n]) for n in slots}
    for n, tokens in routing.calls:
        plain[n].forward(tokens)
    decode = mbolt_mlx.stats(model).decode
    assert decode.hits == sum(p.hits for p in plain.values())
    assert decode.misses == sum(p.misses for p in plain.values())
    assert decode.evictions == sum(p.evictions for p in plain.values()) > 0
    for n, layer in enumerate(layers_of(model)):
        assert set(layer.resident.residents()) == set(plain[n].last)


def test_hits_and_misses_are_the_experts_that_were_wanted(make, monkeypatch):
    model = load(make(**SHAPE), resident=0.4)
    routing = Routing(monkeypatch)
    for n in range(10):
        step(model, 2, 1, seed=n)
    decode = mbolt_mlx.stats(model).decode
    assert decode.hits + decode.misses == sum(len(np.unique(c)) for _, c in routing.calls)
    assert decode.misses == sum(len(experts) for _, experts in routing.reads)
    assert decode.misses - decode.evictions == sum(
        len(layer.resident.residents()) for layer in layers_of(model)
    )


def test_stats_are_a_copy_and_can_be_reset(make):
    model = load(make(**SHAPE), resident=0.25)
    step(model, 1, 1)
    before = mbolt_mlx.stats(model)
    taken = before.decode.tokens, before.decode.misses, dict(before.slots)
    step(model, 1, 1, seed=1)
    assert (before.decode.tokens, before.decode.misses, before.slots) == taken
    residents = [layer.resident.residents() for layer in layers_of(model)]
    mbolt_mlx.reset_stats(model)
    after = mbolt_mlx.stats(model)
    assert after.decode.tokens == after.decode.misses == after.prefill.tokens == 0
    assert [layer.resident.residents() for layer in layers_of(model)] == residents
    step(model, 1, 1, seed=1)
    again = mbolt_mlx.stats(model)
    assert again.decode.tokens == 1 and again.decode.misses == 0
    assert again.decode.hits == K * LAYERS


def test_set_up_is_reported(make):
    path = make(**SHAPE)
    model = load(path, resident=0.5, read_threads=3, policy="lru", direct=False)
    stats = mbolt_mlx.stats(model)
    expert = 3 * 64 * 32 * 4
    assert stats.slots == {0: 8, 1: 8, 2: 8} and stats.layers == stats.offloaded_layers == 3
    assert stats.slot_bytes == 3 * 8 * expert and stats.expert_bytes == 3 * E * expert
    assert (stats.policy, stats.read_threads, stats.direct) == ("lru", 3, False)
    assert stats.side_file is None and stats.resident == 0.5
    total = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert 0 <= total - stats.dense_bytes - stats.expert_bytes < 20_000
    assert {"decode_tps", "decode_hit_rate", "slot_bytes"} <= stats.as_dict().keys()


def test_a_model_of_another_kind_has_no_stats(make, stock):
    for call in (mbolt_mlx.stats, mbolt_mlx.reset_stats):
        with pytest.raises(UsageError, match="not loaded by mbolt_mlx"):
            call(stock(make(**SHAPE))[0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_model_that_is_gone_leaves_no_file_open_and_no_thread(make):
    path = make(**SHAPE, shards=3)
    load(path, resident=0.25)
    gc.collect()
    files_before = len(os.listdir("/proc/self/fd"))
    threads_before = set(threading.enumerate())
    for seed in range(3):
        model = load(path, resident=0.25)
        step(model, 1, 5, seed=seed)
        del model
    gc.collect()
    end = time.monotonic() + 5
    while set(threading.enumerate()) - threads_before and time.monotonic() < end:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads_before
    assert len(os.listdir("/proc/self/fd")) <= files_before
