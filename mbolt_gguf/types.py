"""The types of GGUF tensors and of metadata values, with their sizes.

Numbers and block sizes are those of ``enum ggml_type`` and of the block structs in llama.cpp's
ggml.h and ggml-common.h. gguf-py has the same table but for two rows: it lacks Q2_0, and gives
Q8_1 (which no file holds) 40 bytes instead of 36.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mbolt_mlx.core.errors import GgufError

# type id: (name, elements a block, bytes a block)
_BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82),
    18: ("IQ3_XXS", 256, 98), 21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50),
    29: ("IQ1_M", 256, 56), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

I8 = 24

STRING, ARRAY = 8, 9
# Metadata value type: its numpy type, little-endian; strings and arrays have no fixed size.
VALUE_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
U16, U32, I32, BOOL, U64 = 2, 4, 5, 7, 10

_SIZE_MAX = 1 << 63


def block_of(type_id: int) -> tuple[int, int]:
    """Elements and bytes of one block of the tensor type ``type_id``.

    Raises:
        GgufError: when there is no such type.
    """
    if type_id not in _BLOCKS:
        raise GgufError("unknown tensor type", found=type_id)
    return _BLOCKS[type_id][1:]


def type_name(type_id: int) -> str:
    """The name of the tensor type ``type_id``, as llama.cpp writes it in capitals.

    Raises:
        GgufError: when there is no such type.
    """
    block_of(type_id)
    return _BLOCKS[type_id][0]


def known_types() -> dict[int, str]:
    """All tensor types by their number."""
    return {number: row[0] for number, row in _BLOCKS.items()}


def nbytes_of(
    type_id: int,
    shape: Sequence[int],
    *,
    path: str | Path | None = None,
    tensor: str | None = None,
    offset: int | None = None,
) -> int:
    """Bytes of a tensor of ``type_id`` and ``shape`` (ggml's order: ne0, the row, first).

    ``path``, ``tensor`` and ``offset`` are for the errors.

    Raises:
        GgufError: when the type is unknown, a row is not a whole number of blocks, or the size
            does not fit in 63 bits.
    """
    if type_id not in _BLOCKS:
        raise GgufError(
            "unknown tensor type",
            path=path, tensor=tensor, offset=offset, found=type_id,
            hint="a newer llama.cpp may have made this file",
        )  # fmt: skip
    name, elements, size = _BLOCKS[type_id]
    count = math.prod(shape)
    if any(not 0 <= n < _SIZE_MAX for n in shape) or max(count, count // elements * size) >= (
        _SIZE_MAX
    ):
        raise GgufError(
            "the shape holds more than any file",
            path=path, tensor=tensor, offset=offset, found=list(shape),
        )  # fmt: skip
    row = shape[0] if shape else 1
    if row % elements:
        raise GgufError(
            f"a row is not a whole number of {name} blocks",
            path=path, tensor=tensor, offset=offset,
            expected=f"a multiple of {elements}", found=row,
        )  # fmt: skip
    return count // elements * size
