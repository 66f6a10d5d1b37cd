"""The only place that calls the operating system for files (but for `core.aio`'s queue of reads).

Linux and macOS differ here and nowhere else. What macOS does (F_NOCACHE, F_FULLFSYNC,
F_PREALLOCATE) is written from documentation and has not been run on a Mac.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mbolt_mlx.core import macos
from mbolt_mlx.core.errors import OutputError, ReadError

MACOS = sys.platform == "darwin"
IOV_MAX = 1024
# One read of more than INT_MAX bytes, summed over its buffers, fails on macOS.
READ_MAX = 1 << 30
# What direct reads ask of offset, length and memory: at least the first, on some drives the second.
DIRECT_ALIGN = 512
DIRECT_ALIGN_MOST = 4096
_RETRIES = 3
_TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.ETIMEDOUT})


def open_read(path: str | os.PathLike[str], *, direct: bool = False) -> int:
    """Open ``path`` for reading and return its descriptor.

    With ``direct`` the page cache is bypassed (O_DIRECT on Linux, F_NOCACHE on macOS).

    Raises:
        ReadError: if it cannot be opened, is not a regular file, or its file system has no direct
            reads.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    if direct and not MACOS:
        flags |= os.O_DIRECT
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if direct and error.errno == errno.EINVAL and os.path.isfile(path):
            raise ReadError("the file system has no direct reads", path=path) from error
        if error.errno == errno.EINVAL and os.path.exists(path):
            raise ReadError("not a regular file", path=path) from error
        raise ReadError(f"cannot open: {error.strerror}", path=path) from error
    try:
        if not is_regular(fd):
            raise ReadError("not a regular file", path=path)
        os.set_blocking(fd, True)
        if direct and MACOS:
            import fcntl

            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_cold(path: str | os.PathLike[str], *, drop: bool = True) -> tuple[int, bool]:
    """Open ``path`` so that reads come from the drive, not from the page cache, where possible.

    Where it is not, the file's cached pages are dropped, unless not ``drop``. Returns the
    descriptor and whether buffers, lengths and offsets must be multiples of 4096.

    Raises:
        ReadError: as ``open_read``.
    """
    try:
        return open_read(path, direct=True), not MACOS
    except ReadError:
        fd = open_read(path)
        if drop:
            drop_cached(fd)
        return fd, False


def direct_alignment(fd: int) -> int:
    """Bytes to which direct reads of ``fd`` must be aligned; found by trying."""
    if MACOS:
        return DIRECT_ALIGN_MOST  # less is read all the same, through the page cache
    buffer = memoryview(mmap.mmap(-1, DIRECT_ALIGN_MOST))
    try:
        os.preadv(fd, [buffer[DIRECT_ALIGN : 2 * DIRECT_ALIGN]], DIRECT_ALIGN)
    except OSError:
        return DIRECT_ALIGN_MOST
    return DIRECT_ALIGN


def is_regular(fd: int) -> bool:
    """Whether ``fd`` is a regular file (not a folder, pipe or device)."""
    return (os.fstat(fd).st_mode & 0o170000) == 0o100000


def size_and_mtime(fd: int) -> tuple[int, int]:
    """The size of ``fd`` in bytes and when it last changed, in nanoseconds."""
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns


def allocated_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the drive that ``path`` takes up; 0 when it is absent."""
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def read_whole(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """All bytes of the small file ``path``.

    Raises:
        ReadError: if it cannot be read, is not a regular file or holds more than ``limit`` bytes.
    """
    fd = open_read(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise ReadError(
                "the file is too large", path=path, expected=f"at most {limit}", found=size
            )
        buffer = bytearray(size)
        pread_into(fd, [memoryview(buffer)], 0, path=os.fspath(path))
        return bytes(buffer)
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the advisory lock of ``fd`` for this process; False when another one has it.

    Where the file system has no locks, True.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_same_file(a: int | str | os.PathLike[str], b: int | str | os.PathLike[str]) -> bool:
    """Whether two descriptors or paths are one file, by whatever names; False if one is absent."""
    try:
        return os.path.samestat(os.stat(a), os.stat(b))
    except OSError:
        return False


def close(fd: int) -> None:
    """Close ``fd``."""
    os.close(fd)


def pread_into(
    fd: int, buffers: Sequence[memoryview], offset: int, *, path: str | None = None
) -> None:
    """Fill ``buffers``, one after the other, with the bytes of ``fd`` from ``offset`` on.

    One system call where the limits allow it. Short reads are continued; EINTR is retried by
    Python itself; EIO is retried twice, then raised.

    Raises:
        ReadError: at the end of the file or when the drive fails.
    """
    total = sum(map(len, buffers))
    if len(buffers) <= IOV_MAX and total <= READ_MAX:
        try:
            if os.preadv(fd, buffers, offset) == total:
                return
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise ReadError(
                    f"read failed: {error.strerror}", path=path, offset=offset
                ) from error
    _pread_slowly(fd, [memoryview(b).cast("B") for b in buffers], offset, path)


def _pread_slowly(fd: int, pending: list[memoryview], offset: int, path: str | None) -> None:
    failures = 0
    pending = [b for b in pending if len(b)]
    while pending:
        batch, size = [], 0
        for buffer in pending[:IOV_MAX]:
            batch.append(buffer[: READ_MAX - size])
            size += len(batch[-1])
            if size >= READ_MAX:
                break
        try:
            got = os.preadv(fd, batch, offset)
        except OSError as error:
            failures += 1
            if error.errno not in _TRANSIENT or failures >= _RETRIES:
                raise ReadError(
                    f"read failed: {error.strerror}", path=path, offset=offset
                ) from error
            time.sleep(0.01 * failures)
            continue
        if got == 0:
            raise ReadError(
                "the file ends too early",
                path=path,
                offset=offset,
                expected=f"{sum(map(len, pending))} more bytes",
            )
        if DIRECT_ALIGN_MOST < got < size:
            got -= got % DIRECT_ALIGN_MOST  # a direct read cannot go on anywhere else
        offset += got
        while got and pending:
            taken = min(got, len(pending[0]))
            pending[0] = pending[0][taken:]
            got -= taken
            if not len(pending[0]):
                pending.pop(0)


def pread_some(fd: int, buffer: memoryview, offset: int, *, need: int) -> int:
    """Read up to ``len(buffer)`` bytes, at least ``need`` of them, and return how many.

    For direct reads that may run past the end of the file.

    Raises:
        ReadError: when the file ends before ``need`` bytes, or the drive fails.
    """
    failures = 0
    while True:
        try:
            got = os.preadv(fd, [buffer], offset)
        except OSError as error:
            failures += 1
            if error.errno not in _TRANSIENT or failures >= _RETRIES:
                raise ReadError(f"read failed: {error.strerror}", offset=offset) from error
            time.sleep(0.01 * failures)
            continue
        if got >= need:
            return got
        failures += 1
        if got == 0 or failures >= _RETRIES:
            raise ReadError("the file ends too early", offset=offset, expected=f"{need} bytes")


def make_alias(fd: int, number: int) -> None:
    """Make the descriptor ``number`` mean the open file ``fd``, closing what it meant before."""
    os.dup2(fd, number, inheritable=False)


def open_write(
    path: str | os.PathLike[str], *, exclusive: bool = False, direct: bool = False
) -> int:
    """Open ``path`` for reading and writing, made if absent; ``exclusive`` refuses one that exists.

    With ``direct`` the page cache is bypassed; buffers, lengths and offsets must then be multiples
    of 4096.

    Raises:
        OutputError: if it cannot be opened, or its file system has no direct writes.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
    if direct and not MACOS:
        flags |= os.O_DIRECT
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise OutputError(f"cannot write: {error.strerror}", path=path) from error
    if direct and MACOS:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    return fd


