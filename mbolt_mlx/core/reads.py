"""Positioned reads, merged, in parallel, straight to where the bytes are wanted.

A `Request` is one call to the drive that fills a list of buffers. `Reader.start` hands a list of
requests to the kernel's own queue, where it has one (`core.aio`), or else to its threads, as part
of a `Batch`, whose `take` gives the finished ones in the order in which they finish. The threads
fill buffers and do nothing else.
"""

from __future__ import annotations

import errno
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from mbolt_mlx.core import aio, files, huge_pages, macos
from mbolt_mlx.core.errors import ReadError

# Reads at a time, unless the user says how many.
THREADS = 4
# A merged call stays short enough that the calls of a layer still run side by side.
MERGE_MAX = 16 << 20
# Reading a small gap costs less than a second call.
MERGE_GAP = 64 << 10
# A thread's buffer for unaligned ranges.
BOUNCE_BYTES = 4 << 20
# Up to this a thread's wake counts; of more, the kernel's queue may hold up who hands it in.
ASYNCHRONOUS_MAX = 4 << 20
# Where so many starts held up the caller until all was read, for longer than it takes to wake a
# thread for each read, and none did not, the file system has no asynchronous reads. Starts of fewer
# bytes tell nothing: on a busy machine they have ended before anybody looks.
_TRIALS = 8
_WAKE_S = 1e-4
_TELLING_BYTES = 256 << 10


class Request:
    """One positioned read.

    Args:
        fd: open file.
        offset: first byte.
        buffers: filled one after the other.
        nbytes: their sum.
        tags: what the caller knows it by (expert ids).
        bounce: read through an aligned buffer of the thread (direct reads of unaligned ranges).
    """

    __slots__ = ("fd", "offset", "buffers", "nbytes", "tags", "bounce", "error")

    def __init__(
        self,
        fd: int,
        offset: int,
        buffers: list[memoryview],
        nbytes: int,
        tags: tuple[int, ...],
        bounce: bool = False,
    ) -> None:
        self.fd = fd
        self.offset = offset
        self.buffers = buffers
        self.nbytes = nbytes
        self.tags = tags
        self.bounce = bounce
        self.error: BaseException | None = None


def aligned_buffer(nbytes: int) -> memoryview:
    """A page-aligned writable buffer of at least ``nbytes`` bytes, zeroed, in huge pages."""
    memory = _anonymous(nbytes)
    huge_pages.ask(memory)
    return memoryview(memory)


def slot_buffers(count: int, nbytes: int) -> list[memoryview]:
    """``count`` page-aligned buffers of ``nbytes`` bytes, in small pages as the engine's slots."""
    return [memoryview(_anonymous(nbytes))[:nbytes] for _ in range(count)]


def _anonymous(nbytes: int) -> mmap.mmap:
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Shared memory, the default, comes in huge pages by another setting.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Junk:
    """Where the bytes between two wanted ranges go. Shared by all reads: nobody looks at it."""

    def __init__(self) -> None:
        self._buffer = aligned_buffer(MERGE_GAP)

    def buffers(self, nbytes: int) -> list[memoryview]:
        """Buffers of ``nbytes`` in all."""
        whole, rest = divmod(nbytes, len(self._buffer))
        return [self._buffer] * whole + ([self._buffer[:rest]] if rest else [])


JUNK = Junk()


def merge(requests: Iterable[Request], max_gap: int = MERGE_GAP) -> list[Request]:
    """Join requests for neighbouring ranges of a file into one call each.

    Ranges at most ``max_gap`` bytes apart are joined, up to `MERGE_MAX` bytes and the system's
    number of buffers; the bytes between go to a buffer that nobody reads.
    """
    merged: list[Request] = []
    for request in sorted(requests, key=_position):
        if merged:
            last = merged[-1]
            gap = request.offset - last.offset - last.nbytes
            if (
                request.fd == last.fd
                and 0 <= gap <= max_gap
                and last.nbytes + gap + request.nbytes <= MERGE_MAX
                and len(last.buffers) + len(request.buffers) + 1 <= files.IOV_MAX
            ):
                fill = JUNK.buffers(gap) if gap else []
                merged[-1] = Request(
                    last.fd,
                    last.offset,
                    last.buffers + fill + request.buffers,
                    last.nbytes + gap + request.nbytes,
                    last.tags + request.tags,
                    last.bounce or request.bounce,
                )
                continue
        merged.append(request)
    return merged


