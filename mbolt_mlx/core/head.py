"""The beginning of a file, which tells of what kind it is."""

from __future__ import annotations

import os

from mbolt_mlx.core import files


def read_head(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """The first ``nbytes`` of ``path``, or all of a shorter file.

    Raises:
        ReadError: if it cannot be read or is not a regular file.
    """
    fd = files.open_read(path)
    try:
        head = bytearray(min(files.size_and_mtime(fd)[0], nbytes))
        files.pread_into(fd, [memoryview(head)], 0, path=os.fspath(path))
        return bytes(head)
    finally:
        files.close(fd)
