"""ILV v1, written: all pieces of an expert in one block, so that an expert is one read.

A layer gets one tensor ``blk.N.ffn_ilv_exps.weight``, I8, ne = [stride, experts], in the place of
its ``ffn_up_exps``, ``ffn_gate_exps`` and ``ffn_down_exps`` (or ``ffn_gate_up_exps`` and
``ffn_down_exps``). The block at p·stride holds the pieces of the expert at position p, in the order
of their use, each from a multiple of 32 on. A stride is a multiple of 4096 where that makes a block
less than 3 % longer, else of 32. Expert biases and scales stay tensors of their own. interleaved.py
describes the keys of the metadata, and reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_gguf import interleaved as keys
from mbolt_gguf import metadata
from mbolt_gguf.experts import Slices
from mbolt_gguf.types import I8
from mbolt_mlx.core.errors import UnsupportedError

PAGE = 4096
PAGE_COST = 0.03


@dataclass(frozen=True, slots=True)
class Block:
    """How the ``pieces`` of a layer lie in each of its blocks; ``starts`` are their first bytes."""

    layer: int
    experts: int
    pieces: tuple[Slices, ...]
    starts: tuple[int, ...]
    stride: int

    @property
    def info(self) -> metadata.Info:
        """What the header says of the layer's tensor."""
        shape = (self.stride, self.experts)
        return metadata.Info(keys.blob_name(self.layer), I8, shape, self.stride * self.experts)


def plan_block(layer: int, experts: int, pieces: Sequence[Slices]) -> Block:
    """Where ``pieces``, in this order, lie in the blocks of ``layer``."""
    starts, position = [], 0
    for piece in pieces:
        starts.append(position)
        position += -(-piece.nbytes // keys.PIECE_ALIGN) * keys.PIECE_ALIGN
    pages = -(-position // PAGE) * PAGE
    stride = pages if pages - position < PAGE_COST * position else position
    return Block(layer, experts, tuple(pieces), tuple(starts), stride)


def encode_blocks(blocks: Sequence[Block], path: Path) -> list[bytes]:
    """The encoded metadata that says how to read ``blocks``; ``path`` is for the error.

    Raises:
        UnsupportedError: when the layers differ in what an expert consists of.
    """
    roles = [piece.role for piece in blocks[0].pieces]
    for block in blocks:
        found = [piece.role for piece in block.pieces]
        if found != roles:
            raise UnsupportedError(
                "cannot interleave a model whose layers differ in what an expert consists of",
                path=path, tensor=block.pieces[0].name,
                expected=", ".join(roles), found=", ".join(found),
            )  # fmt: skip

    def each(of: Any) -> Iterator[int]:
        return (of(piece) for block in blocks for piece in block.pieces)

    starts: Iterable[int] = (start for block in blocks for start in block.starts)
    return [
        metadata.flag(keys.KEY_INTERLEAVED, True),
        metadata.number(keys.KEY_PIECES, len(roles)),
        metadata.texts(keys.KEY_ROLE, roles),
        metadata.u64s(keys.KEY_OFFSET, starts),
        metadata.numbers(keys.KEY_TYPE, each(lambda piece: piece.type)),
        metadata.numbers(keys.KEY_NE0, each(lambda piece: piece.shape[0])),
        metadata.numbers(keys.KEY_NE1, each(lambda piece: piece.shape[1])),
    ]
