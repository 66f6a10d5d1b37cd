"""Rows shared out between streams: how many, and the same bits."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mbolt_mlx.engine import lanes
from tests.engine.kit import assert_same, ids, load, prefill_then_decode


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of cores that are found."""

    def choose(count):
        monkeypatch.setattr(lanes, "_cores", lambda: count)
        lanes._others.cache_clear()

    yield choose
    lanes._others.cache_clear()


def test_no_more_streams_than_cores_rows_and_work(cores, monkeypatch):
    cores(4)
    monkeypatch.setattr(lanes, "LEAST_BYTES", 1000)
    assert lanes.shares(100, 500) == 4
    assert lanes.shares(3, 1000) == 3
    assert lanes.shares(4, 500) == 2
    assert lanes.shares(1, 10**9) == 1
    assert lanes.shares(8, 10) == 1
    cores(1)
    assert lanes.shares(100, 10**6) == 1
    cores(64)
    assert lanes.shares(100, 10**6) == 8


def test_parts_cover_everything_once():
    for count, parts in ((8, 1), (8, 3), (5, 5), (2400, 7)):
        found = lanes.bounds(count, parts)
        assert [n for a, b in found for n in range(a, b)] == list(range(count))
        assert max(b - a for a, b in found) - min(b - a for a, b in found) <= 1


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("resident", [0.25, 1.0])
@pytest.mark.parametrize("shape", [(1, 40), (3, 7)])
def test_the_number_of_streams_changes_no_bit(
    make, stock_logits, cores, monkeypatch, count, resident, shape
):
    path = make(experts=16, top_k=4)
    used = set()
    monkeypatch.setattr(lanes, "side_by_side", _noting(used))
    monkeypatch.setattr("mbolt_mlx.engine.rows.side_by_side", _noting(used))
    cores(count)
    got = prefill_then_decode(load(path, resident=resident), ids(*shape), 4)
    assert_same(got, stock_logits(path, *shape, 4))
    assert max(used, default=1) == min(count, 5)


def _noting(used, real=lanes.side_by_side):
    def side_by_side(jobs):
        used.add(len(jobs))
        return real(jobs)

    return side_by_side


def test_on_a_gpu_there_is_one_stream(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert lanes.shares(1000, 10**9) == 1
