"""What a model will need and how fast it will be, before anything is downloaded or written.

Memory is the engine's own budget. Speed is computing, and what cold reads by the speed law take
beyond the computing that hides them (`profile.pace`): for a missed expert its pieces in the model's
own files, one read in a side-file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.budget import (
    FREED_BYTES,
    PLANNED_CHUNK,
    PLANNED_CONTEXT,
    WORKING_BYTES,
    Geometry,
    LayerShape,
    slot_bytes,
    slots_at,
    slots_within,
)
from mbolt_mlx.core.errors import MemoryLimitError
from mbolt_mlx.core.reads import BOUNCE_BYTES, THREADS
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.law import DEFAULT_LAW, Law
from mbolt_mlx.profile.layout import lay_out
from mbolt_mlx.profile.pace import Pace, hit_rate, misses_at, misses_of
from mbolt_mlx.profile.perms import Perms
from mbolt_mlx.profile.probe import law_document
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, LayerInfo, Pass, Trace

RESIDENTS = (0.1, 0.2, 0.3, 0.5, 1.0)
# Decode hits by the share of experts in memory: Qwen3-235B, least recently used, slots a layer, as
# published; nothing and everything added. A stand-in where there is no trace.
CURVE = ((0.0, 0.0), (0.05, 0.34), (0.2, 0.74), (0.45, 0.93), (1.0, 1.0))
# What Python, MLX and mlx-lm take while they run, and for each layer; and what they take before a
# model is loaded, where the loader's budget starts (measured on Linux with mlx 0.32).
PROCESS_BYTES, LAYER_BYTES = 84 << 20, 256 << 10
PROCESS_BEFORE = 75 << 20
# Waiting for the router's choice and mapping it to slots, a token and layer that is not whole in
# memory (as reported for Metal, and as measured on a CPU of 2.4 GHz); and bringing an expert in,
# beyond the read.
READBACK_S = 0.25e-3 if files.MACOS else 0.6e-3
MISS_S = 0.06e-3 if files.MACOS else 0.15e-3
DEFAULT_MEMORY_RATE = 60e9
# Starting a layer's kernels, a token and layer, where computing was not measured: an assumption,
# on the low side (the model that ships takes 1.8 ms a layer on two cores of 2.4 GHz, computing and
# all). Without it a model of some MB would be foretold thousands of tokens a second.
LAUNCH_S = 0.1e-3
# Below these gains a plan does not recommend the work.
_WORTH_SIDE_FILE, _WORTH_ORDER = 1.05, 1.03


@dataclass(frozen=True)
class Model:
    """A model as its headers tell it.

    Args:
        name: for the reader.
        layers: layer number → its experts.
        pieces: reads that one expert takes from the model's own files.
        dense_bytes: all but the experts.
        side_file_bytes: of the side-file that would be written.
        geometry: what contexts cost.
    """

    name: str
    layers: Mapping[int, LayerShape]
    pieces: float
    dense_bytes: int
    side_file_bytes: int
    geometry: Geometry

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(s.experts * s.expert_bytes for s in self.layers.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts that one token uses."""
        return sum(s.top_k * s.expert_bytes for s in self.layers.values())


@dataclass(frozen=True)
class Assumptions:
    """What a plan takes for granted.

    Args:
        law: depth (reads at a time) → the drive's constants.
        limit: bytes a second that the drive is held to beside; None where it is not.
        compute_s: seconds a token with every expert in memory; None estimates it from the bytes
            that a token touches, ``memory_rate`` and `LAUNCH_S` a layer.
        memory_rate: bytes a second at which the processor reads weights.
        context, chunk: positions of context and tokens of a prefill chunk to make room for.
        notes: sentences on where the figures come from.
    """

    law: Callable[[float], Law] = field(default=lambda depth: DEFAULT_LAW, repr=False)
    limit: float | None = None
    compute_s: float | None = None
    memory_rate: float = DEFAULT_MEMORY_RATE
    context: int = PLANNED_CONTEXT
    chunk: int = PLANNED_CHUNK
    notes: tuple[str, ...] = ()


