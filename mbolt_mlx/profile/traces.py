"""Routing traces: which experts each layer chose, pass by pass, whatever file they came from."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import TraceError

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
# Twice the experts of the widest layer published; tables of pairs of them still fit in memory.
EXPERTS_MAX = 1 << 12
EXPERT_BYTES_MAX, PIECES_MAX = 1 << 50, 1 << 10
_SIZE_MAX = 8 << 30
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


@dataclass(frozen=True)
class LayerInfo:
    """A layer of the traced model.

    ``expert_bytes`` and ``pieces`` (places that one expert's bytes lie in) are None where the
    trace does not say.
    """

    experts: int
    top_k: int
    expert_bytes: int | None = None
    pieces: int | None = None


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass.

    Args:
        phase: "prefill" or "decode".
        chosen: layer → expert ids ``[tokens, top_k]``, first token first, in the router's order.
            A last layer may have fewer rows than the others: only those of the output.
        session: conversation that it belongs to, counted from 0.
    """

    phase: str
    chosen: Mapping[int, np.ndarray]
    session: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return max((len(ids) for ids in self.chosen.values()), default=0)


@dataclass(frozen=True, eq=False)
class Trace:
    """A whole trace.

    Args:
        passes: in the order in which they ran.
        layers: layer number → what is known of it; layers without experts are absent.
        model: name of the traced model, or "".
        notes: sentences for the user about what was left out.
    """

    passes: tuple[Pass, ...]
    layers: dict[int, LayerInfo]
    model: str = ""
    notes: tuple[str, ...] = field(default=())

    def tokens(self, phase: str | None = None) -> int:
        """Tokens of ``phase``, or of both."""
        return sum(p.tokens for p in self.passes if phase in (None, p.phase))

    @property
    def sessions(self) -> int:
        """Number of conversations."""
        return len({p.session for p in self.passes})

    def rows(self, layer: int, phase: str | None = None) -> np.ndarray:
        """All choices of ``layer``, ``[tokens, top_k]``, in order.

        Passes whose rows are wider or narrower than the layer's top_k are left out.
        """
        width = self.layers[layer].top_k
        parts = [
            ids
            for p in self.passes
            if phase in (None, p.phase)
            and (ids := p.chosen.get(layer)) is not None
            and ids.shape[1] == width
        ]
        return np.concatenate(parts) if parts else np.zeros((0, width), np.int32)

    def need_decoded(self, path: str | Path | None = None) -> None:
        """Refuse a trace in which nothing was decoded, for what is said of decoding.

        Raises:
            TraceError: when there is no decoded token.
        """
        if not self.tokens(DECODE):
            raise TraceError(
                "the trace has no decoded token",
                path=path,
                hint="record one while the model answers",
            )

    def check_model(
        self,
        experts: Mapping[int, int],
        path: str | Path | None = None,
        *,
        than: str = "",
        top_k: Mapping[int, int] | None = None,
    ) -> None:
        """Refuse when the trace is not of a model with these layers.

        Args:
            experts: layer number → experts, of the model.
            path: of the trace, for the error; or of what gave ``experts``.
            than: what the error says of it then, as " than this profile".
            top_k: layer number → experts a token, of the layers that the trace must have, all of
                them; None asks nothing of it (a profile says only what it knows).

        Raises:
            TraceError: naming the first layer that differs.
        """
        for layer, info in self.layers.items():
            if layer not in experts:
                raise TraceError(
                    f"the trace is of another model{than}: it has a layer {layer} with experts, "
                    "the other has none there",
                    path=path,
                )
            if info.experts != experts[layer]:
                raise TraceError(
                    f"the trace is of another model{than}: layer {layer} has another number of "
                    "experts",
                    path=path,
                    expected=experts[layer],
                    found=info.experts,
                )
        for layer, width in sorted((top_k or {}).items()):
            if layer not in self.layers:
                raise TraceError(
                    f"the trace lacks layer {layer}, which has experts in the model{than}",
                    path=path,
                    hint="record all layers of this model, or give the model that was traced",
                )
            if self.layers[layer].top_k != width:
                raise TraceError(
                    f"the trace is of another model{than}: layer {layer} chose another number of "
                    "experts a token",
                    path=path,
                    expected=width,
                    found=self.layers[layer].top_k,
                )

    def part(self, passes: Iterable[Pass]) -> Trace:
        """The same trace with only ``passes``."""
        return Trace(tuple(passes), self.layers, self.model, self.notes)


def make_trace(
    passes: Iterable[Pass],
    layers: Mapping[int, LayerInfo],
    *,
    model: str = "",
    notes: Iterable[str] = (),
    path: str | Path | None = None,
) -> Trace:
    """Check ``passes`` against ``layers`` and make a trace of them.

    All that is known of the layers is checked too: it comes from files.

    Warm-up passes (every expert chosen, in a trace that otherwise chooses fewer) are left out.

    Raises:
        TraceError: when there is no pass, an expert id is out of range, or a layer's numbers have
            no meaning.
    """
    for layer, info in layers.items():
        _check_info(layer, info, path)
    kept, warm_up = [], 0
    for p in passes:
        if not p.chosen or not p.tokens:
            continue
        if any(
            ids.shape[1] >= layers[layer].experts > layers[layer].top_k
            for layer, ids in p.chosen.items()
        ):
            warm_up += 1
            continue
        for layer, ids in p.chosen.items():
            if ids.size and (ids.min() < 0 or ids.max() >= layers[layer].experts):
                raise TraceError(
                    f"layer {layer} chose an expert that it does not have",
                    path=path,
                    expected=f"0 to {layers[layer].experts - 1}",
                    found=int(ids.max() if ids.max() >= layers[layer].experts else ids.min()),
                )
        kept.append(p)
    if not kept:
        raise TraceError("the trace holds no complete pass", path=path)
    notes = [*notes]
    if warm_up:
        notes.append(f"{warm_up} warm-up passes that chose every expert were left out")
    return Trace(tuple(kept), dict(sorted(layers.items())), model, tuple(notes))


def _check_info(layer: int, info: LayerInfo, path: str | Path | None) -> None:
    """Refuse numbers without meaning, and such as no memory would hold tables for."""
    limits = {
        "experts": (info.experts, EXPERTS_MAX),
        "top_k": (info.top_k, info.experts),
        "expert_bytes": (info.expert_bytes, EXPERT_BYTES_MAX),
        "pieces": (info.pieces, PIECES_MAX),
    }
    for name, (value, most) in limits.items():
        if value is not None and (type(value) is not int or not 0 < value <= most):
            raise TraceError(
                f"the {name} of layer {layer} have no meaning",
                path=path,
                expected=f"1 to {most}",
                found=value,
            )


def read_trace(path: str | Path, *, experts: int | None = None, decode_tokens: int = 1) -> Trace:
    """Read a trace of any format that is known, told apart by how it begins.

    Args:
        path: our own format, MBLT v1 of the patched llama.cpp, or route CSV; the latter two may
            be packed with gzip or xz.
        experts: experts a layer; needed for nothing that states it.
        decode_tokens: sequences decoded at a time. MBLT names no phase, so a pass of at most so
            many tokens counts as decoding, and a longer one as prefill.

    Raises:
        TraceError: when the file is none of these, damaged or empty.
        ReadError: when it cannot be read.
    """
    from mbolt_mlx.profile import mblt, route_csv, trace_file

    data = _unpacked(files.read_whole(path, limit=_SIZE_MAX), path)
    if not data:
        raise TraceError("the trace is empty", path=path)
    if trace_file.is_ours(data):
        return trace_file.decode(data, path)
    if mblt.is_mblt(data):
        return mblt.decode(data, path, decode_tokens=decode_tokens)
    if route_csv.is_route_csv(data):
        return route_csv.decode(data, path, experts=experts)
    raise TraceError(
        "not a routing trace",
        path=path,
        hint="known are the files of --trace, MBLT v1 of the patched llama.cpp, and route CSV",
    )


def _unpacked(data: bytes, path: str | Path) -> bytes:
    """``data`` without gzip or xz around it."""
    if not data.startswith((_GZIP, _XZ)):
        return data
    packed, parts, whole = data.startswith(_GZIP), [], True
    while data and whole:  # files that were packed one by one and put together are one file
        unpacker = zlib.decompressobj(wbits=31) if packed else lzma.LZMADecompressor()
        try:
            parts.append(unpacker.decompress(data, _SIZE_MAX))
        except (zlib.error, lzma.LZMAError) as error:
            raise TraceError(f"the file cannot be unpacked: {error}", path=path) from error
        data, whole = unpacker.unused_data.lstrip(b"\0"), unpacker.eof
    return b"".join(parts)
