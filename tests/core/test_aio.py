"""Reads through the kernel's own queue, against the plain bytes of the file."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from mbolt_mlx.core import aio, files, reads
from mbolt_mlx.core.errors import ReadError
from mbolt_mlx.core.reads import Batch, Reader, Request

PAGE = 4096
SIZE = 16 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """(path, bytes): 16 MiB at random, so that no two pages are alike."""
    data = np.random.default_rng(0).bytes(SIZE)
    path = tmp_path_factory.mktemp("aio") / "data.bin"
    path.write_bytes(data)
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return path, data


@pytest.fixture
def reader(file, direct):
    """A reader past its trial, where the system has such a queue at all."""
    try:
        aio.Queue(1)
    except OSError:
        pytest.skip("the system has no queue for reads")
    reader = Reader(3, {direct: str(file[0])}, direct=True)
    reader._trials = 0
    yield reader
    reader.close()


def request(fd: int, offset: int, *sizes: int, tag: int = 0) -> Request:
    buffers = reads.slot_buffers(len(sizes), max(sizes))
    buffers = [b[:n] for b, n in zip(buffers, sizes, strict=True)]
    return Request(fd, offset, buffers, sum(sizes), (tag,))


def some(fd: int, count: int, seed: int = 0, pages: int = 8) -> list[Request]:
    pick = random.Random(seed)
    out = []
    for n in range(count):
        sizes = [PAGE * pick.randint(1, pages) for _ in range(pick.randint(1, 3))]
        offset = PAGE * pick.randrange((SIZE - sum(sizes)) // PAGE)
        out.append(request(fd, offset, *sizes, tag=n))
    return out


def content(one: Request) -> bytes:
    return b"".join(bytes(b) for b in one.buffers)


def right(one: Request, data: bytes) -> bool:
    return content(one) == data[one.offset : one.offset + one.nbytes]


def take_all(batch: Batch, at_least: int = 1) -> list[Request]:
    done = []
    while batch.left:
        done += batch.take(at_least)
    return done


class Log:
    """What a queue is given and gives; ``answer`` may change what it says of a read."""

    def __init__(self, monkeypatch) -> None:
        self.submitted: list[int] = []
        self.most = 0
        self.answer = lambda request, result: result
        submit, wait = aio.Queue.submit, aio.Queue.wait

        def submit_logged(queue, requests):
            taken = submit(queue, requests)
            self.submitted.append(taken)
            self.most = max(self.most, queue.flying)
            return taken

        def wait_logged(queue, at_least):
            return [(r, self.answer(r, n)) for r, n in wait(queue, at_least)]

        monkeypatch.setattr(aio.Queue, "submit", submit_logged)
        monkeypatch.setattr(aio.Queue, "wait", wait_logged)


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_comes_where_it_is_wanted_and_each_request_once(
    file, direct, reader, seed, monkeypatch
):
    log, pick = Log(monkeypatch), random.Random(seed)
    requests, done, batch = some(direct, 60, seed), [], Batch()
    waiting = list(requests)
    while waiting or batch.left:
        count = pick.randint(0, 12)
        reader.start(waiting[:count], batch)
        del waiting[:count]
        done += batch.take(pick.randint(0, 9))
    assert sorted(r.tags[0] for r in done) == list(range(60))
    assert all(r.error is None and right(r, file[1]) for r in requests)
    assert sum(log.submitted) == 60 and 3 < log.most <= 6
    assert batch.take() == []


def test_a_layers_misses_take_one_call_to_start_and_one_to_wait_for(
    file, direct, reader, monkeypatch
):
    log, waits = Log(monkeypatch), []
    wait = aio.Queue.wait
    monkeypatch.setattr(aio.Queue, "wait", lambda q, n: waits.append(n) or wait(q, n))
    for seed in range(5):
        requests, batch = some(direct, 5, seed), Batch()
        reader.start(requests, batch)
        assert len(batch.take(5)) == 5
    assert log.submitted == [5] * 5 and waits == [5] * 5


def test_no_thread_starts_and_no_file_opens(file, direct, reader):
    threads, opened = threading.active_count(), os.listdir("/proc/self/fd")
    for seed in range(20):
        batch = Batch()
        reader.start(some(direct, 9, seed), batch)
        take_all(batch)
    assert threading.active_count() == threads
    assert os.listdir("/proc/self/fd") == opened
    assert len(reader._spare) == 1  # one queue for all that came after each other


def test_several_batches_and_threads_at_once(file, direct, reader):
    wrong = []

    def work(seed: int) -> None:
        first, second = Batch(), Batch()
        for n in range(10):
            one, two = some(direct, 8, seed + n), some(direct, 8, 77 * seed + n)
            reader.start(one, first)
            reader.start(two, second)
            take_all(second)
            take_all(first, 3)
            wrong.extend(r for r in one + two if r.error or not right(r, file[1]))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 2 <= len(reader._spare) <= 8


def test_large_and_bounced_requests_go_to_threads_within_the_same_batch(
    file, direct, reader, monkeypatch
):
    log, batch = Log(monkeypatch), Batch()
    small = some(direct, 5)
    large = request(direct, PAGE, reads.ASYNCHRONOUS_MAX, PAGE, tag=5)
    odd = Request(direct, 1234, [memoryview(bytearray(999))], 999, (6,), bounce=True)
    reader.start(small, batch)
    reader.start([large], batch)
    reader.start([odd], batch)
    done = take_all(batch, 2)
    assert sorted(r.tags[0] for r in done) == list(range(7))
    assert all(r.error is None and right(r, file[1]) for r in done)
    assert sum(log.submitted) == 5


@pytest.mark.parametrize("result", [-errno.EIO, -errno.EAGAIN, 0, 512, PAGE])
def test_what_went_wrong_or_came_back_short_is_read_again(
    file, direct, reader, monkeypatch, result
):
    log = Log(monkeypatch)
    log.answer = lambda request, n: n if request.tags[0] % 3 else result
    requests, batch = some(direct, 20), Batch()
    for one in requests:
        one.offset -= one.offset % (4 * PAGE)
    reader.start(requests, batch)
    for one in requests:
        if one.tags[0] % 3 == 0:
            one.buffers[0][:] = b"\xee" * len(one.buffers[0])
    take_all(batch)
    assert all(r.error is None and right(r, file[1]) for r in requests)


def test_a_drive_that_fails_for_good_is_an_error_with_file_and_byte(
    file, direct, reader, monkeypatch
):
    path, data = file
    log, real = Log(monkeypatch), os.preadv
    log.answer = lambda request, n: n if request.tags[0] != 4 else -errno.EIO

    def fails(fd, buffers, offset):
        if offset == requests[4].offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", fails)
    requests, batch = some(direct, 30), Batch()
    reader.start(requests, batch)
    with pytest.raises(ReadError) as caught:
        take_all(batch)
    where = requests[4].offset
    assert str(caught.value) == f"{path}: byte {where}: read failed: Input/output error"
    assert batch.left == 0 and batch.stream is None
    monkeypatch.undo()
    again = Batch()
    reader.start(some(direct, 9), again)
    assert all(right(r, data) for r in take_all(again))


def test_the_end_of_the_file_is_an_error(file, direct, reader):
    batch = Batch()
    reader.start([request(direct, SIZE - PAGE, PAGE, PAGE)], batch)
    with pytest.raises(ReadError, match=f"{file[0].name}: byte {SIZE}: the file ends too early"):
        take_all(batch)


@pytest.mark.parametrize("fault", ["unaligned", "closed"])
def test_what_the_kernel_refuses_is_tried_plainly_and_the_rest_is_read(file, direct, reader, fault):
    requests, batch = some(direct, 12), Batch()
    if fault == "unaligned":
        requests[7].offset += 1
    else:
        requests[7].fd = 1 << 20
    reader.start(requests, batch)
    with pytest.raises(ReadError, match="read failed: (Invalid argument|Bad file descriptor)"):
        take_all(batch)
    assert all(right(r, file[1]) for r in requests[:6])


def test_after_drain_nothing_is_written(file, direct, reader):
    for seed in range(10):
        requests, batch = some(direct, 40, seed, pages=60), Batch()
        reader.start(requests, batch)
        if seed % 2:
            batch.take()
        batch.drain()
        before = [content(r) for r in requests]
        for one in requests:
            for buffer in one.buffers:
                buffer[:] = bytes(len(buffer))
        time.sleep(0.02)
        assert not any(any(content(r)) for r in requests)
        assert any(map(any, before)) and batch.left == 0 and batch.take() == []


def test_a_queue_that_is_dropped_waits_for_its_reads(direct):
    requests = some(direct, 8, pages=100)
    queue = aio.Queue(8)
    assert queue.submit(requests) == 8
    del queue
    for one in requests:
        for buffer in one.buffers:
            buffer[:] = bytes(len(buffer))
    time.sleep(0.05)
    assert not any(any(content(r)) for r in requests)


@pytest.fixture
def destroyed(monkeypatch):
    """The contexts that have been given back."""
    calls = []
    setup, destroy, *others = aio._CALLS

    def counted(context):
        calls.append(context)
        return destroy(context)

    monkeypatch.setattr(aio, "_CALLS", [setup, counted, *others])
    return calls


def test_a_queue_is_destroyed_once(direct, destroyed):
    queue = aio.Queue(4)
    queue.destroy()
    queue.destroy()
    del queue
    assert len(destroyed) == 1 and not any(c.cell for c in aio._CONTEXTS if not c.queue())


def test_an_interrupt_at_the_end_of_a_queue_frees_nothing_that_is_written_to(
    direct, destroyed, monkeypatch
):
    def interrupted(queue):
        raise KeyboardInterrupt

    queue = aio.Queue(8)
    requests = some(direct, 8, pages=100)
    watched = weakref.ref(requests[0].buffers[0].obj)
    assert queue.submit(requests) == 8
    with monkeypatch.context() as patch:
        patch.setattr(aio.Queue, "__del__", interrupted)
        patch.setattr(sys, "unraisablehook", lambda _: None)
        del queue, requests
    assert watched() is not None and not destroyed
    other = aio.Queue(1)
    assert watched() is None and len(destroyed) == 1
    other.destroy()


def test_an_interrupt_while_a_queue_is_made_loses_no_context(destroyed, monkeypatch):
    setup, *others = aio._CALLS
    made = []

    def interrupted(depth, cell):
        made.append(setup(depth, cell))
        raise KeyboardInterrupt

    monkeypatch.setattr(aio, "_CALLS", [interrupted, *others])
    with pytest.raises(KeyboardInterrupt):
        aio.Queue(4)
    assert made == [0]
    gc.collect()
    monkeypatch.setattr(aio, "_CALLS", [setup, *others])
    aio.Queue(4).destroy()
    assert len(destroyed) == 2 and 0 not in destroyed


def test_buffers_without_bytes_are_passed_over(file, direct, reader):
    empty, batch = memoryview(b""), Batch()
    one, two = some(direct, 2)
    one.buffers.insert(0, empty)
    two.buffers.append(empty)
    reader.start([one, two], batch)
    assert len(take_all(batch)) == 2 and right(one, file[1]) and right(two, file[1])


# --- where threads are better


def test_reads_that_end_when_they_are_started_send_the_reader_back_to_its_threads(file):
    """Reads through the page cache are synchronous in the kernel's queue."""
    path, data = file
    fd = files.open_read(path)
    reader = Reader(2, {fd: str(path)}, direct=True)
    try:
        for seed in range(12):
            assert reader.asynchronous == (seed < 8)
            requests, batch = [request(fd, PAGE * seed, 4 << 20)] * 5, Batch()
            reader.start(requests, batch)
            assert len(take_all(batch)) == 5
            assert all(right(r, data) for r in requests)
        assert reader._started
    finally:
        reader.close()
        os.close(fd)