def truncate(fd: int, size: int, *, path: str | None = None) -> None:
    """Cut or extend ``fd`` to ``size`` bytes.

    Raises:
        OutputError: if the system refuses.
    """
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise OutputError(f"cannot set the size: {error.strerror}", path=path) from error


def pwrite_all(fd: int, buffer: memoryview | bytes, offset: int, *, path: str | None = None):
    """Write all of ``buffer`` at ``offset``.

    Raises:
        OutputError: when the drive is full, over quota, or fails.
    """
    view = memoryview(buffer).cast("B")
    while len(view):
        try:
            done = os.pwrite(fd, view[:READ_MAX], offset)
        except OSError as error:
            hint = "free some space and run again" if is_full(error) else None
            raise OutputError(
                f"write failed: {error.strerror}", path=path, offset=offset, hint=hint
            ) from error
        view, offset = view[done:], offset + done


def is_full(error: OSError) -> bool:
    """Whether ``error`` says that the drive or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def preallocate(fd: int, size: int, *, path: str | None = None) -> None:
    """Give ``fd`` the size ``size`` in bytes, reserving the space where the system can.

    Raises:
        OutputError: when there is not that much space.
    """
    try:
        if MACOS:
            more = size - os.fstat(fd).st_size
            try:
                if more > 0:
                    macos.reserve(fd, more)
            except OSError as error:
                if is_full(error):
                    raise
            os.ftruncate(fd, size)
        else:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            os.ftruncate(fd, size)
    except OSError as error:
        raise OutputError(f"cannot reserve {size} bytes: {error.strerror}", path=path) from error


def sync(fd: int, *, path: str | None = None) -> None:
    """Wait until the bytes of ``fd`` are on the drive.

    Raises:
        OutputError: when the drive reports a failure.
    """
    try:
        if MACOS:
            import fcntl

            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError:
                pass  # exFAT and network drives have no full sync; the plain one follows
        os.fsync(fd)
    except OSError as error:
        raise OutputError(f"sync failed: {error.strerror}", path=path) from error


def sync_data(fd: int, *, path: str | None = None) -> None:
    """Like ``sync``, but what is only needed to date the file may be left out.

    Raises:
        OutputError: when the drive reports a failure.
    """
    if not hasattr(os, "fdatasync"):
        return sync(fd, path=path)
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise OutputError(f"sync failed: {error.strerror}", path=path) from error


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give ``source`` the name ``target`` in one step and make the new name durable.

    Raises:
        OutputError: if the system refuses.
    """
    try:
        os.replace(source, target)
        fd = os.open(Path(target).parent, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"cannot rename: {error.strerror}", path=target) from error
    try:
        os.fsync(fd)
    except OSError:
        pass  # some file systems cannot sync a folder; the rename itself is atomic
    finally:
        os.close(fd)


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove ``path``; an absent one is fine.

    Raises:
        OutputError: if the system refuses.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"cannot remove: {error.strerror}", path=path) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder ``path`` and its parents where they are absent.

    Raises:
        OutputError: if the system refuses.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder: {error.strerror}", path=path) from error


def free_space(path: str | os.PathLike[str]) -> int:
    """Bytes that an ordinary user can still write on the drive that holds the folder ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def advise_sequential(fd: int) -> None:
    """Tell the system that ``fd`` is read from front to back (no effect on macOS)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def advise_random(fd: int) -> None:
    """Tell the system that ``fd`` is read here and there, so that it reads nothing ahead."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def drop_cached(fd: int, offset: int = 0, size: int = 0) -> None:
    """Drop clean pages of ``fd`` from the page cache; ``size`` 0 means to the end.

    On macOS the range is mapped and invalidated, which needs no privilege.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
    else:
        macos.drop_cached(fd)
