"""Which bytes of the files an array is, through views, slices, stacks and transpositions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from mbolt_mlx.storage.checkpoint import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A strided view of one tensor of the file; ``start`` and ``strides`` are in bytes."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def cut(self, axis: int, start: int, stop: int, step: int) -> Part:
        """Indices ``start`` to ``stop`` of an axis, every ``step``-th."""
        shape, strides = list(self.shape), list(self.strides)
        shape[axis] = max(0, -(-(stop - start) // step))
        begin = self.start + start * strides[axis]
        strides[axis] *= step
        return Part(self.tensor, begin, tuple(shape), tuple(strides))

    def reshape(self, shape: tuple[int, ...], itemsize: int) -> Part | None:
        """With another shape; None where only a copy has it."""
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        new = [n for n in shape if n != 1]
        if [n for n, _ in old] == new:
            rest = iter([s for _, s in old])
            return replace(self, shape=shape, strides=tuple(0 if n == 1 else next(rest)
                                                            for n in shape))  # fmt: skip
        # Trailing axes that lie one after the other may be cut otherwise; leading ones stay.
        keep = 0
        for (n, _), m in zip(old, new, strict=False):
            if n != m or prod(new[keep + 1 :]) != prod([k for k, _ in old[keep + 1 :]]):
                break
            keep += 1
        tail = [n for n, _ in old[keep:]]
        if [s for _, s in old[keep:]] != dense(tail, itemsize):
            return None
        rest = iter([s for _, s in old[:keep]] + dense(new[keep:], itemsize))
        return replace(self, shape=shape, strides=tuple(0 if n == 1 else next(rest) for n in shape))


def dense(shape: Sequence[int], itemsize: int) -> list[int]:
    """Strides in bytes of an array whose elements lie one after the other."""
    return [itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]


@dataclass(frozen=True, slots=True)
class Origin:
    """An array that is ``parts`` one after the other along its first axis."""

    parts: tuple[Part, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor, itemsize: int) -> Origin | None:
        """A whole tensor, or None when its elements have another size in memory."""
        if prod(tensor.shape) * itemsize != tensor.nbytes:
            return None
        strides = tuple(dense(tensor.shape, itemsize))
        return cls((Part(tensor, 0, tensor.shape, strides),), itemsize)

    @classmethod
    def join(cls, origins: Sequence[Origin]) -> Origin | None:
        """Arrays joined along the first axis."""
        sizes = {o.itemsize for o in origins}
        if len(sizes) != 1 or not all(o.shape for o in origins):
            return None
        return cls(tuple(part for o in origins for part in o.parts), sizes.pop())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        first = self.parts[0].shape
        return (sum(p.shape[0] for p in self.parts), *first[1:]) if first else ()

    def matches(self, shape: Sequence[int], itemsize: int) -> bool:
        """Whether an array of ``shape`` and ``itemsize`` can be this."""
        return self.itemsize == itemsize and self.shape == tuple(shape)

    def _each(self, parts: Sequence[Part | None]) -> Origin | None:
        return None if None in parts else Origin(tuple(parts), self.itemsize)

    def cut(self, axis: int, start: int, stop: int, step: int) -> Origin | None:
        """Indices ``start`` to ``stop`` of an axis, every ``step``-th (over 0)."""
        if step < 1:
            return None
        if axis or len(self.parts) == 1:
            return self._each([p.cut(axis, start, stop, step) for p in self.parts])
        if step != 1:
            return None
        out, first = [], 0
        for part in self.parts:
            last = first + part.shape[0]
            if start < last and stop > first:
                out.append(part.cut(0, max(start - first, 0), min(stop, last) - first, 1))
            first = last
        return Origin(tuple(out), self.itemsize) if out else None

    def transpose(self, order: Sequence[int]) -> Origin | None:
        """Axes in another order."""
        if len(self.parts) > 1 and order[0] != 0:
            return None
        return self._each(
            [
                replace(
                    p,
                    shape=tuple(p.shape[i] for i in order),
                    strides=tuple(p.strides[i] for i in order),
                )
                for p in self.parts
            ]
        )

    def reshape(self, shape: Sequence[int]) -> Origin | None:
        """With another shape of as many elements; None where only a copy has it."""
        shape = tuple(shape)
        if len(self.parts) == 1:
            return self._each([self.parts[0].reshape(shape, self.itemsize)])
        if not shape or shape[0] != self.shape[0]:
            return None
        return self._each([p.reshape((p.shape[0], *shape[1:]), self.itemsize) for p in self.parts])

    def view(self, itemsize: int) -> Origin | None:
        """The same bytes as elements of another size."""
        if itemsize == self.itemsize:
            return self
        out = []
        for part in self.parts:
            if not part.shape or (part.shape[-1] != 1 and part.strides[-1] != self.itemsize):
                return None
            row = part.shape[-1] * self.itemsize
            if row % itemsize:
                return None
            out.append(
                replace(
                    part,
                    shape=(*part.shape[:-1], row // itemsize),
                    strides=(*part.strides[:-1], itemsize),
                )
            )
        return Origin(tuple(out), itemsize)

    def rows(self) -> list[tuple[int, int]] | None:
        """(shard, absolute byte) of each index of the first axis; None unless each is one range."""
        out: list[tuple[int, int]] = []
        for part in self.parts:
            old = [(n, s) for n, s in zip(part.shape[1:], part.strides[1:], strict=True) if n != 1]
            if [s for _, s in old] != dense([n for n, _ in old], self.itemsize):
                return None
            first = part.tensor.offset + part.start
            out += [(part.tensor.shard, first + i * part.strides[0]) for i in range(part.shape[0])]
        return out
