"""Buffers in huge pages: what the kernel says it gave."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mbolt_mlx.core import huge_pages, reads

MIB = 1 << 20
asks = pytest.mark.skipif(
    not 0 < huge_pages.huge_size() <= 8 * MIB, reason="no huge pages for those who ask"
)


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds ``address``."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if "-" in first and ":" not in first:
                start, end = (int(part, 16) for part in first.split("-"))
                inside = start <= address < end
            elif inside and first == "AnonHugePages:":
                return int(line.split()[1]) << 10
    raise AssertionError(f"{address:#x} is in no mapping")


@asks
def test_a_buffer_comes_in_huge_pages():
    buffer = np.frombuffer(reads.aligned_buffer(16 * MIB), np.uint8)
    buffer[:] = 1
    assert huge_bytes(buffer.ctypes.data + 8 * MIB) >= 8 * MIB


@asks
def test_buffers_like_slots_come_in_small_pages():
    (one,) = reads.slot_buffers(1, 16 * MIB)
    buffer = np.frombuffer(one, np.uint8)
    buffer[:] = 1
    assert huge_bytes(buffer.ctypes.data + 8 * MIB) == 0


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A folder that is read in place of the system's settings."""
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    huge_pages.huge_size.cache_clear()
    yield tmp_path
    huge_pages.huge_size.cache_clear()


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_nothing_is_done_where_nobody_needs_to_ask(setting, settings):
    if setting is not None:
        (settings / "enabled").write_text(setting)
        (settings / "hpage_pmd_size").write_text("2097152")
    assert huge_pages.huge_size() == 0
    reads.aligned_buffer(8 * MIB)[:] = bytes(8 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
@pytest.mark.parametrize("size", ["0", "garbage", ""])
def test_odd_settings_are_no_huge_pages(size, settings):
    (settings / "enabled").write_text("always [madvise] never")
    (settings / "hpage_pmd_size").write_text(size)
    assert huge_pages.huge_size() == 0
