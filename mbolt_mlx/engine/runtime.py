"""A loaded model at work: whose turn it is, what it counts, and that it keeps within memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mbolt_mlx.core import memory
from mbolt_mlx.core.budget import Geometry, LayerShape, slot_bytes
from mbolt_mlx.core.errors import MemoryLimitError, UnsupportedError, UsageError
from mbolt_mlx.core.residency import slots_for
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.engine.stats import PhaseStats, Stats
from mbolt_mlx.engine.switch import rebind
from mbolt_mlx.storage.store import Store


class Ceiling:
    """Keeps the process under a number of bytes by giving up slots.

    Args:
        limit: bytes for the whole process.
        geometry: what a forward needs beside weights and slots.
    """

    def __init__(self, limit: int, geometry: Geometry) -> None:
        self.limit = limit
        self._geometry = geometry

    def excess(self, tokens: int, context: int) -> int:
        """Bytes by which a forward would pass the limit; 0 or less when it fits."""
        need = self._geometry.transient(tokens, context) + tokens * self._geometry.kv_bytes
        over = memory.process_rss() + need - self.limit
        if over > 0:
            mx.clear_cache()
            memory.trim()
            over = memory.process_rss() + need - self.limit
        return over


class Engine:
    """Everything that is kept beside a model whose experts are offloaded.

    Args:
        layers: the offloaded layers with their containers and shapes.
        fetcher: their reads.
        stats: how the model was set up.
        ceiling: the memory limit, or None.
    """

    def __init__(
        self,
        layers: Sequence[tuple[nn.Module, OffloadedLayer, LayerShape]],
        fetcher: Fetcher,
        stats: Stats,
        ceiling: Ceiling | None,
    ) -> None:
        self._layers = list(layers)
        self._fetcher = fetcher
        self._stats = stats
        self._ceiling = ceiling
        self._lock = threading.RLock()
        self._torn: nn.Module | None = None
        #: called when a forward begins another conversation, while choices are recorded
        self.on_new_session: Callable[[], None] | None = None
        self._last: PhaseStats | None = None
        self._last_end = 0.0

    def forward(self, call: Any, inputs: mx.array, cache: Any) -> Any:
        """Run one forward of the whole model; one at a time, whatever thread it comes from."""
        with self._lock:
            self._mend()
            shape = inputs.shape
            length = shape[1] if len(shape) > 1 else 1
            tokens = shape[0] * length if len(shape) > 1 else shape[0]
            context = _context(cache)
            if self._ceiling is not None:
                self._keep_within(tokens, context + length)
            phase = self._stats.prefill if length > 1 else self._stats.decode
            start = perf_counter()
            self._count_gap(start, phase, fresh=context == 0)
            self._fetcher.counts = phase
            if context == 0 and length > 1:  # some caches do not tell their context
                self._renew()
            try:
                return call()
            finally:
                phase.tokens += tokens
                phase.forwards += 1
                self._last, self._last_end = phase, perf_counter()
                phase.seconds += self._last_end - start

    def _renew(self) -> None:
        """Another conversation begins: policies forget how often experts were used."""
        for _, layer, _ in self._layers:
            layer.resident.policy.renew()
        if self.on_new_session is not None:
            self.on_new_session()

    def _count_gap(self, now: float, phase: PhaseStats, *, fresh: bool) -> None:
        """Time between forwards belongs to the one before, unless a new prompt begins."""
        decode = self._stats.decode
        waiting = phase is not decode and (fresh or self._last is decode)
        if self._last is not None and not waiting:
            self._last.seconds += now - self._last_end

    def _keep_within(self, tokens: int, context: int) -> None:
        """Give up slots until a forward fits under the limit.

        Raises:
            MemoryLimitError: if it does not with the fewest slots.
        """
        while (over := self._ceiling.excess(tokens, context)) > 0:
            if not self._give_up(over):
                raise MemoryLimitError(
                    f"a forward of {tokens} tokens over {context} positions does not fit",
                    expected=f"at most {format_size(self._ceiling.limit)}",
                    found=format_size(self._ceiling.limit + over),
                    hint="raise --memory-limit, or lower --prefill-step-size or the context",
                )

    def _give_up(self, nbytes: int) -> bool:
        """Shrink every layer by its share of ``nbytes``; False where none can shrink."""
        shrunk = False
        for container, layer, shape in sorted(self._layers, key=lambda item: -item[1].slots.nbytes):
            least = slots_for(shape.experts, shape.top_k, 0.0)
            share = -(-nbytes // (len(self._layers) * shape.expert_bytes))
            slots = max(least, layer.slots.count - share)
            if slots < layer.slots.count:
                self._torn = container
                layer.shrink(slots)
                self._mend()
                shrunk = True
        self._stats.shrinks += shrunk
        self._note_slots()
        return shrunk

    def _mend(self) -> None:
        """Point a container at its slots again after they shrank, now or before an interrupt."""
        if self._torn is not None:
            rebind(self._torn)
            self._torn = None

    def _note_slots(self) -> None:
        shapes = [shape for _, _, shape in self._layers]
        counts = [layer.slots.count for _, layer, _ in self._layers]
        self._stats.slot_bytes = slot_bytes(shapes, counts)
        self._stats.slots = {
            layer.slots.store.layer: layer.slots.count for _, layer, _ in self._layers
        }

    @property
    def store(self) -> Store:
        """The files that the experts are read from."""
        return self._fetcher.store

    def stats(self) -> Stats:
        """A copy of the counts so far."""
        with self._lock:
            return replace(
                self._stats,
                prefill=replace(self._stats.prefill),
                decode=replace(self._stats.decode),
                slots=dict(self._stats.slots),
                experts=dict(self._stats.experts),
            )

    def reset_stats(self) -> None:
        """Count from zero again; residents stay."""
        with self._lock:
            self._stats.prefill, self._stats.decode = PhaseStats(), PhaseStats()
            self._stats.shrinks = 0
            self._last = None
            self._fetcher.counts = self._stats.decode


def _context(cache: Any) -> int:
    """Positions that the KV cache holds already, 0 where it does not say."""
    for entry in cache or ():
        offset = getattr(entry, "offset", None)
        if isinstance(offset, int):
            return offset
        if isinstance(offset, mx.array) and offset.size:
            return int(offset.max().item())
    return 0


_classes: dict[type, type] = {}


def attach(model: nn.Module, engine: Engine) -> None:
    """Let every forward of ``model`` pass through ``engine``."""
    stock = type(model)
    if stock not in _classes:

        def call(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs["cache"] if "cache" in kwargs else (args[0] if args else None)
            return self._mbolt.forward(
                lambda: stock.__call__(self, inputs, *args, **kwargs), inputs, cache
            )

        def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
            raise UnsupportedError(
                "a model whose experts are offloaded cannot be split over devices: a slot holds "
                "one expert after another",
                hint="load it with mlx_lm.load",
            )

        own = {"__call__": call}
        if hasattr(stock, "shard"):
            own["shard"] = refuse
        _classes[stock] = type(f"Offloaded{stock.__name__}", (stock,), own)
    model._mbolt = engine
    model.__class__ = _classes[stock]


def engine_of(model: Any) -> Engine:
    """The engine beside ``model``.

    Raises:
        UsageError: if mbolt did not load it.
    """
    engine = getattr(model, "_mbolt", None)
    if not isinstance(engine, Engine):
        raise UsageError("this model was not loaded by mbolt_mlx.load")
    return engine
