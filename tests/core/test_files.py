"""The room that calls the system: what it opens, and reads that end early, fail or are huge."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError


def make(path: Path, size: int) -> bytes:
    data = bytes((i * 7 + i // 251) % 256 for i in range(size))
    path.write_bytes(data)
    return data


@pytest.fixture
def some(tmp_path):
    """(path, bytes, descriptor) of a small file."""
    path = tmp_path / "some.bin"
    data = make(path, 10_000)
    fd = files.open_read(path)
    yield path, data, fd
    os.close(fd)


class Drive:
    """Stands in for ``os.preadv``: each call takes the next fault, then the real thing."""

    def __init__(self, monkeypatch, *faults):
        self.faults = list(faults)
        self.calls = []
        self.real = os.preadv
        monkeypatch.setattr(files.os, "preadv", self)
        monkeypatch.setattr(files.time, "sleep", lambda seconds: None)

    def __call__(self, fd, buffers, offset):
        self.calls.append((offset, sum(map(len, buffers))))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, OSError):
            raise fault
        if isinstance(fault, int):
            short, left = [], fault
            for buffer in buffers:
                short.append(memoryview(buffer)[:left])
                left -= len(short[-1])
            return self.real(fd, short, offset) if fault else 0
        return self.real(fd, buffers, offset)


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# --- opening


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", ["absent", "dangling", "folder", "fifo", "socket", "device"])
def test_what_is_not_a_file_is_refused_by_name_and_at_once(tmp_path, kind, direct, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("thing")
    if kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/null")
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(ReadError) as caught:
        files.open_read(path, direct=direct)
    assert str(caught.value).startswith("thing: ") and "\n" not in str(caught.value)
    if kind in ("folder", "fifo"):
        assert "not a regular file" in str(caught.value)
    if kind in ("absent", "dangling"):
        assert "No such file" in str(caught.value)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before
    if kind == "socket":
        server.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = tmp_path / "closed"
    make(path, 10)
    path.chmod(0)
    with pytest.raises(ReadError, match="Permission denied"):
        files.open_read(path)


def test_a_refused_open_is_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "some"
    make(path, 10)

    def refuse(*args):
        raise failure(errno.EACCES)

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(ReadError, match="some: cannot open: Permission denied"):
        files.open_read(path)


def test_a_symlink_to_a_file_is_that_file(tmp_path):
    data = make(tmp_path / "blob", 100)
    (tmp_path / "name").symlink_to("blob")
    assert files.read_whole(tmp_path / "name", limit=1000) == data


def test_descriptors_block_and_are_not_inherited(some):
    _, _, fd = some
    assert os.get_blocking(fd) and not os.get_inheritable(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT")
def test_a_file_system_without_direct_reads_says_so(tmp_path, monkeypatch):
    path = tmp_path / "some"
    make(path, 4096)
    real = os.open

    def no_direct(name, flags, *rest):
        if flags & os.O_DIRECT:
            raise failure(errno.EINVAL)
        return real(name, flags, *rest)

    monkeypatch.setattr(files.os, "open", no_direct)
    with pytest.raises(ReadError, match="some: the file system has no direct reads"):
        files.open_read(path, direct=True)
    os.close(files.open_read(path))


def test_read_whole_keeps_to_its_limit(tmp_path):
    data = make(tmp_path / "a", 100)
    assert files.read_whole(tmp_path / "a", limit=100) == data
    with pytest.raises(ReadError, match="too large; expected at most 99, found 100"):
        files.read_whole(tmp_path / "a", limit=99)
    make(tmp_path / "empty", 0)
    assert files.read_whole(tmp_path / "empty", limit=0) == b""


# --- reading


def test_a_read_fills_its_buffers_in_order(some):
    _, data, fd = some
    parts = [bytearray(n) for n in (1, 0, 4000, 17, 982)]
    files.pread_into(fd, [memoryview(p) for p in parts], 33)
    assert b"".join(parts) == data[33:5033]


def test_buffers_of_other_types_count_in_bytes(some):
    _, data, fd = some
    buffer = bytearray(800)
    files.pread_into(fd, [memoryview(buffer).cast("Q")], 8)
    assert bytes(buffer) == data[8:808]


def test_more_buffers_than_one_call_takes(some):
    _, data, fd = some
    parts = [bytearray(2) for _ in range(2 * files.IOV_MAX + 3)]
    files.pread_into(fd, [memoryview(p) for p in parts], 5)
    assert b"".join(parts) == data[5 : 5 + 2 * len(parts)]


def test_more_bytes_than_one_call_takes(some, monkeypatch):
    _, data, fd = some
    drive = Drive(monkeypatch)
    monkeypatch.setattr(files, "READ_MAX", 1000)
    parts = [bytearray(n) for n in (300, 2500, 900, 1)]
    files.pread_into(fd, [memoryview(p) for p in parts], 7)
    assert b"".join(parts) == data[7 : 7 + 3701]
    assert max(size for _, size in drive.calls) <= 1000
    assert len(drive.calls) == 4


@pytest.mark.parametrize("short", [[1], [4096, 1, 3], [999, 1000, 1001], [0 + 3999]])
def test_short_reads_are_continued(some, monkeypatch, short):
    _, data, fd = some
    drive = Drive(monkeypatch, *short)
    parts = [bytearray(n) for n in (1000, 2000, 5000)]
    files.pread_into(fd, [memoryview(p) for p in parts], 100)
    assert b"".join(parts) == data[100:8100]
    assert len(drive.calls) >= len(short)


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN, errno.ETIMEDOUT])
def test_a_drive_that_fails_once_is_asked_again(some, monkeypatch, number):
    _, data, fd = some
    Drive(monkeypatch, failure(number), failure(number), 10)
    buffer = bytearray(500)
    files.pread_into(fd, [memoryview(buffer)], 0)
    assert bytes(buffer) == data[:500]
    Drive(monkeypatch, failure(number), 400)
    assert files.pread_some(fd, memoryview(buffer), 100, need=300) == 400
    assert bytes(buffer[:400]) == data[100:500]


def test_a_drive_that_fails_for_good_is_named_with_the_byte(some, monkeypatch):
    path, _, fd = some
    drive = Drive(monkeypatch, failure(errno.EIO), 100, *[failure(errno.EIO)] * 50)
    with pytest.raises(ReadError) as caught:
        files.pread_into(fd, [memoryview(bytearray(500))], 1000, path=str(path))
    assert str(caught.value) == f"{path}: byte 1100: read failed: Input/output error"
    assert len(drive.calls) < 10
    with pytest.raises(ReadError, match="byte 7: read failed"):
        files.pread_some(fd, memoryview(bytearray(500)), 7, need=1)


def test_what_will_not_get_better_is_not_tried_again(some, monkeypatch):
    _, _, fd = some
    drive = Drive(monkeypatch, *[failure(errno.EBADF)] * 5)
    with pytest.raises(ReadError, match="Bad file descriptor"):
        files.pread_into(fd, [memoryview(bytearray(500))], 0)
    assert len(drive.calls) == 1


def test_signals_do_not_cut_a_read_short(tmp_path):
    """A handler that runs during a read that waits: Python starts the call again."""
    import signal
    import threading

    reader, writer = os.pipe()
    hits = []
    old = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        timer = threading.Timer(0.2, lambda: os.write(writer, b"x"))
        timer.start()
        # A pipe has no positions; what matters is that EINTR never reaches the caller.
        assert os.readv(reader, [bytearray(1)]) == 1
        assert hits
        timer.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("offset", [9_999, 10_000, 10_001, 1 << 40])
def test_past_the_end_of_the_file(some, offset):
    path, _, fd = some
    with pytest.raises(ReadError) as caught:
        files.pread_into(fd, [memoryview(bytearray(2))], offset, path=str(path))
    text = str(caught.value)
    assert text.startswith(f"{path}: byte {max(offset, min(offset + 1, 10_000))}: ")
    assert "the file ends too early" in text
    with pytest.raises(ReadError, match="ends too early"):
        files.pread_some(fd, memoryview(bytearray(2)), offset, need=2)


def test_reading_nothing_needs_no_file(some):
    _, _, fd = some
    files.pread_into(fd, [], 0)
    files.pread_into(fd, [memoryview(bytearray())], 1 << 40)


def test_a_sparse_file_beyond_32_bits(tmp_path):
    path = tmp_path / "sparse"
    far = (1 << 33) + 12_345
    with path.open("wb") as out:
        out.seek(far)
        out.write(b"there")
    fd = files.open_read(path)
    buffer = bytearray(5)
    files.pread_into(fd, [memoryview(buffer)], far)
    os.close(fd)
    assert buffer == b"there"
    assert stat.S_ISREG(os.stat(path).st_mode)
