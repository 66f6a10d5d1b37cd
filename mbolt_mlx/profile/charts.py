"""Pictures of traces and replays; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.core import streams
from mbolt_mlx.core.errors import OutputError, UsageError
from mbolt_mlx.core.head import read_head
from mbolt_mlx.core.output import write_whole
from mbolt_mlx.profile import cluster
from mbolt_mlx.profile.layout import lay_out
from mbolt_mlx.profile.perms import Perms
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.traces import DECODE, Trace

RESIDENTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_FAR = 10
# Ending → what a file of the kind begins with, or has near its beginning.
_ENDINGS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<svg", ".pdf": b"%PDF-"}
_HEAD = 4096


def hit_rates(
    traces: Mapping[str, Trace],
    output: str | Path,
    *,
    policies: Sequence[str] = ("lru", "default", "belady"),
    residents: Sequence[float] = RESIDENTS,
) -> Path:
    """Decode hit rate against the share of experts in memory, one panel a trace."""
    figure, axes = _figure(output, len(traces))
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        for policy in policies:
            rates = [
                100 * replay(trace, Setup(policy, resident=resident)).decode.hit_rate
                for resident in residents
            ]
            axis.plot([100 * r for r in residents], rates, marker=".", label=_label(policy))
        axis.set(title=name, xlabel="experts in memory, %", ylabel="decode hits, %")
        axis.grid(alpha=0.3)
        axis.legend()
    return _save(figure, output)


def layouts(
    trace: Trace,
    perms: Perms,
    output: str | Path,
    *,
    resident: float = 0.2,
    names: Sequence[str] = ("stock", "chain", "coalesced", "coalesced+heat", "coalesced+chain"),
) -> Path:
    """Reads and bytes a decoded token by layout, at one residency."""
    figure, (left, right) = _figure(output, 2)
    found = [
        replay(trace, Setup(resident=resident), lay_out(n, trace.layers, perms.orders)).decode
        for n in names
    ]
    left.bar(names, [one.per_token("reads") for one in found])
    left.set(title=f"{resident:.0%} in memory", ylabel="reads a token")
    right.bar(names, [one.per_token("bytes") / 1e6 for one in found], color="tab:orange")
    right.set(title=f"{resident:.0%} in memory", ylabel="MB a token")
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=30)
        axis.grid(axis="y", alpha=0.3)
    return _save(figure, output)


def measured(points: Sequence[Mapping[str, Any]], output: str | Path) -> Path:
    """Predicted against measured, on a line that both would share; far apart, on log scales.

    Args:
        points: with ``predicted``, ``measured`` (any one unit) and ``label``.
    """
    figure, (axis,) = _figure(output, 1)
    axis.set(xlabel="predicted", ylabel="measured", title="ms a token")
    for label in dict.fromkeys(p["label"] for p in points):
        mine = [p for p in points if p["label"] == label]
        axis.scatter([p["predicted"] for p in mine], [p["measured"] for p in mine], label=label)
    values = [p[key] for p in points for key in ("predicted", "measured")]
    least, most = 0.0, 1.05 * max(values)
    if 0 < _FAR * min(values) < most:
        least = min(values) / 1.05
        axis.set(xscale="log", yscale="log")
        from matplotlib import ticker  # _figure has found it

        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            one.set_major_formatter("{x:g}")
            one.set_minor_formatter(ticker.NullFormatter())
    axis.plot([least, most], [least, most], color="grey", linewidth=1)
    axis.grid(alpha=0.3)
    axis.legend()
    return _save(figure, output)


def coactivation(trace: Trace, layer: int, output: str | Path) -> Path:
    """Heat map of which experts of ``layer`` fire together, in the order of ids and of the chain.

    Raises:
        UsageError: when the trace has no such layer.
    """
    if layer not in trace.layers:
        raise UsageError(f"the trace has no layer {layer}", expected=f"one of {list(trace.layers)}")
    info = trace.layers[layer]
    rows = trace.rows(layer, DECODE)
    heat = cluster.heat_of(rows, info.experts)
    pairs = cluster.coactivation(rows, info.experts)
    chain = cluster.chain_order(pairs, cluster.communities(pairs), heat)
    figure, axes = _figure(output, 2)
    for axis, order, title in zip(
        axes, (range(info.experts), chain), ("by id", "chained"), strict=True
    ):
        order = list(order)
        axis.imshow(np.log1p(pairs[np.ix_(order, order)]), cmap="magma")
        axis.set(title=f"layer {layer}, {title}", xlabel="expert", ylabel="expert")
    return _save(figure, output)


def _label(policy: str) -> str:
    return {"lru": "LRU", "default": "ours", "belady": "optimum (Belady)"}.get(policy, policy)


def _figure(output: str | Path, panels: int) -> tuple[Any, Any]:
    if Path(output).suffix.lower() not in _ENDINGS:
        raise UsageError("a picture ends in .png, .svg or .pdf", path=output)
    _check_place(Path(output))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "pictures need matplotlib",
            hint='install it, or run `pip install -e ".[plot]"` in the checkout of mbolt',
        ) from None
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, panels))


def _check_place(path: Path) -> None:
    """Never replace a file that is no picture of the kind, and say so before any work.

    Raises:
        OutputError: when one is there, or a folder, a pipe or a device is, or no folder holds it.
    """
    if path.is_dir():
        raise OutputError("a folder; name a file in it", path=path)
    if not path.parent.is_dir():
        raise OutputError("no such folder", path=path.parent)
    if streams.is_special(path):
        raise OutputError("a pipe or a device; name a file", path=path)
    if not path.is_file() or path.stat().st_size == 0:
        return
    head = read_head(path, _HEAD)
    kind = path.suffix.lower()
    magic = _ENDINGS[kind]
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    is_one = text[:1] == b"<" and magic in head if kind == ".svg" else head.startswith(magic)
    if not is_one:
        raise OutputError(
            f"another file is there already, and it is no {kind} picture",
            path=path,
            hint="choose another name or remove it",
        )


def _save(figure: Any, output: str | Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(output).suffix[1:].lower(), dpi=110)
    write_whole(output, picture.getvalue())
    return Path(output)
