"""Origins against numpy: what an origin says lies somewhere is what numpy finds there."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from mbolt_mlx.storage.checkpoint import Tensor
from mbolt_mlx.storage.origin import Origin

DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BYTES = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()


def whole(shape, itemsize, offset=64, shard=3):
    """A tensor at a byte of the file: its origin and its values."""
    nbytes = prod(shape) * itemsize
    values = np.frombuffer(BYTES, DTYPES[itemsize], prod(shape), offset).reshape(shape)
    return Origin.of(Tensor("t", shard, "U8", tuple(shape), offset, nbytes), itemsize), values


def check(origin, values):
    assert origin.shape == values.shape and origin.itemsize == values.itemsize
    rows = origin.rows()
    if rows is None:
        return False
    assert len(rows) == values.shape[0]
    for (shard, offset), row in zip(rows, values, strict=True):
        assert shard == 3
        wanted = np.ascontiguousarray(row).tobytes()
        assert BYTES[offset : offset + len(wanted)] == wanted
    return True


def cut(rng, origin, values):
    axis = rng.randrange(values.ndim)
    start = rng.randrange(values.shape[axis])
    stop = rng.randint(start + 1, values.shape[axis])
    step = rng.choice([1, 1, 2])
    key = (slice(None),) * axis + (slice(start, stop, step),)
    return origin.cut(axis, start, stop, step), values[key]


def transpose(rng, origin, values):
    order = list(range(values.ndim))
    rng.shuffle(order)
    return origin.transpose(order), values.transpose(order)


def reshape(rng, origin, values):
    shape = list(values.shape)
    axis = rng.randrange(len(shape))
    way = rng.randrange(4)
    if way == 0 and axis + 1 < len(shape):
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    elif way == 1 and shape[axis] % 2 == 0:
        shape[axis : axis + 1] = [2, shape[axis] // 2]
    elif way == 2:
        shape.insert(axis, 1)
    elif shape[axis] == 1 and len(shape) > 1:
        del shape[axis]
    return origin.reshape(shape), values.reshape(shape)


def view(rng, origin, values):
    itemsize = rng.choice(list(DTYPES))
    if values.shape[-1] * values.itemsize % itemsize:
        return origin, values
    return origin.view(itemsize), np.ascontiguousarray(values).view(DTYPES[itemsize])


def join(rng, origin, values):
    shape = (rng.randint(1, 3), *values.shape[1:])
    other, more = whole(shape, values.itemsize, offset=rng.randrange(0, 64) * 4)
    both = [(origin, values), (other, more)]
    rng.shuffle(both)
    return Origin.join([o for o, _ in both]), np.concatenate([v for _, v in both])


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(seed):
    rng = random.Random(seed)
    ranges = 0
    for _ in range(50):
        shape = [rng.choice([1, 2, 4, 6, 8]) for _ in range(rng.randint(2, 4))]
        origin, values = whole(shape, rng.choice(list(DTYPES)))
        for _ in range(rng.randint(1, 5)):
            origin, values = rng.choice([cut, transpose, reshape, view, join])(rng, origin, values)
            if origin is None:
                break  # only a copy has this, so nothing is claimed
            ranges += check(origin, values)
    assert ranges > 20


def test_what_a_sanitize_does_to_ranges_stays_ranges():
    fused, values = whole((4, 12, 8), 2)
    gate, up = fused.cut(1, 0, 6, 1), fused.cut(1, 6, 12, 1)
    assert check(gate, values[:, :6]) and check(up, values[:, 6:])
    blocks, values = whole((4, 6, 2, 16), 1)
    assert check(blocks.view(4).reshape((4, 6, 8)), values.view(np.uint32).reshape(4, 6, 8))
    single = [whole((6, 8), 2, offset=100 * 4 * i) for i in range(4)]
    stacked = Origin.join([o.reshape((1, 6, 8)) for o, _ in single])
    assert check(stacked, np.stack([v for _, v in single]))
    assert check(stacked.cut(0, 1, 3, 1), np.stack([v for _, v in single])[1:3])


def test_what_is_no_range_is_not_claimed_to_be():
    origin, _ = whole((4, 12, 8), 2)
    assert origin.transpose([0, 2, 1]).rows() is None
    assert origin.cut(1, 0, 12, 2).rows() is None
    assert origin.cut(2, 0, 4, 1).rows() is None
    assert origin.transpose([0, 2, 1]).reshape((4, 96)) is None
    assert origin.cut(2, 0, 3, 1).view(4) is None


def test_elements_of_another_size_have_no_origin():
    assert Origin.of(Tensor("t", 0, "F64", (4, 8), 0, 256), 4) is None
