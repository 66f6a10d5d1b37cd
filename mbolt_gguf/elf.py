"""Which libraries a program of Linux was linked to, read from the file itself."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import UnsupportedError

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB = 1, 5


def needed_libraries(path: Path) -> list[str]:
    """The names of the libraries that ``path`` asks for; none when it is linked statically.

    Raises:
        ReadError: when it cannot be read.
        UnsupportedError: when it is not an ELF file of 64 bits, little-endian, or is damaged.
    """
    fd = files.open_read(path)
    try:
        head = bytearray(min(6, files.size_and_mtime(fd)[0]))
        files.pread_into(fd, [memoryview(head)], 0, path=str(path))
        if head != b"\x7fELF\x02\x01":
            raise UnsupportedError("not a program (an ELF file of 64 bits)", path=path)
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            return _needed(data)
    except (struct.error, ValueError) as error:
        raise UnsupportedError("a damaged program", path=path) from error
    finally:
        os.close(fd)


def _needed(data: mmap.mmap) -> list[str]:
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    # Of each part: kind, flags, offset, address, physical address, size in the file.
    parts = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    entries = [
        struct.unpack_from("<QQ", data, at)
        for kind, _, offset, _, _, nbytes in parts
        if kind == _DYNAMIC
        for at in range(offset, offset + nbytes, 16)
    ]
    names = dict(entries).get(_STRTAB, 0)
    for kind, _, offset, address, _, nbytes in parts:
        if kind == _LOAD and address <= names < address + nbytes:
            start = offset + names - address
            places = [start + value for tag, value in entries if tag == _NEEDED]
            return [os.fsdecode(data[at : at + 4096].partition(b"\0")[0]) for at in places]
    return []
