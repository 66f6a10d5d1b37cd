"""One layer at work: bring the experts that the router named into slots, and compute.

Those whose experts are in memory are computed while the others are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx
import numpy as np

from mbolt_mlx.core.reads import Batch
from mbolt_mlx.core.residency import ABSENT, ResidentSet
from mbolt_mlx.core.schedule import CALL_BYTES, CallPlan, Step, carry_out, hottest, plan_call
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.rows import Compute, ManyTokens, OneToken, Rows, all_rows
from mbolt_mlx.engine.slots import LayerSlots

# The result of a call this small may be kept until the layer's next one.
_LAZY_TOKENS = 16


class OffloadedLayer:
    """One layer's experts: what is in memory, and how a forward gets the rest.

    Args:
        slots: the layer's memory.
        resident: which expert each slot holds.
        fetcher: reads and counts, shared by all layers.
    """

    def __init__(self, slots: LayerSlots, resident: ResidentSet, fetcher: Fetcher) -> None:
        self.slots = slots
        self.resident = resident
        self.fetcher = fetcher
        self._pending: mx.array | None = None
        self._batch = Batch()
        self._interrupted = False

    @property
    def whole(self) -> bool:
        """Whether every expert has its own slot, so that slot numbers are expert ids."""
        return self.slots.count == self.slots.store.experts

    def forward(self, compute: Compute, x: mx.array, indices: mx.array) -> mx.array:
        """``compute`` on slots instead of experts.

        Args:
            compute: the stock container.
            x: rows ``[..., D]``.
            indices: the router's expert ids ``[..., K]``.

        Returns:
            ``[..., K, D]``, the rows that the stock container would give.
        """
        counts = self.fetcher.counts
        start = perf_counter()
        ids = np.array(indices)
        counts.readback_wait_s += perf_counter() - start
        counts.readbacks += 1
        self._begin()
        tokens = ids.reshape(-1, ids.shape[-1])
        if self.fetcher.note is not None:
            self.fetcher.note(self.slots.store.layer, tokens)
        evicted = self.resident.evictions
        plan = plan_call(self.resident, tokens, self.slots.store.file_order)
        counts.hits += len(plan.hits)
        counts.misses += len(plan.misses)
        slot_of, row_bytes = self.resident.slot_of, self.slots.store.expert_bytes
        if len(tokens) == 1:
            rows: Rows = OneToken(compute, x, tokens[0].tolist(), slot_of, row_bytes)
        else:
            rows = ManyTokens(compute, x, tokens, slot_of, row_bytes)
        self._run(rows, plan)
        self.resident.policy.use(tokens)
        counts.evictions += self.resident.evictions - evicted
        y = rows.combine(ids.shape)
        if len(tokens) > _LAZY_TOKENS:
            mx.eval(y)
        else:
            # What reads the slots is on its way before this returns, so that whoever overwrites
            # one next, on any thread, only has to wait for it.
            mx.async_eval(y)
            self._pending = y
        self._interrupted = False
        return y

    def forward_whole(self, compute: Compute, x: mx.array, indices: mx.array) -> mx.array:
        """As `forward`, for a layer that fits whole: its slot numbers are expert ids."""
        if self.fetcher.note is not None:
            self.fetcher.note(self.slots.store.layer, indices)
        return all_rows(compute, x, indices, self.slots.store.expert_bytes)

    def _begin(self) -> None:
        """Wait for what still reads the slots, and distrust them if the last call was cut short.

        An interrupt (Ctrl-C) may come between any two steps of a call, so the call counts as cut
        short until its last one.
        """
        if self._pending is not None:
            mx.eval(self._pending)
            self._pending = None
        if self._interrupted:
            self._batch.drain()
            self.resident.clear(self.slots.count)
            self.slots.index_windows()
        self._interrupted = True

    def _run(self, rows: Rows, plan: CallPlan) -> None:
        """Read what is missing, and meanwhile compute what is there, in a sliding window.

        Where the experts outnumber the slots they pass through: half of the slots are being read
        into while the other half is computed.
        """
        flow = _Flow(self, rows, plan)
        self._batch = flow.batch
        small = self.slots.store.expert_bytes < CALL_BYTES
        # Computing in small groups hides more of the reading, in large ones it costs less.
        group = 1 if rows.count == 1 else max(1, min(plan.staging, len(plan.misses)) // 4)
        try:
            flow.start()
            if rows.count == 1 and small and len(plan.steps) <= 1:
                flow.compute([*plan.hits, *flow.arrived(len(plan.misses))])
                return
            flow.compute([e for e in plan.hits if e in flow.leaving])
            flow.compute([e for e in plan.hits if e not in flow.leaving])
            while flow.steps or flow.coming:
                if flow.coming:
                    flow.compute(flow.arrived(group))
                while flow.steps and (not flow.coming or flow.computing > plan.staging // 2):
                    flow.release()
                    flow.start()
        except Exception:
            self._abandon(flow)
            raise

    def read(self, step: Step, batch: Batch) -> None:
        """Give the experts of ``step`` their slots, and start to read them."""
        slots = carry_out(self.resident, step)
        self.fetcher.start(self.slots, step.read, slots, batch)

    def ready(self, batch: Batch, count: int) -> list[int]:
        """Wait for at least ``count`` experts of ``batch`` and return all that are complete."""
        experts = self.fetcher.wait(batch, count)
        if not self.slots.aliased:
            self.slots.landed([self.resident.slot_of[e] for e in experts])
        return experts

    def _abandon(self, flow: _Flow) -> None:
        """A forward ends early: let no thread write on, and trust nothing that was on its way."""
        flow.batch.drain()
        for expert in flow.started:
            if self.resident.slot_of[expert] != ABSENT:
                self.resident.forget(expert)
        self._interrupted = False

    def fill(self) -> None:
        """Read every expert into the slot of its own number (layers that fit whole)."""
        self._read_now(list(range(self.slots.store.experts)))

    def seed(self) -> None:
        """Read the experts that a profile found hottest; does nothing where there is none."""
        if self.slots.store.heat is not None:
            self._read_now(hottest(self.slots.store.heat, self.slots.count))

    def _read_now(self, experts: list[int]) -> None:
        batch = Batch()
        try:
            self.read(Step(experts, []), batch)
            self.ready(batch, len(experts))
        finally:
            batch.drain()

    def shrink(self, slots: int) -> None:
        """Give memory back: keep only ``slots`` slots. No forward may be under way."""
        self._begin()
        self.slots.shrink(slots, self.resident.shrink(slots))
        self._interrupted = False


class _Flow:
    """One call's experts on their way: waiting, being read, being computed.

    Args:
        layer: the layer they belong to.
        rows: what is computed with them.
        plan: what is read, and what is given up for it.
    """

    def __init__(self, layer: OffloadedLayer, rows: Rows, plan: CallPlan) -> None:
        self._layer = layer
        self._rows = rows
        self.steps = deque(plan.steps)
        #: experts whose slots a later step takes over
        self.leaving = {e for step in plan.steps for e in step.evict}
        #: of these, the ones that a computation or a read of this call still needs
        self._busy = self.leaving & {*plan.hits, *plan.misses} if self.leaving else set()
        self.batch = Batch()
        self.started: list[int] = []
        self.coming = 0
        self.computing = 0
        self._computations: deque[tuple[list[mx.array], list[int]]] = deque()

    def start(self) -> None:
        """Start the next steps, as far as their slots are free."""
        while self.steps and self._busy.isdisjoint(self.steps[0].evict):
            step = self.steps.popleft()
            self.started += step.read
            self.coming += len(step.read)
            self._layer.read(step, self.batch)

    def arrived(self, count: int) -> list[int]:
        """Wait for ``count`` of the experts being read; all that have arrived."""
        experts = self._layer.ready(self.batch, min(count, self.coming))
        self.coming -= len(experts)
        return experts

    def compute(self, experts: Sequence[int]) -> None:
        """Start to compute the rows of ``experts``, which are in memory."""
        if not experts:
            return
        parts = self._rows.compute(experts)
        mx.async_eval(*parts)
        leaving = [e for e in experts if e in self.leaving]
        if leaving:
            self._computations.append((parts, leaving))
            self.computing += len(leaving)

    def release(self) -> None:
        """Wait for the oldest computation, if any, and let its slots go."""
        if self._computations:
            parts, experts = self._computations.popleft()
            mx.eval(*parts)
            self.computing -= len(experts)
            self._busy.difference_update(experts)
