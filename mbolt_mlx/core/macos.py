"""What ``core/files.py`` does by other means on macOS; written from documentation, not run."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

_F_PREALLOCATE, _F_PEOFPOSMODE, _F_ALLOCATEALL = 42, 3, 4
_MS_INVALIDATE = 2
_QOS_USER_INITIATED = 0x19


def reserve(fd: int, size: int) -> None:
    """Reserve ``size`` bytes after the end of ``fd``; the file's size stays as it is."""
    import fcntl

    # struct fstore: flags, position mode, offset, length, bytes allocated.
    fcntl.fcntl(
        fd, _F_PREALLOCATE, struct.pack("Iiqqq", _F_ALLOCATEALL, _F_PEOFPOSMODE, 0, size, 0)
    )


def prefer_fast_cores() -> None:
    """Ask for the performance cores in the calling thread.

    Threads do not inherit their maker's quality of service, and reads by a background one are
    throttled.
    """
    ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_USER_INITIATED, 0)


def drop_cached(fd: int) -> None:
    """Drop the pages of ``fd`` from the page cache, by mapping and invalidating all of it."""
    size = os.fstat(fd).st_size
    if not size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        return
    libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.msync(address, size, _MS_INVALIDATE)
    libc.munmap(address, size)