def make_plan(
    model: Model,
    assume: Assumptions | None = None,
    *,
    residents: Sequence[float] = RESIDENTS,
    memory: int | None = None,
    trace: Trace | None = None,
    perms: Perms | None = None,
    free_bytes: int | None = None,
) -> dict[str, Any]:
    """The plan as JSON values; see the module.

    Args:
        model: what its headers say.
        assume: the drive and the processor.
        residents: fractions of the experts to plan for.
        memory: bytes for the whole process: one more row, with all the slots that it has room for.
        trace: of this model, for the hit rates; None uses `CURVE`.
        perms: a profile whose chain order is weighed, with a trace.
        free_bytes: space on the drive where the side-file would go.

    Raises:
        TraceError: when the trace is of another model, or nothing was decoded in it.
    """
    assume = assume or Assumptions()
    if trace is not None:
        trace.need_decoded()
        trace.check_model(
            {layer: s.experts for layer, s in model.layers.items()},
            top_k={layer: s.top_k for layer, s in model.layers.items()},
        )
        trace = _with_sizes(trace, model)
    shapes = list(model.layers.values())
    rows = [_row(model, assume, slots_at(shapes, r), r, trace, perms) for r in residents]
    least = _reserved(model, assume) + slot_bytes(shapes, slots_at(shapes, 0.0))
    fits, reason = None, None
    if memory is not None:
        try:
            slots = slots_within(shapes, memory - _reserved(model, assume))
        except MemoryLimitError:
            reason = (
                f"{format_size(memory)} is too little: at least {format_size(least)} are needed"
            )
        else:
            share = sum(slots) / sum(s.experts for s in shapes)
            fits = _row(model, assume, slots, share, trace, perms)
            fits["memory_limit"] = memory
    every = [*rows, *([fits] if fits else [])]
    every.sort(key=lambda row: row["resident"])
    return {
        "model": {
            "name": model.name,
            "layers": len(shapes),
            "experts": sorted({s.experts for s in shapes}),
            "top_k": sorted({s.top_k for s in shapes}),
            "expert_bytes": model.expert_bytes,
            "dense_bytes": model.dense_bytes,
            "token_bytes": model.token_bytes,
            "reads_an_expert": model.pieces,
            "side_file_bytes": model.side_file_bytes,
            "least_memory_bytes": least,
        },
        "drive": {
            **law_document(assume.law(THREADS)),
            "free_bytes": free_bytes,
        },
        "rows": every,
        "assumed": _assumed(assume, trace),
        "verdict": reason or _verdict(model, every, fits, perms is not None, free_bytes),
    }


def curve_hit_rate(resident: float) -> float:
    """The published curve at ``resident``, straight lines between its points."""
    x, y = zip(*CURVE, strict=True)
    return float(np.interp(resident, x, y))


def speed(tps: float) -> str:
    """``tps`` tokens a second with three digits, and never as a power of ten."""
    return f"{tps:.3g}" if tps < 999.5 else f"{tps:.0f}"


def _reserved(model: Model, assume: Assumptions) -> int:
    """What the loader keeps out of a memory limit before it gives the rest to slots."""
    beside = model.geometry.beside_weights(assume.context, assume.chunk, WORKING_BYTES)
    return PROCESS_BEFORE + model.dense_bytes + beside


def _memory(model: Model, assume: Assumptions, slots: Sequence[int]) -> int:
    """Peak bytes of the process."""
    shapes = list(model.layers.values())
    chunk = min(assume.chunk, assume.context)
    working = min(FREED_BYTES, model.geometry.transient(chunk, assume.context))
    working += (THREADS + 1) * min(BOUNCE_BYTES, max(s.expert_bytes for s in shapes))
    beside = model.geometry.beside_weights(assume.context, assume.chunk, working)
    process = PROCESS_BYTES + LAYER_BYTES * len(shapes)
    return process + model.dense_bytes + slot_bytes(shapes, slots) + beside


def _row(
    model: Model,
    assume: Assumptions,
    slots: Sequence[int],
    resident: float,
    trace: Trace | None,
    perms: Perms | None,
) -> dict[str, Any]:
    shapes = list(model.layers.values())
    own = dict(zip(model.layers, slots, strict=True))
    if trace is None:
        missed = {
            layer: misses_at(curve_hit_rate(own[layer] / s.experts), s.top_k)
            for layer, s in model.layers.items()
        }
        chained = None
    else:
        missed = misses_of(trace, own)
        chained = _chained(trace, Setup(slots=own), perms)
    hit = hit_rate(missed.values())
    misses = sum(one.per_token for one in missed.values())
    nbytes = sum(one.per_token * model.layers[y].expert_bytes for y, one in missed.items())
    pace = _pace(model, assume, own)
    compute = pace.dense_s + pace.experts_s
    slow = pace.seconds(missed, model.pieces)
    fast = pace.seconds(missed, 1.0)
    row = {
        "resident": round(resident, 4),
        "slots_per_layer": round(sum(slots) / len(slots), 2),
        "memory_bytes": _memory(model, assume, slots),
        "dense_bytes": model.dense_bytes,
        "slot_bytes": slot_bytes(shapes, slots),
        "hit_rate": round(hit, 4),
        "reads_per_token": round(misses, 3),
        "reads_per_token_shards": round(misses * model.pieces, 3),
        "bytes_per_token": round(nbytes),
        "compute_s": compute,
        "tps_shards": round(1.0 / slow, 3),
        "tps_side_file": round(1.0 / fast, 3),
    }
    if chained is not None:
        before, after, more = chained
        row["reads_per_token_ids"], row["reads_per_token_chain"] = round(before, 3), round(after, 3)
        if misses:
            fast = pace.seconds(missed, before / misses)
            took = pace.seconds(missed, after / misses, stretch=more / nbytes)
        else:
            took = fast
        row["tps_side_file"], row["tps_chain"] = round(1.0 / fast, 3), round(1.0 / took, 3)
    return row


