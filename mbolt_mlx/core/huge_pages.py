"""Buffers in huge pages, which a direct read or write passes with less work. Linux only.

A direct read hands the drive the place of every page of its target: 2,048 of them for 8 MiB in
pages of 4 KiB, four in huge ones. Linux gives huge pages to all who can use them, to none, or to
those who ask: only the last needs this module. (Linux, admin-guide/mm/transhuge; madvise(2).)

Slots do not ask: MLX has touched their small pages before anybody could, and to exchange those
for huge ones can take longer than a whole answer gains by it.
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


@functools.cache
def huge_size() -> int:
    """Bytes of a huge page where the system gives them to those who ask; otherwise 0."""
    try:
        if "[madvise]" not in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def ask(memory: mmap.mmap) -> None:
    """Have ``memory``, which nobody has touched yet, come in huge pages where they fit."""
    if 0 < huge_size() <= len(memory):
        memory.madvise(mmap.MADV_HUGEPAGE)
