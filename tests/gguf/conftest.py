"""A writer of GGUF files byte by byte, so that any field of one can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mbolt_gguf.types import block_of
from tests.gguf.llama import llama, quick_path, user_cache

__all__ = ["llama", "quick_path", "user_cache"]  # fixtures

NUMBERS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "f64": (12, "<d"),
}  # fmt: skip
F32, F16, Q8_0, I8 = 0, 1, 8, 24


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(key, kind, what):
    """One key: ``kind`` is a number's name, "str", or either with "[]" behind it."""
    item, is_array = kind.removesuffix("[]"), kind.endswith("[]")
    number, fmt = (8, None) if item == "str" else NUMBERS[item]
    items = what if is_array else [what]
    data = b"".join(string(x) if fmt is None else struct.pack(fmt, x) for x in items)
    head = struct.pack("<IIQ", 9, number, len(items)) if is_array else struct.pack("<I", number)
    return string(key) + head + data


def size_of(kind, shape):
    elements, nbytes = block_of(kind)
    count = 1
    for n in shape:
        count *= n
    return count // elements * nbytes


def encode(
    values=(),
    tensors=(),
    *,
    magic=b"GGUF",
    version=3,
    alignment=32,
    counts=None,
    offsets=None,
    last_padding=True,
    more=b"",
):
    """A whole file.

    Args:
        values: encoded keys.
        tensors: (name, type, shape) or (name, type, shape, data).
        counts: (tensors, keys), instead of the true ones.
        offsets: name → offset to write, instead of the true one.
        last_padding: whether the last tensor is padded too.
        more: bytes at the end.
    """
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values))))
    head += b"".join(values)
    data = b""
    for name, kind, shape, *given in tensors:
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", n) for n in shape)
        head += struct.pack("<IQ", kind, (offsets or {}).get(name, len(data)))
        content = given[0] if given else bytes(size_of(kind, shape))
        end = len(data) + len(content)
        data += content + bytes(-len(content) % alignment)
    head += bytes(-len(head) % alignment)
    return head + (data if last_padding or not tensors else data[:end]) + more


def moe_values(arch="test", *, experts=4, top_k=2, layers=2, more=()):
    return [
        value("general.architecture", "str", arch),
        value(f"{arch}.block_count", "u32", layers),
        value(f"{arch}.expert_count", "u32", experts),
        value(f"{arch}.expert_used_count", "u32", top_k),
        *more,
    ]


def moe_block(layer, *, experts=4, width=32, hidden=64, kind=F32, roles=("gate", "up", "down")):
    """The tensors of one layer's experts and their router."""
    shapes = {
        "gate": (width, hidden, experts), "up": (width, hidden, experts),
        "gate_up": (width, 2 * hidden, experts), "down": (hidden, width, experts),
    }  # fmt: skip
    return [
        (f"blk.{layer}.attn_q.weight", F32, (width, experts)),
        (f"blk.{layer}.ffn_gate_inp.weight", F32, (width, experts)),
        *((f"blk.{layer}.ffn_{role}_exps.weight", kind, shapes[role]) for role in roles),
    ]


@pytest.fixture
def write(tmp_path):
    """Write a file of `encode`'s arguments and return its path."""

    def write(*args, name="model.gguf", **more) -> Path:
        path = tmp_path / name
        path.write_bytes(encode(*args, **more))
        return path

    return write