def _chained(trace: Trace, setup: Setup, perms: Perms | None) -> tuple[float, float, float] | None:
    """(reads a token of a side-file in the order of ids, of one in chain order, its bytes)."""
    if perms is None:
        return None
    ids = replay(trace, setup, lay_out("coalesced", trace.layers)).decode
    chain = replay(trace, setup, lay_out("coalesced+chain", trace.layers, perms.orders)).decode
    return ids.per_token("reads"), chain.per_token("reads"), chain.per_token("bytes")


def _pace(model: Model, assume: Assumptions, slots: Mapping[int, int]) -> Pace:
    """Computing takes as long as going through the weights that a token touches, and, where that
    was not measured, as starting the kernels of each layer."""
    touched = model.dense_bytes + model.token_bytes
    launch = 0.0
    if assume.compute_s is None:
        compute, launch = touched / assume.memory_rate, LAUNCH_S * len(model.layers)
    else:
        compute = assume.compute_s
    experts = compute * model.token_bytes / touched
    part = sum(slots[layer] < s.experts for layer, s in model.layers.items())
    dense = compute - experts + launch + READBACK_S * part
    return Pace(model.layers, dense, experts, assume.law, MISS_S, assume.limit)


def _with_sizes(trace: Trace, model: Model) -> Trace:
    """The trace on the model's own sizes, which may be another quantisation's."""
    layers = {
        layer: LayerInfo(
            info.experts, info.top_k, model.layers[layer].expert_bytes, round(model.pieces)
        )
        for layer, info in trace.layers.items()
    }
    passes = tuple(Pass(p.phase, p.chosen, p.session) for p in trace.passes)
    return Trace(passes, dict(sorted(layers.items())), trace.model, trace.notes)


def _assumed(assume: Assumptions, trace: Trace | None) -> list[str]:
    notes = list(assume.notes)
    if trace is None:
        points = ", ".join(f"{y:.0%} at {x:g}" for x, y in CURVE[1:-1])
        notes.append(f"hit rates: a published curve of Qwen3-235B with LRU ({points})")
    else:
        notes.append(
            f"hit rates: a replay of {trace.tokens(DECODE)} decoded tokens of the trace given"
        )
    if assume.compute_s is None:
        notes.append(
            f"compute: a token's weights at {assume.memory_rate / 1e9:.0f} GB/s and "
            f"{LAUNCH_S * 1e3:g} ms a layer to start its kernels; what you measured goes into "
            "--compute-ms"
        )
    notes.append(
        f"time: {READBACK_S * 1e3:g} ms a layer to read the router's choice back and "
        f"{MISS_S * 1e3:g} ms for a missing expert; a layer reads while it computes what it has in "
        "memory, but experts under a MiB wait for all of theirs"
    )
    if assume.limit is not None:
        notes.append(f"drive: held to {format_size(assume.limit)}/s over a whole token")
    notes.append(
        f"memory: {format_size(PROCESS_BYTES)} for Python and MLX, a tokenizer by its entries, a "
        f"context of {assume.context} positions in chunks of {min(assume.chunk, assume.context)}; "
        f"a limit also keeps {format_size(WORKING_BYTES)} of working space free"
    )
    return notes


def _verdict(
    model: Model,
    rows: Sequence[dict[str, Any]],
    fits: dict[str, Any] | None,
    ordered: bool,
    free_bytes: int | None,
) -> str:
    """In words, about the row that the memory has room for, or the one at a fifth."""
    row = fits or min(rows, key=lambda r: abs(r["resident"] - 0.2))
    says = []
    if fits is not None:
        says.append(
            f"{format_size(fits['memory_limit'])} have room for {row['resident']:.0%} of the "
            f"experts: about {speed(row['tps_side_file'])} tok/s with a side-file, "
            f"{speed(row['tps_shards'])} without"
        )
    else:
        says.append(
            f"with {row['resident']:.0%} of the experts in memory "
            f"({format_size(row['memory_bytes'])}): about {speed(row['tps_side_file'])} tok/s "
            f"with a side-file, {speed(row['tps_shards'])} without"
        )
    token = sum(s.top_k for s in model.layers.values()) / len(model.layers)
    if row["slots_per_layer"] <= token:
        says.append(
            "that is one token's working set and no more, so nearly every expert is read again; "
            "more memory would help most"
        )
    if row["bytes_per_token"] == 0:
        return "; ".join([*says, "nothing is read then, so a side-file gains nothing"])
    gain = row["tps_side_file"] / row["tps_shards"]
    need = f"{format_size(model.side_file_bytes)} of disk"
    if gain >= _WORTH_SIDE_FILE:
        says.append(f"coalescing pays: {gain:.2f} times as fast, for {need}")
    else:
        says.append(f"coalescing hardly pays here: {gain:.2f} times as fast, for {need}")
    if free_bytes is not None and free_bytes < model.side_file_bytes:
        says.append(f"but only {format_size(free_bytes)} are free")
    if not ordered or "tps_chain" not in row:
        says.append("whether a profile order pays on top needs a trace and a profile to tell")
    else:
        more = row["tps_chain"] / row["tps_side_file"]
        pays = "pays" if more >= _WORTH_ORDER else "does not pay"
        says.append(f"a profile order {pays} on top: {more:.2f} times as fast")
    return "; ".join(says)
