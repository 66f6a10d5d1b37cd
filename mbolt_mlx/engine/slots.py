"""Preallocated MLX arrays for a layer's resident experts, and windows to read into them.

Each piece of an expert (gate weight, gate scales, …) has one contiguous array ``[slots, …]``,
shaped like the stock stacked tensor. A numpy window onto the same memory lets a read put an
expert's bytes in place: no copy, no allocation for a miss.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mbolt_mlx.core.reads import JUNK, Request
from mbolt_mlx.storage.experts import Piece
from mbolt_mlx.storage.store import LayerStore, Run

log = logging.getLogger(__name__)

MLX_DTYPES: dict[str, mx.Dtype] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U8": mx.uint8,
    "I8": mx.int8,
}
_HALVES = ("F16", "BF16")
DTYPE_NAMES: dict[mx.Dtype, str] = {dtype: name for name, dtype in MLX_DTYPES.items()}

_aliasing: bool | None = None


def windows_alias() -> bool:
    """Whether a write through a numpy window reaches the MLX array; found out once."""
    global _aliasing
    if _aliasing is None:
        raw = mx.zeros((4 * mmap.PAGESIZE,), dtype=mx.uint8)
        mx.eval(raw)
        window = np.array(raw, copy=False)
        typed = raw[1024:2048].view(mx.uint32)
        mx.eval(typed)
        pattern = np.arange(7, 263, dtype=np.uint32)
        window[1024:2048] = pattern.view(np.uint8)
        _aliasing = bool(np.array_equal(np.array(typed), pattern))
        if not _aliasing:
            log.warning("MLX arrays cannot be written in place here; each miss is copied once more")
    return _aliasing


def widens(piece: Piece) -> bool:
    """Whether ``piece`` takes twice its bytes where 16-bit numbers are kept as float32."""
    return piece.dtype in _HALVES


class _Pool:
    """One piece of a layer: ``array`` for MLX, ``window`` ``[slots, nbytes]`` for the reads.

    With ``widen``, 16-bit numbers are read into the second half of their slot and then spread over
    all of it as float32.
    """

    def __init__(self, piece: Piece, slots: int, widen: bool) -> None:
        self.aliased = windows_alias()
        self.half = piece.dtype if widen and widens(piece) else None
        self.shape = (slots, *piece.shape)
        self.dtype = mx.float32 if self.half else MLX_DTYPES[piece.dtype]
        row = piece.nbytes * (2 if self.half else 1)
        size = slots * row
        if self.aliased:
            raw = mx.zeros((size + mmap.PAGESIZE,), dtype=mx.uint8)
            mx.eval(raw)
            window = np.array(raw, copy=False)
            # Direct reads want aligned memory; MLX's CPU allocator promises none.
            skip = -window.ctypes.data % mmap.PAGESIZE
            self.array = raw[skip : skip + size].view(self.dtype).reshape(self.shape)
            mx.eval(self.array)
            self.rows = window[skip : skip + size].reshape(slots, row)
        else:
            self.rows = np.zeros((slots, row), dtype=np.uint8)
            self.array = mx.zeros(self.shape, dtype=self.dtype)
            mx.eval(self.array)
        self.window = self.rows[:, row - piece.nbytes :]

    def landed(self, slots: list[int]) -> None:
        """Make of what was read into ``slots`` what MLX shall see."""
        if self.half:
            for slot in slots:
                read = self.window[slot].copy()
                if self.half == "BF16":
                    np.left_shift(
                        read.view(np.uint16),
                        16,
                        dtype=np.uint32,
                        out=self.rows[slot].view(np.uint32),
                    )
                else:
                    self.rows[slot].view(np.float32)[:] = read.view(np.float16)
        if not self.aliased:
            self.copy_in(slots)

    def copy_in(self, slots: list[int]) -> None:
        """Copy the rows of ``slots`` into the array, where they are not the same memory."""
        rows = mx.array(self.rows[slots]).view(self.dtype).reshape(-1, *self.shape[1:])
        self.array[mx.array(slots)] = rows
        mx.eval(self.array)


class LayerSlots:
    """The slots of one layer.

    Args:
        store: where the layer's experts lie.
        slots: how many are kept in memory.
        widen: keep 16-bit numbers as float32.
    """

    def __init__(self, store: LayerStore, slots: int, *, widen: bool = False) -> None:
        self.store = store
        self.count = slots
        self._widen = widen
        self._pools = [_Pool(piece, slots, widen) for piece in store.pieces]
        self._targets: list[list[list[memoryview] | None]] = []
        self._views: list[list[memoryview]] = []
        self.index_windows()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.rows.nbytes for pool in self._pools)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Piece name → array ``[slots, …]``."""
        pieces = self.store.pieces
        return {piece.name: pool.array for piece, pool in zip(pieces, self._pools, strict=True)}

    @property
    def aliased(self) -> bool:
        """Whether a read lands in the MLX arrays without a further copy."""
        return all(pool.aliased and not pool.half for pool in self._pools)

    def requests(
        self, fds: Sequence[int], experts: Sequence[int], slots: Sequence[int], *, align: int
    ) -> list[Request]:
        """The reads that bring ``experts`` into ``slots``, not merged yet.

        Args:
            fds: open files, in the store's order.
            experts, slots: what to read, and where to.
            align: bytes to which direct reads are aligned; 0 where reads are not direct.
        """
        out = []
        for number, run in enumerate(self.store.runs):
            bounce = bool(align and self._align[number] % align)
            for expert, slot in zip(experts, slots, strict=True):
                targets = self._targets[number][slot] or self._aim(number, slot)
                offset = run.offsets[expert]
                out.append(
                    Request(
                        fds[run.files[expert]],
                        offset,
                        targets,
                        run.nbytes,
                        (expert,),
                        bounce or bool(align and offset % align),
                    )
                )
        return out

    def landed(self, slots: list[int]) -> None:
        """Bring what was read into the MLX arrays, where it is not there already."""
        for pool in self._pools:
            pool.landed(slots)

    def shrink(self, slots: int, moves: Sequence[tuple[int, int]]) -> None:
        """Reallocate with fewer slots, a piece at a time; ``moves`` are (old, new) slots kept."""
        self._targets, self._views = [], []
        self.count = slots
        for number, piece in enumerate(self.store.pieces):
            old, new = self._pools[number], _Pool(piece, slots, self._widen)
            for source, target in moves:
                new.rows[target] = old.rows[source]
            if not new.aliased:
                new.copy_in(list(range(slots)))
            self._pools[number] = new
            del old
        self.index_windows()

    def index_windows(self) -> None:
        """Look up where each piece of each slot lies in memory."""
        self._views = [[memoryview(row) for row in pool.window] for pool in self._pools]
        self._targets = [[None] * self.count for _ in self.store.runs]
        self._align = [self._aligned_to(run) for run in self.store.runs]

    def _aligned_to(self, run: Run) -> int:
        """The bytes to which all of a run's pieces are aligned, in the file and in the slots.

        A direct read that is satisfied with it can fill the slots themselves.
        """
        sizes = [self.store.pieces[p].nbytes for p in run.pieces]
        return math.gcd(mmap.PAGESIZE, *sizes, *run.starts)

    def _aim(self, number: int, slot: int) -> list[memoryview]:
        run = self.store.runs[number]
        targets: list[memoryview] = []
        position = 0
        for piece, start in zip(run.pieces, run.starts, strict=True):
            if start > position:
                targets += JUNK.buffers(start - position)
            targets.append(self._views[piece][slot])
            position = start + len(self._views[piece][slot])
        self._targets[number][slot] = targets
        return targets