def _position(request: Request) -> tuple[int, int]:
    return request.fd, request.offset


class Batch:
    """Requests under way; more can be added while others are."""

    def __init__(self) -> None:
        self.left = 0
        #: tags that are not complete yet
        self.tags_left = 0
        #: requests that each tag still waits for; empty where every tag has one
        self.parts: dict[int, int] = {}
        self._done: deque[Request] = deque()
        self._wanted = sys.maxsize
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._running: set[Request] = set()
        self._cancelled = False
        #: what the kernel reads of it by itself, and where that stream goes when all has ended
        self.stream: aio.Stream | None = None
        self.spare: list[aio.Stream] = []

    def begins(self, request: Request) -> bool:
        """Called by a reading thread; False where nobody wants the bytes any more."""
        self._running.add(request)
        if self._cancelled:
            self._running.discard(request)
            return False
        return True

    def finished(self, request: Request) -> None:
        """Called by a reading thread."""
        self._running.discard(request)
        self._done.append(request)
        if len(self._done) >= self._wanted:
            self._wake.put(None)

    def ended(self, requests: Iterable[Request]) -> None:
        """Called by the thread that takes: ``requests`` have ended without a thread."""
        self._done.extend(requests)

    def take(self, at_least: int = 1) -> list[Request]:
        """Wait for ``at_least`` more requests, and return all that have finished since.

        Raises:
            ReadError: what a failed request raised, once no other one is under way.
        """
        # Woken once, not at each request that finishes before.
        self._wanted = min(at_least, self.left)
        while len(self._done) < self._wanted:
            if self.stream is not None and self.stream.left:
                self.ended(self.stream.ended(self._wanted - len(self._done)))
            else:
                self._wake.get()
        self._wanted = sys.maxsize
        done: list[Request] = []
        while self.left and self._done:
            done.append(self._done.popleft())
            self.left -= 1
        for request in done:
            if request.error is not None:
                self.drain()
                raise request.error
        if self.stream is not None and not self.left:
            stream, self.stream = self.stream, None
            self.spare.append(stream)
        return done

    def drain(self) -> None:
        """Give up what has not begun, and wait until nobody writes for this batch any more.

        Counts nothing that an interrupt at any moment could have left wrong.
        """
        self._cancelled = True
        if self.stream is not None:
            self.stream.drain()
            self.stream = None
        while self._running:
            time.sleep(0.0005)
        self.left = 0


