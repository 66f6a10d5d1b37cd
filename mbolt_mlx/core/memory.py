"""How much memory this process uses and may use, in bytes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# glibc's malloc.h; what its users set by environment is theirs.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_KEPT_BYTES = 1 << 20


def process_rss() -> int:
    """Resident bytes of this process now."""
    return psutil.Process().memory_info().rss


def trim() -> None:
    """Hand freed memory that the C library still holds back to the system (glibc only)."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def return_large_blocks() -> None:
    """Have the C library hand every large freed block back to the system at once (glibc only).

    Left alone it learns from the first large block that is freed to keep later ones of that size,
    up to 32 MiB each: in a long prompt that is 25 MB more at the peak.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None and not any(name in os.environ for name in _ENVIRONMENT):
        change(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        change(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def total_memory() -> int:
    """Memory that this process may use in all: the machine's, or its control group's if less."""
    total = psutil.virtual_memory().total
    limit, _ = _group()
    return min(total, limit) if limit is not None else total


def available_memory() -> int:
    """Memory that can still be had without swapping; page cache counts as available."""
    free = psutil.virtual_memory().available
    limit, used = _group()
    return free if limit is None else max(0, min(free, limit - used))


def _group() -> tuple[int | None, int]:
    """(limit, bytes in use without page cache) of this process's control group, v1 or v2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, 0
    tightest: int | None = None
    used = 0
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, name = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):
            root, names = (
                _CGROUP / "memory",
                (
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_cache",
                ),
            )
        else:
            continue
        own = root / name.lstrip("/")
        # Every group further up limits as well.
        for folder in [own, *(up for up in own.parents if up.is_relative_to(root))]:
            limit, in_use = _read_group(folder, *names)
            if limit is not None and (tightest is None or limit < tightest):
                tightest, used = limit, in_use
    return tightest, used


def _read_group(folder: Path, limit: str, usage: str, cache: str) -> tuple[int | None, int]:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= 1 << 60:
            return None, 0
        stat = dict(
            line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines()
        )
        return int(text), int((folder / usage).read_text()) - int(stat.get(cache, 0))
    except (OSError, ValueError):
        return None, 0
