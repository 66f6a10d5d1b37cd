"""What a figure was measured on: processor, memory, system, versions, limits and drives."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SYS = Path("/sys")
_PACKAGES = ("mbolt-mlx", "mlx", "mlx-lm", "numpy", "mlx-vlm")
# The kernel writes "no limit" in version 1 as the largest multiple of a page.
_NO_LIMIT = 1 << 62


def describe(paths: Iterable[str | os.PathLike[str]] = ()) -> dict[str, Any]:
    """The machine, and the drive of each of ``paths`` (the model, the side-file).

    What cannot be known is None. Bytes throughout, unless a key says KiB.
    """
    drives = {os.fspath(p): drive(p) for p in paths}
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "memory_available_bytes": _meminfo("MemAvailable:"),
        "swap_bytes": _meminfo("SwapTotal:"),
        "load_average": list(os.getloadavg()),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "mlx_device": mlx_device(),
        "preload": os.environ.get("LD_PRELOAD") or os.environ.get("DYLD_INSERT_LIBRARIES"),
        "limits": limits(),
        "drives": drives,
    }


def cpu_name() -> str | None:
    """The processor's name as the system gives it."""
    try:
        for line in (PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    return platform.processor() or None


def memory_bytes() -> int | None:
    """The machine's memory, whatever limit this process is under."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def versions() -> dict[str, str]:
    """The versions of the packages that matter, of those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def mlx_device() -> str | None:
    """The device MLX runs on by default, or None without MLX."""
    try:
        import mlx.core as mx
    except ImportError:
        return None
    return str(mx.default_device())


def limits(group_root: Path | None = None) -> dict[str, Any]:
    """The kernel's limits on this process: memory in bytes, reads of each drive a second.

    Reads control groups of version 1 and 2 and takes the tightest on the way to the root.
    """
    root = group_root or SYS / "fs/cgroup"
    memory: int | None = None
    reads: dict[str, dict[str, int]] = {}
    for controllers, path in _groups():
        if controllers == {""}:
            kinds = [(root, "memory.max", "io.max"), (root / "unified", "memory.max", "io.max")]
        elif "memory" in controllers:
            kinds = [(root / "memory", "memory.limit_in_bytes", None)]
        elif "blkio" in controllers:
            kinds = [(root / "blkio", None, "blkio.throttle")]
        else:
            continue
        for base, memory_file, io_file in kinds:
            for group in _upwards(base, path):
                if memory_file:
                    value = _number(group / memory_file)
                    if value is not None and value < _NO_LIMIT:
                        memory = value if memory is None else min(memory, value)
                if io_file:
                    _add_reads(reads, group, io_file)
    return {"memory_bytes": memory, "reads": reads}


def _groups() -> list[tuple[set[str], str]]:
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines]
    return [(set(p[1].split(",")), p[2]) for p in parts if len(p) == 3]


def _upwards(base: Path, path: str) -> Iterable[Path]:
    group = base / path.lstrip("/")
    while True:
        if group.is_dir():
            yield group
        if group == base or base not in group.parents:
            return
        group = group.parent


def _add_reads(reads: dict[str, dict[str, int]], group: Path, kind: str) -> None:
    def tighten(device: str, name: str, value: str) -> None:
        if value.isdigit():
            entry = reads.setdefault(device, {})
            entry[name] = min(entry.get(name, int(value)), int(value))

    if kind == "io.max":
        for line in _lines(group / kind):
            device, *pairs = line.split()
            for pair in pairs:
                key, _, value = pair.partition("=")
                if key == "rbps":
                    tighten(device, "bytes_per_s", value)
                elif key == "riops":
                    tighten(device, "reads_per_s", value)
        return
    for file, name in (("read_bps_device", "bytes_per_s"), ("read_iops_device", "reads_per_s")):
        for line in _lines(group / f"{kind}.{file}"):
            device, _, value = line.partition(" ")
            tighten(device, name, value.strip())


def drive(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The drive and file system of ``path``; an absent path stands for its nearest parent."""
    place = Path(path).resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    stat = os.statvfs(place)
    mount = mount_of(place)
    out: dict[str, Any] = {
        "mount": mount.get("mount"),
        "file_system": mount.get("type"),
        "options": mount.get("options"),
        "source": mount.get("source"),
        "size_bytes": stat.f_frsize * stat.f_blocks,
        "free_bytes": stat.f_frsize * stat.f_bavail,
    }
    block = block_device(os.stat(place).st_dev, mount.get("source"))
    if block is not None:
        queue = block / "queue"
        scheduler = _text(queue / "scheduler")
        out.update(
            device=block.name,
            number=_text(block / "dev"),
            model=_text(block / "device/model"),
            device_bytes=(_number(block / "size") or 0) * 512,
            rotational=_text(queue / "rotational") == "1",
            readahead_kib=_number(queue / "read_ahead_kb"),
            scheduler=_chosen(scheduler),
            largest_read_kib=_number(queue / "max_sectors_kb"),
            queue_depth=_number(queue / "nr_requests"),
        )
    return out


def mount_of(path: Path) -> dict[str, str]:
    """Mount point, type, source and options of the file system of ``path``, where known."""
    best: dict[str, str] = {}
    for line in _lines(PROC / "self/mountinfo"):
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 6 or len(after) < 2:
            continue
        mount = before[4].encode().decode("unicode_escape")
        inside = path == Path(mount) or Path(mount) in path.parents
        if inside and len(mount) >= len(best.get("mount", "")):
            best = {"mount": mount, "type": after[0], "source": after[1], "options": before[5]}
    return best


def block_device(number: int, source: str | None) -> Path | None:
    """The folder of a whole drive in /sys, from a device number or a name such as /dev/sda1."""
    candidates = [f"{os.major(number)}:{os.minor(number)}"]
    if source and source.startswith("/dev/"):
        try:
            rdev = os.stat(source).st_rdev
            candidates.append(f"{os.major(rdev)}:{os.minor(rdev)}")
        except OSError:
            pass
    for name in candidates:
        link = SYS / "dev/block" / name
        if link.exists():
            block = link.resolve()
            return block.parent if (block / "partition").exists() else block
    return None


def _chosen(scheduler: str | None) -> str | None:
    if scheduler is None or "[" not in scheduler:
        return scheduler
    return scheduler.partition("[")[2].partition("]")[0]


def _meminfo(name: str) -> int | None:
    for line in _lines(PROC / "meminfo"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _sysctl(name: str) -> str | None:
    import subprocess

    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _lines(path: Path) -> list[str]:
    text = _text(path)
    return text.splitlines() if text else []


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
