"""Where a replay's experts lie: the same ranges that the engine would read, of any layout.

A layer's `Range` is one contiguous read an expert. Stock files have one a piece, a side-file one
an expert. What `mbolt_mlx.storage.store` calls a run has the same attributes and can be used
instead, which makes a replay of a real model exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.reads import Request, merge
from mbolt_mlx.profile.traces import LayerInfo

BLOCK_ALIGN = 16384
DEFAULT_PIECES = 3
# Layout → (order of the experts, whether an expert is one block).
LAYOUTS = {
    "stock": ("ids", False),
    "coalesced": ("ids", True),
    "heat": ("heat", False),
    "clique": ("clique", False),
    "chain": ("chain", False),
    "interleave": ("chain", True),
    "coalesced+heat": ("heat", True),
    "coalesced+clique": ("clique", True),
    "coalesced+chain": ("chain", True),
}


class Readable(Protocol):
    """One range of a file for each expert of a layer."""

    pieces: Sequence[int]
    nbytes: int
    files: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True)
class Range:
    """See `Readable`; ``pieces`` numbers the buffers that the range fills."""

    pieces: tuple[int, ...]
    nbytes: int
    files: tuple[int, ...]
    offsets: tuple[int, ...]


def check_layout(name: str, orders: Collection[str]) -> tuple[str, bool]:
    """What `LAYOUTS` says of the layout ``name``, where ``orders`` are given.

    Raises:
        UsageError: for an unknown layout, or one whose order is not given.
    """
    if name not in LAYOUTS:
        raise UsageError(f"unknown layout {name!r}", expected=" or ".join(LAYOUTS))
    order, whole = LAYOUTS[name]
    if order != "ids" and order not in orders:
        raise UsageError(f"the layout {name} needs an order", hint="give --perms perms.json")
    return order, whole


def lay_out(
    name: str,
    layers: Mapping[int, LayerInfo],
    orders: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    pieces: int | None = None,
) -> dict[int, tuple[Range, ...]]:
    """The ranges of each layer under the layout ``name``, one of `LAYOUTS`.

    Args:
        layers: what is known of the layers; those without bytes count as one byte an expert.
        orders: "heat", "clique", "chain" → layer → expert ids in the order of their place.
        pieces: equal pieces an expert, where ``layers`` does not say.

    Raises:
        UsageError: for an unknown layout, or one whose order is not given.
    """
    order, whole = check_layout(name, orders or ())
    out, start = {}, 0
    for layer, info in layers.items():
        ids = list(range(info.experts)) if order == "ids" else list((orders or {})[order][layer])
        if sorted(ids) != list(range(info.experts)):
            raise UsageError(
                f"the order of layer {layer} does not name each of its {info.experts} experts once"
            )
        size = info.expert_bytes or 1
        count = 1 if whole else max(1, info.pieces or pieces or DEFAULT_PIECES)
        sizes = [size // count + (n < size % count) for n in range(count)]
        out[layer], start = _ranges(ids, sizes, whole, start)
    return out


def _ranges(
    ids: list[int], sizes: list[int], whole: bool, start: int
) -> tuple[tuple[Range, ...], int]:
    ranges = []
    for number, nbytes in enumerate(sizes):
        stride = -(-nbytes // BLOCK_ALIGN) * BLOCK_ALIGN if whole and nbytes > 1 else nbytes
        offsets = [0] * len(ids)
        for place, expert in enumerate(ids):
            offsets[expert] = start + place * stride
        ranges.append(Range((number,), nbytes, (0,) * len(ids), tuple(offsets)))
        start += len(ids) * stride
    return tuple(ranges), start


def requests_of(
    ranges: Sequence[Readable], experts: Sequence[int], gap: int | None = None
) -> list[Request]:
    """One start of the engine's reader for ``experts``, merged as it merges.

    The requests have a file's number where the engine has its descriptor, and empty buffers.

    Args:
        ranges: of the layer.
        experts: that are read together.
        gap: bytes up to which a gap between two ranges is read too; None is the engine's own.
    """
    requests = [
        Request(r.files[e], r.offsets[e], [_NOWHERE] * len(r.pieces), r.nbytes, (e,))
        for r in ranges
        for e in experts
    ]
    if len(requests) > 1:
        requests = merge(requests) if gap is None else merge(requests, gap)
    return requests


def reads_of(
    ranges: Sequence[Readable], experts: Sequence[int], gap: int | None = None
) -> tuple[int, int]:
    """(reads, bytes) of `requests_of`."""
    requests = requests_of(ranges, experts, gap)
    return len(requests), sum(request.nbytes for request in requests)


_NOWHERE = memoryview(b"")
