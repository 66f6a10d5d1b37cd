"""What the system says about this process: bytes from the drive, processor time, memory."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True)
class Counters:
    """One reading. Bytes, and seconds; ``drive_read_bytes`` is None where nothing counts it."""

    time_s: float
    cpu_s: float
    drive_read_bytes: int | None

    @classmethod
    def read(cls) -> Counters:
        """The counters now, of all threads together."""
        return cls(time.perf_counter(), time.process_time(), drive_read_bytes())

    def since(self, before: Counters) -> Counters:
        """What was added since ``before``."""
        drive = None
        if self.drive_read_bytes is not None and before.drive_read_bytes is not None:
            drive = self.drive_read_bytes - before.drive_read_bytes
        return Counters(self.time_s - before.time_s, self.cpu_s - before.cpu_s, drive)


def drive_read_bytes() -> int | None:
    """Bytes that this process had the drive read (Linux; None elsewhere).

    Reads served by the page cache are not in it, which is what proves a cold run.
    """
    try:
        return _field(PROC / "io", "read_bytes:")
    except OSError:
        return None


def rss_bytes() -> int | None:
    """Resident memory now (Linux; None elsewhere)."""
    return _status("VmRSS:")


def peak_rss_bytes() -> int:
    """The high-water mark of resident memory.

    From VmHWM on Linux. From getrusage elsewhere, which counts bytes on macOS (not tried there).
    """
    peak = _status("VmHWM:")
    if peak is not None:
        return peak
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def reset_peak_rss() -> bool:
    """Start the high-water mark again from what is resident now; False where that cannot be."""
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    try:
        kilobytes = _field(PROC / "status", name)
    except OSError:
        return None
    return None if kilobytes is None else kilobytes * 1024


def _field(path: Path, name: str) -> int | None:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return None
