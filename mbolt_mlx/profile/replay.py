"""Replay a trace: what an engine with so much memory would hit, miss and read.

A layer's own slots are replayed with the engine's own classes, the policies and the resident set
of `core.residency` and the plan of a call of `core.schedule`, so the counts are the engine's. Like
there, a layer that fits whole counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from mbolt_mlx.core.budget import LayerShape, slots_at, slots_within
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.reads import Request
from mbolt_mlx.core.residency import ResidentSet, make_policy
from mbolt_mlx.core.schedule import by_place, carry_out, hottest, plan_call
from mbolt_mlx.profile.belady import belady
from mbolt_mlx.profile.counts import Counts, PassCounts
from mbolt_mlx.profile.layout import Readable, reads_of, requests_of
from mbolt_mlx.profile.pool import Pool
from mbolt_mlx.profile.traces import Trace

SCOPES = ("layer", "global", "class")
OnReads: TypeAlias = Callable[[str, list[Request]], None]


@dataclass(frozen=True)
class Setup:
    """What is replayed.

    Args:
        policy: of `core.residency`, or "belady" for the optimum (scope "layer" only).
        scope: "layer" gives each layer its own slots; "global" shares the bytes among all, "class"
            the slots among layers whose experts have the same size.
        resident: fraction of the experts in memory.
        budget: bytes for experts, instead of ``resident``.
        slots: layer → slots, instead of both (scope "layer").
        merge_gap: bytes up to which the gap between two reads is read too; None is the engine's.
        heat: layer → worth of each expert, from a profile: the hottest start in memory. A layer
            starts empty without.
    """

    policy: str = "default"
    scope: str = "layer"
    resident: float | None = None
    budget: int | None = None
    slots: Mapping[int, int] | None = None
    merge_gap: int | None = None
    heat: Mapping[int, Sequence[float]] | None = field(default=None, repr=False)


def shapes_of(trace: Trace) -> dict[int, LayerShape]:
    """The layers as the budget sees them; an unknown size counts as one byte an expert."""
    return {
        layer: LayerShape(info.experts, info.top_k, info.expert_bytes or 1)
        for layer, info in trace.layers.items()
    }


def slots_of(trace: Trace, setup: Setup) -> dict[int, int]:
    """Slots a layer, as the engine's budget gives them.

    Raises:
        UsageError: when ``setup`` gives no size, or more than one.
        MemoryLimitError: when the budget has no room for one token's experts.
    """
    given = [setup.resident is not None, setup.budget is not None, setup.slots is not None]
    if sum(given) != 1:
        raise UsageError("a replay needs exactly one of resident, budget and slots")
    shapes = shapes_of(trace)
    if setup.slots is not None:
        missing = sorted(set(shapes) - set(setup.slots))
        if missing:
            raise UsageError(f"no slots are given for layer {missing[0]}")
        return {layer: min(setup.slots[layer], shapes[layer].experts) for layer in shapes}
    if setup.resident is not None:
        if not 0.0 < setup.resident <= 1.0:
            raise UsageError("resident is a fraction over 0 and up to 1", found=setup.resident)
        counts = slots_at(list(shapes.values()), setup.resident)
    else:
        _need_bytes(trace)
        counts = slots_within(list(shapes.values()), setup.budget)
    return dict(zip(shapes, counts, strict=True))


def replay(
    trace: Trace,
    setup: Setup,
    ranges: Mapping[int, Sequence[Readable]] | None = None,
    on_reads: OnReads | None = None,
) -> PassCounts:
    """Replay ``trace``.

    Args:
        trace: what the router chose.
        setup: policy and memory.
        ranges: layer → where its experts lie (`lay_out`, or the runs of a real store); None
            counts one read an expert, merged with no other.
        on_reads: called with the phase and the requests that are started together, each time;
            for slots a layer, and needs ``ranges``.

    Raises:
        UsageError, MemoryLimitError: when ``setup`` has no meaning.
    """
    if setup.scope not in SCOPES:
        raise UsageError(f"unknown scope {setup.scope!r}", expected=" or ".join(SCOPES))
    if setup.policy == "belady":
        return _optimum(trace, setup)
    if setup.scope == "layer":
        return _by_layer(trace, setup, ranges, on_reads)
    return _pooled(trace, setup, ranges)


def _by_layer(
    trace: Trace,
    setup: Setup,
    ranges: Mapping[int, Sequence[Readable]] | None,
    on_reads: OnReads | None,
) -> PassCounts:
    slots = slots_of(trace, setup)
    sets = {
        layer: ResidentSet(info.experts, slots[layer], make_policy(setup.policy, info.experts))
        for layer, info in trace.layers.items()
    }
    _seed(sets, setup.heat)
    sort = {
        layer: by_place(r[0].files, r[0].offsets) if (r := (ranges or {}).get(layer)) else sorted
        for layer in trace.layers
    }
    out = PassCounts()
    session = trace.passes[0].session
    for one in trace.passes:
        if one.session != session:
            session = one.session
            for resident in sets.values():
                resident.policy.renew()
        counts = Counts(tokens=one.tokens)
        for layer, tokens in one.chosen.items():
            resident = sets[layer]
            if not len(tokens) or resident.slots >= trace.layers[layer].experts:
                continue  # what fits whole is read once, at load, and counted nowhere
            evicted = resident.evictions
            plan = plan_call(resident, tokens, sort[layer])
            counts.hits += len(plan.hits)
            counts.misses += len(plan.misses)
            for step in plan.steps:
                carry_out(resident, step)
                _count_reads(counts, trace, ranges, layer, step.read, setup.merge_gap)
                if on_reads is not None and ranges is not None:
                    on_reads(one.phase, requests_of(ranges[layer], step.read, setup.merge_gap))
            resident.policy.use(tokens)
            counts.evictions += resident.evictions - evicted
        out.phases.append(one.phase)
        out.passes.append(counts)
    return out


def _seed(sets: Mapping[int, ResidentSet], heat: Mapping[int, Sequence[float]] | None) -> None:
    """Begin with the hottest experts in memory; reading them is not counted."""
    for layer, worth in (heat or {}).items():
        if layer in sets:
            sets[layer].place_all(hottest(worth, sets[layer].slots), ())


def _count_reads(
    counts: Counts,
    trace: Trace,
    ranges: Mapping[int, Sequence[Readable]] | None,
    layer: int,
    experts: Sequence[int],
    gap: int | None,
) -> None:
    if ranges is None:
        reads, nbytes = len(experts), len(experts) * (trace.layers[layer].expert_bytes or 1)
    else:
        reads, nbytes = reads_of(ranges[layer], experts, gap)
    counts.reads += reads
    counts.bytes += nbytes


def _optimum(trace: Trace, setup: Setup) -> PassCounts:
    if setup.scope != "layer":
        raise UsageError("the optimum is computed for a layer's own slots", hint="--scope layer")
    slots = slots_of(trace, setup)
    out = PassCounts(
        [one.phase for one in trace.passes], [Counts(one.tokens) for one in trace.passes]
    )
    for layer, info in trace.layers.items():
        if slots[layer] >= info.experts:
            continue
        numbers = [n for n, one in enumerate(trace.passes) if len(one.chosen.get(layer, ()))]
        calls = [np.unique(trace.passes[n].chosen[layer]) for n in numbers]
        found = belady(calls, info.experts, slots[layer])
        for n, (hits, misses) in zip(numbers, found.tolist(), strict=True):
            out.passes[n].hits += hits
            out.passes[n].misses += misses
            out.passes[n].reads += misses
            out.passes[n].bytes += misses * (info.expert_bytes or 1)
    return out


def _pooled(
    trace: Trace, setup: Setup, ranges: Mapping[int, Sequence[Readable]] | None
) -> PassCounts:
    if setup.slots is not None:
        raise UsageError("slots a layer have no meaning in a shared pool")
    shapes = shapes_of(trace)
    if setup.budget is not None:
        _need_bytes(trace)
    pool = Pool(
        shapes,
        setup.policy,
        by_size=setup.scope == "class",
        budget=setup.budget,
        slots=slots_of(trace, setup) if setup.budget is None else None,
    )
    out = PassCounts()
    session = trace.passes[0].session
    for one in trace.passes:
        if one.session != session:
            session = one.session
            pool.renew()
        counts = Counts(tokens=one.tokens)
        for layer, tokens in one.chosen.items():
            wanted: dict[int, bool] = {}
            for row in tokens:
                hits, misses, evicted = pool.call(layer, row)
                for e in hits:
                    wanted.setdefault(e, True)
                for e in misses:
                    wanted.setdefault(e, False)
                counts.evictions += evicted
                if misses:
                    _count_reads(counts, trace, ranges, layer, misses, setup.merge_gap)
            counts.hits += sum(wanted.values())
            counts.misses += len(wanted) - sum(wanted.values())
        out.phases.append(one.phase)
        out.passes.append(counts)
    return out


def _need_bytes(trace: Trace) -> None:
    unknown = [layer for layer, info in trace.layers.items() if info.expert_bytes is None]
    if unknown:
        raise UsageError(
            f"the trace does not say how many bytes an expert of layer {unknown[0]} has",
            hint="give --model or --expert-bytes, or --resident instead of --budget",
        )