def test_a_kernel_that_refuses_every_read_sends_the_reader_back_to_its_threads(
    file, direct, monkeypatch
):
    def refused(*_):
        aio.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(aio, "_CALLS", [*aio._CALLS[:2], refused, aio._CALLS[3]])
    reader = Reader(2, direct=True)
    for seed in range(12):
        batch, requests = Batch(), some(direct, 3, seed)
        reader.start(requests, batch)
        assert len(take_all(batch)) == 3 and all(right(r, file[1]) for r in requests)
    assert not reader.asynchronous and reader._started
    reader.close()


def test_reads_that_end_at_once_but_quickly_are_left_alone(file):
    fd = files.open_read(file[0])
    reader = Reader(2, direct=True)
    for n in range(20):
        batch = Batch()
        reader.start([request(fd, PAGE * n, PAGE)], batch)
        take_all(batch)
    assert reader.asynchronous and not reader._started
    reader.close()
    os.close(fd)


def test_reads_that_take_their_time_settle_it(file, direct):
    try:
        aio.Queue(1)
    except OSError:
        pytest.skip("the system has no queue for reads")
    reader = Reader(4, direct=True)
    requests = [request(direct, n << 20, 1 << 20) for n in range(8)]
    for _ in range(12):
        batch = Batch()
        reader.start(requests, batch)
        take_all(batch)
    assert reader.asynchronous and reader._trials == 0 and not reader._started
    reader.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EAGAIN])
def test_a_system_without_such_a_queue_reads_with_threads(file, direct, number, monkeypatch):
    def refused(*_):
        aio.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(aio, "_CALLS", [refused, *aio._CALLS[1:]])
    with pytest.raises(OSError, match=os.strerror(number)):
        aio.Queue(4)
    reader, batch = Reader(2, direct=True), Batch()
    requests = some(direct, 20)
    reader.start(requests, batch)
    assert len(take_all(batch)) == 20 and reader._started
    # There may be room for another one later; the rest is for good.
    assert reader.asynchronous == (number == errno.EAGAIN)
    assert all(right(r, file[1]) for r in requests)
    reader.close()


@pytest.mark.parametrize("what", ["sys.platform = 'darwin'", "platform.machine = lambda: 'sparc'"])
def test_other_systems_have_none(what):
    code = f"import errno, platform, sys\n{what}\nfrom mbolt_mlx.core import aio\n" + (
        "try:\n    aio.Queue(4)\nexcept OSError as error:\n    print(error.errno == errno.ENOSYS)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True\n" and done.stderr == ""
