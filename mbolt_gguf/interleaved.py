"""What the metadata of an interleaved file says of the blocks in ``blk.N.ffn_ilv_exps.weight``.

The tensor is I8 of shape [stride, experts]. Every block holds ``mbolt.ilv.pieces`` (u32) pieces
with the roles ``mbolt.ilv.role`` (strings, one a piece). ``mbolt.ilv.type``, ``.ne0``, ``.ne1``
(u32) and ``.offset`` (u64, from the start of the block) have one entry a piece and layer, layer
by layer; ``mbolt.layers`` (i32) says which layers where they are not the MoE layers in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mbolt_gguf.header import Tensor
from mbolt_gguf.model import Model
from mbolt_gguf.types import I8, nbytes_of
from mbolt_mlx.core.errors import GgufError

BLOB_STEM = "ffn_ilv_exps"
PIECE_ROLES = ("up", "gate", "gate_up", "down")
KEY_LAYERS = "mbolt.layers"
KEY_INTERLEAVED = "mbolt.interleaved"
KEY_PIECES, KEY_ROLE = "mbolt.ilv.pieces", "mbolt.ilv.role"
KEY_TYPE, KEY_NE0, KEY_NE1 = "mbolt.ilv.type", "mbolt.ilv.ne0", "mbolt.ilv.ne1"
KEY_OFFSET = "mbolt.ilv.offset"
PIECE_ALIGN = 32


def blob_name(layer: int) -> str:
    """The name of the tensor that holds the interleaved experts of ``layer``."""
    return f"blk.{layer}.{BLOB_STEM}.weight"


@dataclass(frozen=True, slots=True)
class IlvPiece:
    """One piece of every block of a layer: ``start`` counts from the block's first byte, ``shape``
    is (ne0, ne1)."""

    role: str
    type: int
    shape: tuple[int, int]
    start: int
    nbytes: int


@dataclass(frozen=True)
class PieceTable:
    """The pieces of every interleaved layer, as the metadata gives them."""

    model: Model
    roles: tuple[str, ...]
    rows: dict[int, tuple[tuple[int, int, int, int], ...]]

    @classmethod
    def read(cls, model: Model, layers: Sequence[int]) -> PieceTable | None:
        """The table of the interleaved ``layers``; None where there are none.

        Raises:
            GgufError: when a key is absent or as long as it cannot be.
        """
        if not layers:
            return None

        def wrong(key: str, **more: Any) -> GgufError:
            return GgufError(f"{key} does not fit the interleaved experts", path=model.path, **more)

        named = model.get(KEY_LAYERS)
        if named is not None and (not isinstance(named, list) or not set(layers) <= set(named)):
            raise wrong(KEY_LAYERS, expected=list(layers), found=named)
        order = list(layers) if named is None else named
        count = model.get(KEY_PIECES)
        roles = model.get(KEY_ROLE)
        if type(count) is not int or not 2 <= count <= 3:
            raise wrong(KEY_PIECES, expected="2 or 3", found=count)
        if not isinstance(roles, list) or len(roles) not in (count, count * len(order)):
            raise wrong(KEY_ROLE, expected=f"{count} strings", found=roles)
        if roles != roles[:count] * (len(roles) // count) or len(set(roles[:count])) != count:
            raise wrong(KEY_ROLE, expected="the same in every layer", found=roles)
        if not set(roles) <= set(PIECE_ROLES):
            raise wrong(KEY_ROLE, expected=f"some of {', '.join(PIECE_ROLES)}", found=roles)
        columns = []
        for key in (KEY_TYPE, KEY_NE0, KEY_NE1, KEY_OFFSET):
            column = model.get(key)
            if (
                not isinstance(column, list)
                or len(column) != count * len(order)
                or not all(type(n) is int and n >= 0 for n in column)
            ):
                raise wrong(key, expected=f"{count * len(order)} numbers")
            columns.append(column)
        cells = list(zip(*columns, strict=True))
        rows = {n: tuple(cells[i * count : (i + 1) * count]) for i, n in enumerate(order)}
        return cls(model, tuple(roles[:count]), rows)

    def pieces(self, layer: int, blob: Tensor) -> tuple[IlvPiece, ...]:
        """The pieces in the blocks of ``blob``, the tensor of ``layer``, by their place.

        Raises:
            GgufError: when they overlap, begin at an odd place or leave the block.
        """

        def wrong(message: str, **more: Any) -> GgufError:
            path = self.model.file_of(blob)
            return GgufError(message, path=path, tensor=blob.name, **more)

        if blob.type != I8 or len(blob.shape) != 2:
            raise wrong("not I8 of two dimensions", found=list(blob.shape))
        found = []
        for role, (kind, ne0, ne1, start) in zip(self.roles, self.rows[layer], strict=True):
            nbytes = nbytes_of(kind, (ne0, ne1), path=self.model.file_of(blob), tensor=blob.name)
            found.append(IlvPiece(role, kind, (ne0, ne1), start, nbytes))
        found.sort(key=lambda piece: piece.start)
        end = 0
        for piece in found:
            if piece.start < end or piece.start % PIECE_ALIGN or not piece.nbytes:
                raise wrong(
                    f"the piece {piece.role} overlaps another or begins at an odd place",
                    found=f"byte {piece.start} of the block",
                )
            end = piece.start + piece.nbytes
        if end > blob.shape[0]:
            raise wrong("its pieces are longer than a block", expected=blob.shape[0], found=end)
        return tuple(found)
