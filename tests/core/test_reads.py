"""Merging, scattering, bounced and parallel reads, against the plain bytes of the file."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mbolt_mlx.core import files, reads
from mbolt_mlx.core.errors import ReadError
from mbolt_mlx.core.reads import MERGE_GAP, MERGE_MAX, Batch, Reader, Request, merge


def request(fd: int, offset: int, *sizes: int, tag: int = 0, bounce: bool = False) -> Request:
    buffers = [memoryview(bytearray(b"\xee" * n)) for n in sizes]
    return Request(fd, offset, buffers, sum(sizes), (tag,), bounce)


def content(one: Request) -> bytes:
    return b"".join(bytes(b) for b in one.buffers)


@pytest.fixture
def file(tmp_path):
    """(path, bytes): 300,001 random bytes, so that the file ends off every boundary."""
    data = np.random.default_rng(0).integers(0, 256, 300_001, dtype=np.uint8).tobytes()
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    return path, data


@pytest.fixture
def opened(file):
    fd = files.open_read(file[0])
    yield fd
    os.close(fd)


@pytest.fixture
def reader(file, opened):
    reader = Reader(3, {opened: str(file[0])})
    yield reader
    reader.close()


def read_all(reader: Reader, requests: list[Request]) -> list[Request]:
    batch = Batch()
    reader.start(requests, batch)
    done = []
    while batch.left:
        done += batch.take()
    return done


# --- merging


def test_neighbours_become_one_call():
    a, b, c = request(5, 100, 10, 20, tag=1), request(5, 130, 5, tag=2), request(5, 135, 7, tag=3)
    (one,) = merge([c, a, b])
    assert (one.fd, one.offset, one.nbytes, one.tags) == (5, 100, 42, (1, 2, 3))
    assert one.buffers == a.buffers + b.buffers + c.buffers


def test_a_small_gap_is_read_over_and_a_large_one_is_not():
    a, b = request(5, 0, 10, tag=1), request(5, 10 + MERGE_GAP, 10, tag=2)
    (one,) = merge([a, b])
    assert one.nbytes == 20 + MERGE_GAP == sum(map(len, one.buffers))
    assert one.buffers[0] is a.buffers[0] and one.buffers[-1] is b.buffers[0]
    assert len(merge([a, request(5, 11 + MERGE_GAP, 10)])) == 2


def test_other_files_and_overlaps_stay_apart():
    assert len(merge([request(5, 0, 10), request(6, 10, 10)])) == 2
    assert len(merge([request(5, 0, 10), request(5, 9, 10)])) == 2
    assert len(merge([request(5, 0, 10), request(5, 0, 10)])) == 2
    assert merge([]) == []


def test_a_merged_call_keeps_to_its_bytes():
    size = MERGE_MAX // 3
    buffer = memoryview(bytearray(size))
    many = [Request(5, n * size, [buffer], size, (n,)) for n in range(7)]
    merged = merge(many)
    assert [m.tags for m in merged] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert all(m.nbytes <= MERGE_MAX for m in merged)


def test_a_merged_call_keeps_to_the_systems_number_of_buffers():
    many = [request(5, n * 900, *[1] * 100, tag=n) for n in range(40)]
    merged = merge(many)
    assert all(len(m.buffers) <= files.IOV_MAX for m in merged)
    assert [t for m in merged for t in m.tags] == list(range(40))
    assert len(merged) == 4


def test_a_single_request_beyond_the_limits_is_left_alone():
    one = request(5, 0, *[1] * (files.IOV_MAX + 5))
    assert merge([one, request(5, files.IOV_MAX + 5, 1)])[0] is one


@pytest.mark.parametrize("seed", range(8))
def test_merged_reads_bring_every_byte_where_it_is_wanted(file, opened, reader, seed, monkeypatch):
    _, data = file
    pick = random.Random(seed)
    monkeypatch.setattr(reads, "MERGE_GAP", pick.choice([0, 100, 4096, MERGE_GAP]))
    monkeypatch.setattr(reads, "MERGE_MAX", pick.choice([1000, 20_000, MERGE_MAX]))
    requests, position = [], 0
    while position < len(data) - 5000 and len(requests) < 60:
        position += pick.choice([0, 0, 0, 1, 99, 100, 101, 4000, 4096])
        sizes = [pick.choice([1, 7, 512, 700]) for _ in range(pick.randint(1, 4))]
        requests.append(
            request(opened, position, *sizes, tag=len(requests), bounce=pick.random() < 0.3)
        )
        position += sum(sizes)
    pick.shuffle(requests)
    merged = merge(requests)
    assert sorted(t for m in merged for t in m.tags) == list(range(len(requests)))
    done = read_all(reader, merged)
    assert len(done) == len(merged)
    for one in requests:
        assert content(one) == data[one.offset : one.offset + one.nbytes]


# --- bounced reads


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_a_direct_read_may_begin_and_end_anywhere(file, direct, size):
    _, data = file
    bounce = reads.aligned_buffer(4096)
    for offset in [*range(0, 1030, 37), 511, 512, 513, 4095, 4096, 4097]:
        one = request(direct, offset, *([size] if size < 3 else [1, size - 2, 1]))
        reads._read_bounced(one, bounce)
        assert content(one) == data[offset : offset + size], offset


def test_a_direct_read_may_end_with_the_file(file, direct):
    _, data = file
    bounce = reads.aligned_buffer(4096)
    for size in [1, 2, 400, 512, 513, 1024, 5000, 20_000]:
        one = request(direct, len(data) - size, size)
        reads._read_bounced(one, bounce)
        assert content(one) == data[-size:]


@pytest.mark.parametrize("beyond", [1, 511, 512, 5000])
def test_a_direct_read_past_the_end_is_an_error_that_names_the_file(file, direct, beyond):
    path, data = file
    reader = Reader(1, {direct: str(path)})
    try:
        with pytest.raises(ReadError) as caught:
            read_all(reader, [request(direct, len(data) - 100, 100 + beyond, bounce=True)])
        assert str(caught.value).startswith(f"{path}: byte ")
        assert "ends too early" in str(caught.value)
    finally:
        reader.close()


def test_a_bounced_read_that_comes_back_short_goes_on(file, direct, monkeypatch):
    _, data = file
    real = os.preadv
    pick = random.Random(1)

    def short(fd, buffers, offset):
        got = real(fd, buffers, offset)
        return min(got, max(1, 512 * pick.randint(4, 24) + pick.randint(-3, 3)))

    monkeypatch.setattr(files.os, "preadv", short)
    one = request(direct, 1234, 7000, 3, 9000)
    reads._read_bounced(one, reads.aligned_buffer(16384))
    assert content(one) == data[1234 : 1234 + 16_003]


# --- batches


def test_requests_come_back_as_they_finish_and_each_once(file, opened, reader):
    _, data = file
    requests = [request(opened, 100 * n, 50, tag=n) for n in range(200)]
    batch = Batch()
    reader.start(requests[:150], batch)
    first = batch.take(20)
    assert len(first) >= 20
    reader.start(requests[150:], batch)
    rest = []
    while batch.left:
        rest += batch.take(7)
    assert sorted(r.tags[0] for r in first + rest) == list(range(200))
    assert all(content(r) == data[r.offset : r.offset + 50] for r in requests)
    assert batch.take() == []


def test_a_reader_serves_several_batches_and_threads_at_once(file, opened, reader):
    _, data = file
    wrong = []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(20):
            wanted = [
                request(opened, pick.randrange(250_000), pick.randint(1, 3000)) for _ in range(10)
            ]
            for one in read_all(reader, wanted):
                if content(one) != data[one.offset : one.offset + one.nbytes]:
                    wrong.append(one)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Faulty:
    """``os.preadv`` that fails at some offsets, for a while or for good, and may be slow."""

    def __init__(self, monkeypatch, at: set[int], times: int, number: int = errno.EIO):
        self.left = {offset: times for offset in at}
        self.number = number
        self.slow: set[int] = set()
        self.ended: list[int] = []
        self.real = os.preadv
        monkeypatch.setattr(files.os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        if self.left.get(offset, 0) > 0:
            self.left[offset] -= 1
            raise OSError(self.number, os.strerror(self.number))
        if offset in self.slow:
            time.sleep(0.1)
        got = self.real(fd, buffers, offset)
        self.ended.append(offset)
        return got


@pytest.mark.parametrize("bounce", [False, True])
def test_a_read_that_fails_once_is_fine(file, opened, reader, monkeypatch, bounce):
    _, data = file
    Faulty(monkeypatch, {4096, 20480}, times=1)
    requests = [request(opened, 4096 * n, 1000, bounce=bounce) for n in range(10)]
    read_all(reader, requests)
    assert all(content(r) == data[r.offset : r.offset + 1000] for r in requests)


@pytest.mark.parametrize("bounce", [False, True])
def test_a_read_that_fails_for_good_lets_the_others_end_and_names_file_and_byte(
    file, opened, reader, monkeypatch, bounce
):
    path, data = file
    drive = Faulty(monkeypatch, {0}, times=1000)
    requests = [request(opened, 4096 * n, 1000, tag=n, bounce=bounce) for n in range(30)]
    drive.slow = {4096 * 28, 4096 * 29}
    batch = Batch()
    reader.start(requests, batch)
    with pytest.raises(ReadError) as caught:
        while batch.left:
            batch.take()
    assert str(caught.value) == f"{path}: byte 0: read failed: Input/output error"
    # No thread writes any more: every other read has ended, or will never begin.
    assert batch.left == 0
    ended = set(drive.ended)
    before = [content(r) for r in requests]
    time.sleep(0.15)
    assert set(drive.ended) == ended and [content(r) for r in requests] == before
    for r in requests[1:]:
        wanted = data[r.offset : r.offset + 1000] if r.offset in ended else b"\xee" * 1000
        assert content(r) == wanted
    # And the threads are still there for the next batch.
    monkeypatch.undo()
    again = request(opened, 0, 1000, bounce=bounce)
    read_all(reader, [again])
    assert content(again) == data[:1000]


def test_what_is_not_about_the_drive_reaches_the_caller_too(file, opened, reader):
    one = Request(opened, 0, [memoryview(b"read-only buffer")], 16, (0,))
    with pytest.raises((TypeError, BufferError)):
        read_all(reader, [one])
    read_all(reader, [request(opened, 0, 10)])


def test_after_drain_nothing_is_written_and_what_had_not_begun_never_is(
    file, opened, reader, monkeypatch
):
    drive = Faulty(monkeypatch, set(), times=0)
    drive.slow = {1024 * n for n in range(12)}
    batch = Batch()
    requests = [request(opened, 1024 * n, 10) for n in range(12)]
    reader.start(requests, batch)
    time.sleep(0.02)
    batch.drain()
    ended = list(drive.ended)
    assert 1 <= len(ended) <= 3 and batch.left == 0 and batch.take() == []
    before = [content(r) for r in requests]
    read_all(reader, [request(opened, 100_000, 10)])
    assert [content(r) for r in requests] == before
    assert len(drive.ended) == len(ended) + 1


def test_an_interrupt_while_the_caller_reads_too_does_not_hold_up_drain(file, opened, monkeypatch):
    """At each line that runs in turn; threads sleep meanwhile, so that the caller reads all."""
    monkeypatch.setattr(Reader, "_start_threads", lambda reader: None)
    line = 0
    while True:
        line, left = line + 1, [line]

        def trace(frame, event, argument, left=left):
            if "mbolt_mlx/core" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return trace

        reader, batch = Reader(1), Batch()
        requests = [request(opened, 4096 * n, 100) for n in range(3)]
        reader.start(requests, batch)
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            reader.help(batch)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        draining = threading.Thread(target=batch.drain, daemon=True)
        draining.start()
        draining.join(5)
        assert not draining.is_alive(), f"after an interrupt at line {line}"
        if left[0] > 0:
            break
    assert line > 20


def test_the_caller_leaves_other_batches_to_the_threads(file, opened, monkeypatch):
    monkeypatch.setattr(Reader, "_start_threads", lambda reader: None)
    reader, mine, other = Reader(1), Batch(), Batch()
    reader.start([request(opened, 0, 100)], other)
    reader.start([request(opened, 100, 100)], mine)
    reader.help(mine)
    assert (mine.left, other.left) == (1, 1) and not other._done
    reader.help(mine)
    assert len(mine.take()) == 1


def reading_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("mbolt-read")}


def wait_until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_threads_start_with_the_first_read_and_end_on_close(file, opened):
    before = reading_threads()
    reader = Reader(4)
    assert not reading_threads() - before
    read_all(reader, [request(opened, 0, 10)])
    mine = reading_threads() - before
    assert len(mine) == 4
    reader.close()
    assert wait_until(lambda: not any(t.is_alive() for t in mine))
    reader.close()


def test_close_finishes_what_was_started(file, opened):
    _, data = file
    reader = Reader(2)
    batch = Batch()
    requests = [request(opened, 1000 * n, 1000) for n in range(100)]
    reader.start(requests, batch)
    reader.close()
    while batch.left:
        batch.take()
    assert all(content(r) == data[r.offset : r.offset + 1000] for r in requests)


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_reading_opens_nothing(file, opened, reader):
    before = len(os.listdir("/proc/self/fd"))
    read_all(reader, [request(opened, n, 10) for n in range(100)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_aligned_buffers_are_aligned():
    for size in (0, 1, 4096, 5000):
        buffer = np.frombuffer(reads.aligned_buffer(size), np.uint8)
        assert buffer.ctypes.data % 4096 == 0 and len(buffer) >= max(1, size)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 1 << 20])
def test_slot_buffers_are_aligned_and_apart(nbytes):
    buffers = reads.slot_buffers(3, nbytes)
    assert [len(b) for b in buffers] == [nbytes] * 3
    for number, buffer in enumerate(buffers):
        assert np.frombuffer(buffer, np.uint8).ctypes.data % 4096 == 0
        buffer[:] = bytes([number + 1]) * nbytes
    assert [set(b) for b in buffers] == [{1}, {2}, {3}]


@pytest.mark.parametrize("path", ["data.bin"])
def test_a_file_cut_while_reading(file, opened, reader, path):
    where: Path = file[0]
    os.truncate(where, 1000)
    with pytest.raises(ReadError, match=f"{where.name}: byte 1000: the file ends too early"):
        read_all(reader, [request(opened, 900, 200)])
