"""Linux's own asynchronous reads: one system call starts many, one waits until many have ended.

A thread that reads has to be woken for each read, and the caller for each that has ended. The
kernel's queue needs neither (what that saves: examples/bench/miss_path.py). (io_submit(2),
io_getevents(2); struct iocb of linux/aio_abi.h. The C library has no functions for these calls, so
they are made by number.)

Only direct reads are asynchronous there, and not on every file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mbolt_mlx.core.reads import Request

# io_setup, io_destroy, io_submit, io_getevents: arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h.
_NUMBERS = {
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
    "riscv64": (0, 1, 2, 4),
}
# data, key, rw_flags, opcode, reqprio, fildes, buf, nbytes, offset, reserved, flags, resfd
_IOCB = struct.Struct("<QIiHhIQQqQII")
# data, obj, res, res2
_EVENT = struct.Struct("<QQqq")
_PREADV = 7
_IOVEC_BYTES = 16
_byte_at = ctypes.c_char.from_buffer


def _calls() -> list[Callable[..., int]]:
    """The four system calls; on another system or processor they fail."""
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or sys.maxsize < 1 << 32:
        return [_absent] * 4
    word, pointer = ctypes.c_long, ctypes.c_void_p
    waits = ctypes.CDLL(None, use_errno=True)
    # Starting reads is so short that letting other Python threads run meanwhile costs more.
    short = ctypes.PyDLL(None, use_errno=True)
    calls = []
    for library, number, kinds in zip(
        (short, waits, short, waits),
        numbers,
        (
            (word, pointer),
            (pointer,),
            (pointer, word, pointer),
            (pointer, word, word, pointer, pointer),
        ),
        strict=True,
    ):
        function = library["syscall"]  # another object each time
        function.argtypes = (word, *kinds)
        function.restype = word
        calls.append(partial(function, number))
    return calls


def _absent(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_CALLS = _calls()


class _Context:
    """A context of the kernel, and the requests that it writes for, by number.

    It is in `_CONTEXTS` until it has ended, so that no buffer is freed under the kernel's hands
    even where an interrupt keeps its queue's end from being carried out.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = weakref.ref(queue)
        self.flying: dict[int, Request] = {}
        self.cell = array("L", [0])
        # Once only, and with no moment between taking the number and the call in which an interrupt
        # could come: another context may have the same number by the time of a second call.
        self._ends = map(_CALLS[1], map(array.pop, [self.cell]))
        _CONTEXTS.add(self)

    def end(self) -> None:
        """Wait until no read is under way any more, and give the context back."""
        for _ in self._ends:
            pass
        self.flying.clear()
        _CONTEXTS.discard(self)


_CONTEXTS: set[_Context] = set()