class Reader:
    """The kernel's queue, or a few threads that read.

    Args:
        threads: reads in flight at a time.
        paths: descriptor → path, for the errors.
        direct: reads bypass the page cache, so that the kernel may have a queue for them.
    """

    def __init__(
        self, threads: int, paths: Mapping[int, str] | None = None, *, direct: bool = False
    ) -> None:
        self.threads = threads
        #: whether small aligned requests are to go to the kernel's queue, as far as it was tried
        self.asynchronous = direct
        self._trials = _TRIALS
        self._spare: list[aio.Stream] = []
        self._paths = paths if paths is not None else {}
        self._queue: SimpleQueue[tuple[Request, Batch] | None] = SimpleQueue()
        self._bounce: memoryview | None = None
        self._started = False
        self._lock = threading.Lock()

    def start(self, requests: Sequence[Request], batch: Batch) -> None:
        """Begin to read ``requests``, in order, as part of ``batch``."""
        if self.asynchronous and all(map(_suits_the_kernel, requests)):
            if self._hand_over(requests, batch):
                return
        if not self._started:
            self._start_threads()
        put = self._queue.put
        for request in requests:
            batch.left += 1
            put((request, batch))

    def help(self, batch: Batch) -> None:
        """Read in the calling thread too, until nothing of ``batch`` is the next to begin.

        For a caller that needs all of it: one thread fewer to wake, and none to wait for.
        """
        while batch.left:
            try:
                work = self._queue.get_nowait()
            except Empty:
                return
            if work is None or work[1] is not batch:
                self._queue.put(work)
                return
            request = work[0]
            if self._bounce is None and request.bounce:
                self._bounce = aligned_buffer(BOUNCE_BYTES)
            # Not as a thread does: who waits also drains, and must not wait for itself then.
            _carry_out(request, self._paths, self._bounce)
            batch.ended([request])

    def close(self) -> None:
        """End the threads once they have finished what was started."""
        with self._lock:
            if self._started:
                for _ in range(self.threads):
                    self._queue.put(None)
                self._started = False
            self._spare.clear()

    def _hand_over(self, requests: Sequence[Request], batch: Batch) -> bool:
        """Have the kernel read ``requests``; False where it has no queue to be had."""
        if batch.stream is None:
            try:
                stream = self._stream()
            except OSError as error:
                # Others may have taken all the room that the system has for queues, for a while.
                self.asynchronous = error.errno == errno.EAGAIN
                return False
            batch.stream, batch.spare = stream, self._spare
        batch.left += len(requests)
        held = batch.stream.held_s
        refused = batch.stream.start(requests)
        batch.ended(refused)
        if self._trials:
            held = batch.stream.held_s - held
            telling = sum(request.nbytes for request in requests) >= _TELLING_BYTES
            slow = telling and held > _WAKE_S * len(requests)
            self._try_out(batch, batch.stream, slow or bool(refused))
        return True

    def _stream(self) -> aio.Stream:
        try:
            return self._spare.pop()
        except IndexError:
            return aio.Stream(self.threads, partial(_carry_out, paths=self._paths))

    def _try_out(self, batch: Batch, stream: aio.Stream, slow: bool) -> None:
        """Judge by a start, and go back to threads when it is one ``slow`` one too many."""
        flying = stream.flying
        ended = stream.ended(0)
        batch.ended(ended)
        if len(ended) < flying:
            self._trials = 0
        elif slow:
            self._trials -= 1
            self.asynchronous = self._trials > 0

    def _start_threads(self) -> None:
        with self._lock:
            if not self._started:
                for number in range(self.threads):
                    threading.Thread(
                        target=_work,
                        args=(self._queue, self._paths),
                        name=f"mbolt-read-{number}",
                        daemon=True,
                    ).start()
                self._started = True


def _work(queue: SimpleQueue[tuple[Request, Batch] | None], paths: Mapping[int, str]) -> None:
    if files.MACOS:
        macos.prefer_fast_cores()
    bounce: memoryview | None = None
    while (work := queue.get()) is not None:
        if bounce is None and work[0].bounce:
            bounce = aligned_buffer(BOUNCE_BYTES)
        _do(*work, paths, bounce)
        del work


def _suits_the_kernel(request: Request) -> bool:
    return (
        not request.bounce
        and request.nbytes <= ASYNCHRONOUS_MAX
        and len(request.buffers) <= files.IOV_MAX
    )


def _do(
    request: Request, batch: Batch, paths: Mapping[int, str], bounce: memoryview | None
) -> None:
    """Carry out one request and report it."""
    if batch.begins(request):
        _carry_out(request, paths, bounce)
        batch.finished(request)


def _carry_out(
    request: Request, paths: Mapping[int, str], bounce: memoryview | None = None
) -> None:
    try:
        if request.bounce and bounce is not None:
            _read_bounced(request, bounce)
        else:
            files.pread_into(request.fd, request.buffers, request.offset)
    except BaseException as error:  # handed to the thread that waits
        if isinstance(error, ReadError) and error.path is None:
            error.path = paths.get(request.fd)
        request.error = error


def _read_bounced(request: Request, bounce: memoryview) -> None:
    """Read through an aligned buffer: direct reads whose range or target is not aligned."""
    align = files.DIRECT_ALIGN_MOST
    targets = iter(request.buffers)
    target = memoryview(b"")
    position, end = request.offset, request.offset + request.nbytes
    while position < end:
        start = position - position % align
        want = min(len(bounce), -(-(end - start) // align) * align)
        got = files.pread_some(request.fd, bounce[:want], start, need=position - start + 1)
        piece = bounce[position - start : min(got, end - start)]
        position += len(piece)
        while len(piece):
            if not len(target):
                target = next(targets)
            n = min(len(piece), len(target))
            target[:n] = piece[:n]
            piece, target = piece[n:], target[n:]
