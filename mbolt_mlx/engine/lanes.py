"""Rows computed side by side on the CPU, where MLX gives each of its streams one thread.

Rows of experts do not depend on each other, so streams can share out a call's rows without
changing a bit. One stream fills a GPU, so there everything stays on the caller's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import mlx.core as mx

# Weights that a stream must have to go through before waking it pays (0.4 ms at 2.5 GB/s).
LEAST_BYTES = 1 << 20
_MOST = 8


def shares(rows: int, row_bytes: int) -> int:
    """How many streams share out ``rows`` rows, each of which goes through ``row_bytes``."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return 1
    return max(1, min(1 + len(_others()), rows, rows * row_bytes // max(1, LEAST_BYTES)))


def bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Where each of ``parts`` nearly equal parts of ``count`` begins and ends."""
    return [(count * n // parts, count * (n + 1) // parts) for n in range(parts)]


def side_by_side(jobs: Sequence[Callable[[], mx.array]]) -> list[mx.array]:
    """What each job returns, built on a stream of its own; the first on the caller's.

    Args:
        jobs: at most as many as `shares` said.
    """
    results = [jobs[0]()]
    for job, stream in zip(jobs[1:], _others()[: len(jobs) - 1], strict=True):
        with mx.stream(stream):
            results.append(job())
    return results


@functools.cache
def _others() -> tuple[mx.ThreadLocalStream, ...]:
    return tuple(mx.new_thread_local_stream(mx.cpu) for _ in range(min(_MOST, _cores()) - 1))


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
