"""The header of a rewritten file.

What the source says is copied byte for byte, never decoded and encoded again. Ours is added at the
end, under ``mbolt.``. Three things of the source describe the file and not the model, and follow
the file: ``split.tensors.count``, a ``general.alignment`` other than 32 (no other is ever written,
because tools that copy GGUF files pad to 32 whatever it says), and ``mbolt.*`` of an earlier
rewrite.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbolt_gguf.header import ALIGNMENT, ALIGNMENT_KEY, MAGIC, GgufFile, Value
from mbolt_gguf.types import ARRAY, BOOL, I32, STRING, U32, U64, VALUE_DTYPES

PREFIX = "mbolt."
PADDING_KEY = "mbolt.padding"
SPLIT_TENSORS = "split.tensors.count"
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Info:
    """What a header says of a tensor; ``shape`` has the row (ne0) first."""

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int


def text(key: str, value: str) -> bytes:
    """``key`` with a string, encoded."""
    return _key(key, STRING) + _string(value)


def texts(key: str, values: Sequence[str]) -> bytes:
    """``key`` with an array of strings, encoded."""
    head = _key(key, ARRAY) + struct.pack("<IQ", STRING, len(values))
    return head + b"".join(map(_string, values))


def number(key: str, value: int, type_id: int = U32) -> bytes:
    """``key`` with one number of the value type ``type_id``, encoded."""
    return _key(key, type_id) + np.array(value, VALUE_DTYPES[type_id]).tobytes()


def flag(key: str, value: bool) -> bytes:
    """``key`` with a truth value, encoded."""
    return _key(key, BOOL) + bytes([value])


def numbers(key: str, values: Iterable[int], type_id: int = U32) -> bytes:
    """``key`` with an array of numbers of the value type ``type_id``, encoded."""
    items = np.array(list(values), VALUE_DTYPES[type_id])
    return _key(key, ARRAY) + struct.pack("<IQ", type_id, len(items)) + items.tobytes()


def i32s(key: str, values: Iterable[int]) -> bytes:
    """``key`` with an array of i32, encoded."""
    return numbers(key, values, I32)


def u64s(key: str, values: Iterable[int]) -> bytes:
    """``key`` with an array of u64, encoded."""
    return numbers(key, values, U64)


def _key(key: str, type_id: int) -> bytes:
    return _string(key) + struct.pack("<I", type_id)


def _string(value: str) -> bytes:
    data = value.encode(errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def padded(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes up in a file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def kept(file: GgufFile, tensor_count: int) -> list[bytes]:
    """The encoded values that a rewrite of ``file`` takes over, in their order.

    ``tensor_count`` is the number of tensors of all files of the rewritten model.
    """
    return [_kept(value, tensor_count) for value in file.values.values() if not is_ours(value.key)]


def _kept(value: Value, tensor_count: int) -> bytes:
    if value.key == SPLIT_TENSORS and value.item is None and value.type in VALUE_DTYPES:
        return number(value.key, tensor_count, value.type)
    if value.key == ALIGNMENT_KEY:
        return number(value.key, ALIGNMENT)
    return value.encoded


def is_ours(key: str) -> bool:
    """Whether ``key`` is one that a rewrite writes anew."""
    return key.startswith(PREFIX)


def encode_header(
    version: int,
    values: Sequence[bytes],
    infos: Sequence[Info],
    *,
    page_align: str | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The header up to where the data begins, and the absolute offset of each tensor.

    Args:
        version: of GGUF.
        values: encoded keys with their values.
        infos: the tensors in the order of their data.
        page_align: the tensor that shall begin on a page of 4096 bytes. Padding goes into the
            string `PADDING_KEY`, since between tensors none is allowed.
    """
    plain = _encode(version, values, infos)
    places, before = {}, 0
    for info in infos:
        places[info.name] = before
        before += padded(info.nbytes)
    if page_align is not None and (padded(len(plain)) + places[page_align]) % PAGE:
        least = len(plain) + len(text(PADDING_KEY, ""))
        more = -(least + places[page_align]) % PAGE
        plain = _encode(version, [*values, text(PADDING_KEY, " " * more)], infos)
    start = padded(len(plain))
    head = plain + bytes(start - len(plain))
    return head, {name: start + place for name, place in places.items()}


def _encode(version: int, values: Sequence[bytes], infos: Sequence[Info]) -> bytes:
    out = [MAGIC, struct.pack("<IQQ", version, len(infos), len(values)), *values]
    position = 0
    for info in infos:
        out.append(_string(info.name))
        out.append(struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape))
        out.append(struct.pack("<IQ", info.type, position))
        position += padded(info.nbytes)
    return b"".join(out)


def differing_key(
    kept_values: Sequence[bytes], found: Mapping[str, Value]
) -> tuple[str, Any, Any] | None:
    """The first key of ``kept_values`` that ``found`` has otherwise: (key, expected, found bytes).

    ``found`` may have keys of ours besides, after those; any other is a difference too.
    """
    others = [value for key, value in found.items() if not is_ours(key)]
    for want, have in zip(kept_values, others, strict=False):
        if want != have.encoded:
            return have.key, want[:64], have.encoded[:64]
    if len(kept_values) > len(others):
        want = kept_values[len(others)]
        (length,) = struct.unpack_from("<Q", want)
        return want[8 : 8 + length].decode(errors="replace"), want[:64], "no such key"
    if len(others) > len(kept_values):
        extra = others[len(kept_values)]
        return extra.key, "no such key", extra.encoded[:64]
    return None
