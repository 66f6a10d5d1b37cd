"""What a trace says of a model's routing, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mbolt_mlx.profile import cluster
from mbolt_mlx.profile.perms import entropy_bits
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, PREFILL, Trace

WINDOWS = (1, 4, 16, 64, 256, 1024)
RESIDENTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


def trace_stats(
    trace: Trace,
    *,
    residents: Sequence[float] = RESIDENTS,
    policies: Sequence[str] = ("lru", "default", "belady"),
) -> dict[str, Any]:
    """The figures of `mbolt-mlx trace-stats`, as JSON values.

    ``entropy_bits`` is of how often each expert is chosen (its most is log2(experts));
    ``reuse`` the share of a token's experts that the token before chose too; ``lift_mean`` the
    mean over pairs, by how often they fire, of P(both) ÷ (P(one) · P(other)); ``working_set``
    the mean number of different experts a layer in windows of so many tokens; ``hit_rates`` the
    decode hit rate of replays with slots a layer, None where nothing was decoded.
    """
    layers = [_layer(trace, layer) for layer in trace.layers]
    decoded = trace.tokens(DECODE) > 0
    curve = {
        policy: {
            f"{resident:g}": round(
                replay(trace, Setup(policy, resident=resident)).decode.hit_rate, 6
            )
            if decoded
            else None
            for resident in residents
        }
        for policy in policies
    }
    sizes = [i.expert_bytes for i in trace.layers.values()]
    known = [size for size in sizes if size is not None]
    return {
        "model": trace.model,
        "sessions": trace.sessions,
        "passes": len(trace.passes),
        "prefill_tokens": trace.tokens(PREFILL),
        "decode_tokens": trace.tokens(DECODE),
        "layers": len(trace.layers),
        "experts": sorted({i.experts for i in trace.layers.values()}),
        "top_k": sorted({i.top_k for i in trace.layers.values()}),
        "expert_bytes": sorted(set(known)),
        "token_bytes": sum(i.top_k * (i.expert_bytes or 0) for i in trace.layers.values())
        if len(known) == len(sizes)
        else None,
        "entropy_bits": _mean(layers, "entropy_bits"),
        "reuse": _mean(layers, "reuse"),
        "lift_mean": _mean(layers, "lift_mean"),
        "never_used": sum(y["never_used"] for y in layers),
        "working_set": {
            str(w): round(float(np.mean([y["working_set"][str(w)] for y in layers])), 3)
            for w in WINDOWS
            if all(str(w) in y["working_set"] for y in layers)
        },
        "hit_rates": curve,
        "by_layer": layers,
        "notes": list(trace.notes),
    }


def _mean(layers: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [y[key] for y in layers if y[key] is not None]
    return round(float(np.mean(values)), 6) if values else None


def _layer(trace: Trace, layer: int) -> dict[str, Any]:
    info = trace.layers[layer]
    rows = trace.rows(layer, DECODE)
    if not len(rows):
        rows = trace.rows(layer)
    heat = cluster.heat_of(rows, info.experts)
    pairs = cluster.coactivation(rows, info.experts)
    lifts = cluster.lift(pairs, heat, len(rows))
    fired = pairs.sum()
    reuse = [len(set(a) & set(b)) / info.top_k for a, b in zip(rows, rows[1:], strict=False)]
    return {
        "layer": layer,
        "experts": info.experts,
        "tokens": len(rows),
        "entropy_bits": entropy_bits(heat),
        "max_entropy_bits": round(float(np.log2(info.experts)), 6),
        "hottest": cluster.heat_order(heat)[:8],
        "hottest_share": round(
            float(np.sort(heat)[::-1][: info.top_k].sum() / max(1, heat.sum())), 6
        ),
        "never_used": int((heat == 0).sum()),
        "reuse": round(float(np.mean(reuse)), 6) if reuse else None,
        "lift_mean": round(float((lifts * pairs).sum() / fired), 6) if fired else None,
        "working_set": _working_set(rows),
    }


def _working_set(rows: np.ndarray) -> dict[str, float]:
    """Mean number of different experts in windows that do not overlap."""
    out = {}
    for window in WINDOWS:
        starts = range(0, len(rows) - window + 1, window)
        if starts:
            out[str(window)] = round(
                float(np.mean([len(np.unique(rows[s : s + window])) for s in starts])), 3
            )
    return out
