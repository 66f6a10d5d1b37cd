"""Limits of control groups, read from made-up files."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mbolt_mlx.core import memory

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Returns a function that sets what ``/proc/self/cgroup`` says; groups are under tmp_path."""
    proc = tmp_path / "proc-self-cgroup"
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(memory, "_CGROUP", root)

    class Rerouted(type(Path())):
        def __new__(cls, *args):
            if args == ("/proc/self/cgroup",):
                return Path(proc)
            return Path(*args)

    monkeypatch.setattr(memory, "Path", Rerouted)

    def say(text: str) -> Path:
        proc.write_text(text)
        return root

    return say


def v2(folder: Path, limit: str, current: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {cached}\nkernel 3\n")


def test_no_control_group_is_no_limit(groups):
    assert memory._group() == (None, 0)
    groups("0::/\n")
    assert memory._group() == (None, 0)
    assert memory.total_memory() == psutil.virtual_memory().total


def test_version_2(groups):
    root = groups("0::/app.slice/run.scope\n")
    v2(root / "app.slice/run.scope", str(2 * GIB), GIB, GIB // 4)
    assert memory._group() == (2 * GIB, GIB * 3 // 4)
    assert memory.total_memory() == min(2 * GIB, psutil.virtual_memory().total)
    assert memory.available_memory() <= 2 * GIB - GIB * 3 // 4


def test_version_2_in_a_container_sees_only_the_root(groups):
    root = groups("0::/../../app.slice/run.scope\n")
    v2(root, str(3 * GIB), GIB, 0)
    assert memory._group() == (3 * GIB, GIB)


def test_version_2_without_a_limit(groups):
    root = groups("0::/x\n")
    v2(root / "x", "max", GIB, 0)
    assert memory._group() == (None, 0)


def test_a_group_further_up_limits_too(groups):
    root = groups("0::/a/b/c\n")
    v2(root / "a/b/c", "max", GIB, 0)
    v2(root / "a/b", str(8 * GIB), 2 * GIB, GIB)
    v2(root / "a", str(4 * GIB), 3 * GIB, GIB)
    assert memory._group() == (4 * GIB, 2 * GIB)


def test_version_1(groups):
    root = groups("12:cpu,cpuacct:/x\n5:memory:/docker/abc\n1:name=systemd:/x\n0::/x\n")
    folder = root / "memory" / "docker/abc"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
    (folder / "memory.stat").write_text(f"cache 5\ntotal_cache {GIB // 8}\n")
    assert memory._group() == (GIB, GIB // 2 - GIB // 8)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory._group() == (None, 0)


@pytest.mark.parametrize("broken", ["memory.max", "memory.current", "memory.stat"])
def test_a_file_that_cannot_be_read_is_no_limit(groups, broken):
    root = groups("0::/x\n")
    v2(root / "x", str(GIB), GIB // 2, 0)
    (root / "x" / broken).write_text("what is this\n")
    limit, used = memory._group()
    assert limit in (None, GIB) and used >= 0


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", "1:2\n", "0::\n"])
def test_an_odd_list_of_groups_is_no_limit(groups, text):
    groups(text)
    assert memory._group() == (None, 0)


def test_the_process_knows_its_size():
    rss = memory.process_rss()
    assert 1 << 20 < rss < memory.total_memory()
    block = bytearray(os.urandom(64)) * (1 << 20)
    assert memory.process_rss() - rss > len(block) // 2
    assert memory.available_memory() >= 0


_LARGE_BLOCKS = """
import ctypes, sys
from mbolt_mlx.core import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Info
if sys.argv[1] == "ours":
    memory.return_large_blocks()
libc.free(libc.malloc(16 << 20))
before = libc.mallinfo2().hblkhd
libc.malloc(8 << 20)
print(libc.mallinfo2().hblkhd - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or newer")
@pytest.mark.parametrize(
    ("whose", "environment", "apart"),
    [
        ("ours", {}, True),
        ("theirs", {}, False),
        ("ours", {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, False),
    ],
)
def test_large_blocks_are_of_their_own(whose, environment, apart):
    """A block that is mapped for itself goes back to the system when it is freed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _LARGE_BLOCKS, whose]
    done = subprocess.run(command, capture_output=True, text=True, env=clean | environment)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) >= 8 << 20) == apart
