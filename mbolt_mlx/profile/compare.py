"""Policies side by side on a trace: hit rates with ranges, and the gap that each closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbolt_mlx.profile.counts import bootstrap, paired_bootstrap
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import Trace

RESIDENTS = (0.1, 0.2, 0.3, 0.5)
POLICIES = ("lru", "decayed", "markov")


def held_out(trace: Trace, train: float) -> Trace:
    """The part of ``trace`` after its first ``train``: whole sessions, or decode passes of one.

    A trace with one session keeps all its passes before the first decoded token.
    """
    sessions = sorted({one.session for one in trace.passes})
    if len(sessions) > 1:
        kept = set(sessions[round(train * len(sessions)) :])
        return trace.part(one for one in trace.passes if one.session in kept)
    decode = [n for n, one in enumerate(trace.passes) if one.phase == "decode"]
    skipped = set(decode[: round(train * len(decode))])
    return trace.part(one for n, one in enumerate(trace.passes) if n not in skipped)


def compare(
    trace: Trace,
    *,
    residents: Sequence[float] = RESIDENTS,
    policies: Sequence[str] = POLICIES,
    scopes: Sequence[str] = ("layer", "class"),
) -> list[dict[str, Any]]:
    """One row a residency and policy, as JSON values.

    ``gap_closed`` is (policy − LRU) ÷ (Belady − LRU), all with slots a layer; ``against_lru`` the
    95 % range of the difference to LRU in hit rate, by paired bootstrap over decode passes.

    Raises:
        TraceError: when nothing was decoded.
    """
    trace.need_decoded()
    rows = []
    for resident in residents:
        base = replay(trace, Setup("lru", resident=resident))
        best = replay(trace, Setup("belady", resident=resident))
        low, high = base.decode.hit_rate, best.decode.hit_rate
        for scope in scopes:
            for policy in policies:
                found = base
                if (policy, scope) != ("lru", "layer"):
                    found = replay(trace, Setup(policy, scope, resident=resident))
                rate = found.decode.hit_rate
                theirs, ours = base.hits_by_pass(), found.hits_by_pass()
                rows.append(
                    {
                        "resident": resident,
                        "scope": scope,
                        "policy": policy,
                        "hit_rate": rate,
                        "range": list(bootstrap(ours)),
                        "against_lru": list(paired_bootstrap(ours, theirs)),
                        "gap_closed": (rate - low) / (high - low) if high > low else None,
                        "belady": high,
                    }
                )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """``rows`` as Markdown."""
    lines = [
        "| resident | slots | policy | hits | 95 % range | against LRU | gap closed | Belady |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (100 * x for x in row["range"])
        worse, better = (100 * x for x in row["against_lru"])
        gap = "" if row["gap_closed"] is None else f"{100 * row['gap_closed']:.0f} %"
        where = "a layer" if row["scope"] == "layer" else "a size"
        lines.append(
            f"| {row['resident']:.0%} | {where} | {row['policy']} | {100 * row['hit_rate']:.1f} "
            f"| {low:.1f}–{high:.1f} | {worse:+.1f} to {better:+.1f} | {gap} "
            f"| {100 * row['belady']:.1f} |"
        )
    return "\n".join(lines)