class Queue:
    """Reads under way in one of the kernel's contexts. One thread at a time uses it.

    Args:
        depth: reads under way at most.

    Raises:
        OSError: when the system has no such queue, or gives no more of them.
    """

    def __init__(self, depth: int) -> None:
        for one in list(_CONTEXTS):
            if one.queue() is None:
                one.end()
        self.depth = depth
        #: seconds that starting reads has taken
        self.held_s = 0.0
        self._context = _Context(self)
        self._flying = self._context.flying
        self._next = 0
        self._blocks = ctypes.create_string_buffer(depth * _IOCB.size)
        start = ctypes.addressof(self._blocks)
        self._pointers = array("Q", [start + n * _IOCB.size for n in range(depth)])
        self._found = ctypes.create_string_buffer(depth * _EVENT.size)
        setup, _, self._submit, self._events = _CALLS
        cell, _ = self._context.cell.buffer_info()
        if setup(depth, cell) < 0:
            number = ctypes.get_errno()
            self.destroy()
            raise OSError(number, os.strerror(number))
        self._number = self._context.cell[0]

    @property
    def flying(self) -> int:
        """Reads under way."""
        return len(self._flying)

    def submit(self, requests: Sequence[Request]) -> int:
        """Start the first of ``requests``, at most ``depth - flying``; how many have been started.

        When the kernel takes fewer, the one after them is at fault, or it has no room left.
        """
        vectors, counts = array("Q"), []
        for request in requests:
            buffers = [buffer for buffer in request.buffers if len(buffer)]
            for buffer in buffers:
                vectors.append(ctypes.addressof(_byte_at(buffer)))
                vectors.append(len(buffer))
            counts.append(len(buffers))
        place, _ = vectors.buffer_info()
        numbers = range(self._next, self._next + len(requests))
        for n, (request, count) in enumerate(zip(requests, counts, strict=True)):
            read = numbers[n], 0, 0, _PREADV, 0, request.fd, place, count, request.offset, 0, 0, 0
            _IOCB.pack_into(self._blocks, n * _IOCB.size, *read)
            place += count * _IOVEC_BYTES
        self._flying.update(zip(numbers, requests, strict=True))
        self._next += len(requests)
        start = perf_counter()
        taken = self._submit(self._number, len(requests), self._pointers.buffer_info()[0])
        self.held_s += perf_counter() - start
        taken = max(taken, 0)
        for number in numbers[taken:]:
            del self._flying[number]
        return taken

    def wait(self, at_least: int) -> list[tuple[Request, int]]:
        """Wait until ``at_least`` reads have ended; all that have, with their bytes or -errno.

        Raises:
            OSError: when the kernel refuses to say.
        """
        while (
            count := self._events(
                self._number, at_least, self.depth, ctypes.addressof(self._found), None
            )
        ) < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
        events = _EVENT.iter_unpack(memoryview(self._found)[: count * _EVENT.size])
        return [(self._flying.pop(number), result) for number, _, result, _ in events]

    def destroy(self) -> None:
        """Wait until no read is under way any more, and give the context back."""
        self._context.end()

    __del__ = destroy


class Stream:
    """Requests on their way through a queue of the kernel, however many.

    Args:
        at_a_time: reads that shall always be under way. Twice as many are, as they are looked after
            only when somebody waits.
        plainly: reads a request by other means, where the kernel refused it, failed or read less.

    Raises:
        OSError: when there is no queue to be had.
    """

    def __init__(self, at_a_time: int, plainly: Callable[[Request], None]) -> None:
        self._least = at_a_time
        self._plainly = plainly
        self._queue = Queue(2 * at_a_time)
        self._waiting: deque[Request] = deque()

    @property
    def flying(self) -> int:
        """Reads that the kernel has."""
        return self._queue.flying

    @property
    def held_s(self) -> float:
        """Seconds that the kernel has held up who started reads."""
        return self._queue.held_s

    @property
    def left(self) -> int:
        """Requests that have not ended."""
        return self._queue.flying + len(self._waiting)

    def start(self, requests: Sequence[Request]) -> list[Request]:
        """Begin to read ``requests``; those that ended at once, because the kernel refused them."""
        self._waiting.extend(requests)
        return self._fill()

    def ended(self, at_least: int) -> list[Request]:
        """Wait until ``at_least`` requests have ended; all that have."""
        at_least = min(at_least, self.left)
        done: list[Request] = []
        while True:
            need = min(at_least - len(done), self.flying)
            if self._waiting:
                need = min(need, max(1, self.flying - self._least))
            for request, result in self._queue.wait(max(need, 0)):
                if result != request.nbytes:
                    self._plainly(request)
                done.append(request)
            done += self._fill()
            if len(done) >= at_least:
                return done

    def drain(self) -> None:
        """Give up what waits, and return once nothing is under way. The stream ends with it."""
        self._waiting.clear()
        self._queue.destroy()

    def _fill(self) -> list[Request]:
        """Hand the kernel as many as it may have; those that it refused and that are read now."""
        refused: list[Request] = []
        while self._waiting and (room := self._queue.depth - self.flying):
            some = list(islice(self._waiting, room))
            taken = self._queue.submit(some)
            for _ in range(taken):
                self._waiting.popleft()
            if taken < len(some):
                if self.flying:
                    break
                refused.append(self._waiting.popleft())
                self._plainly(refused[-1])
        return refused
