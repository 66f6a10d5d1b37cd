"""MBLT v1, the trace of the patched llama.cpp.

Little-endian: u32 0x544C424D, u32 1, u32 n_expert; then records u32 layer, u32 k, u32 n_tokens,
i32 ids[n_tokens · k]. It has no token ids and no phases; a new pass begins when the layer number
does not increase.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mbolt_mlx.core.errors import TraceError
from mbolt_mlx.profile.traces import (
    DECODE,
    EXPERTS_MAX,
    PREFILL,
    LayerInfo,
    Pass,
    Trace,
    make_trace,
)

MAGIC = 0x544C424D
VERSION = 1
_HEADER = struct.Struct("<3I")
_RECORD = struct.Struct("<3I")
_LAYERS_MAX = 1 << 16


def is_mblt(data: bytes) -> bool:
    """Whether ``data`` begins as a file of this format does."""
    return data[:4] == MAGIC.to_bytes(4, "little")


def decode(data: bytes, path: str | Path | None = None, *, decode_tokens: int = 1) -> Trace:
    """Read an MBLT file; a record that the end of the file cuts short is left out.

    Args:
        data: the file.
        path: for the errors.
        decode_tokens: a pass of at most so many tokens counts as decoding.

    Raises:
        TraceError: when a record has no meaning, with its byte.
    """
    if len(data) < _HEADER.size:
        raise TraceError("the header is cut short", path=path, expected=f"{_HEADER.size} bytes")
    _, version, experts = _HEADER.unpack_from(data)
    if version != VERSION:
        raise TraceError("unknown version", path=path, offset=4, expected=VERSION, found=version)
    if not 0 < experts <= EXPERTS_MAX:
        raise TraceError(
            "the number of experts has no meaning",
            path=path,
            offset=8,
            expected=f"1 to {EXPERTS_MAX}",
            found=experts,
        )
    notes: list[str] = []
    records = list(_records(data, experts, path, notes))
    if not records:
        raise TraceError("the trace holds no complete record", path=path)
    widths: dict[int, Counter[int]] = {}
    for layer, ids in records:
        widths.setdefault(layer, Counter())[ids.shape[1]] += 1
    layers = {layer: LayerInfo(experts, _top_k(count, experts)) for layer, count in widths.items()}
    passes: list[dict[int, np.ndarray]] = []
    last = None
    for layer, ids in records:
        if last is None or layer <= last:
            passes.append({})
        passes[-1][layer] = ids
        last = layer
    if len(passes) > 1 and notes and len(passes[-1]) < len(layers):
        passes.pop()
    return make_trace(_with_phases(passes, decode_tokens), layers, notes=notes, path=path, model="")


def encode(trace: Trace) -> bytes:
    """``trace`` as an MBLT file; phases, sessions and sizes are lost.

    Raises:
        TraceError: when its layers have different numbers of experts.
    """
    counts = {info.experts for info in trace.layers.values()}
    if len(counts) != 1:
        raise TraceError("MBLT has one number of experts for all layers", found=sorted(counts))
    parts = [_HEADER.pack(MAGIC, VERSION, counts.pop())]
    for one in trace.passes:
        for layer, ids in sorted(one.chosen.items()):
            parts.append(_RECORD.pack(layer, ids.shape[1], ids.shape[0]))
            parts.append(np.ascontiguousarray(ids, "<i4").tobytes())
    return b"".join(parts)


def _top_k(widths: Counter[int], experts: int) -> int:
    """The width that most records have, warm-up (all experts) apart."""
    usual = [(count, width) for width, count in widths.items() if width < experts]
    return max(usual)[1] if usual else experts


def _records(
    data: bytes, experts: int, path: str | Path | None, notes: list[str]
) -> Iterator[tuple[int, np.ndarray]]:
    position = _HEADER.size
    while position < len(data):
        if position + _RECORD.size > len(data):
            notes.append("the last record is cut short and was left out")
            return
        layer, k, tokens = _RECORD.unpack_from(data, position)
        if layer >= _LAYERS_MAX or not 0 < k <= experts:
            raise TraceError(
                "a record has no meaning",
                path=path,
                offset=position,
                found=f"layer {layer}, k {k} of {experts} experts",
            )
        start = position + _RECORD.size
        end = start + 4 * k * tokens
        if end > len(data):
            notes.append("the last record is cut short and was left out")
            return
        ids = np.frombuffer(data, "<i4", k * tokens, start).reshape(tokens, k)
        if ids.size and (ids.min() < 0 or ids.max() >= experts):
            raise TraceError(
                f"layer {layer} chose an expert that it does not have",
                path=path,
                offset=start,
                expected=f"0 to {experts - 1}",
            )
        yield layer, ids
        position = end


def _with_phases(passes: list[dict[int, np.ndarray]], decode_tokens: int) -> Iterator[Pass]:
    """A prompt after decoding begins a new session; chunks of one prompt follow each other."""
    session, before = 0, PREFILL
    for number, chosen in enumerate(passes):
        tokens = max(len(ids) for ids in chosen.values())
        phase = DECODE if tokens <= decode_tokens else PREFILL
        if number and phase == PREFILL and before == DECODE:
            session += 1
        before = phase
        yield Pass(phase, chosen, session)
