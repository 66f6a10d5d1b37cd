"""Standard streams, pipes and devices: what is written to but is no file on a drive."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

from mbolt_mlx.core.errors import OutputError

_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is there and is a pipe, a device or a socket: neither file nor folder."""
    try:
        return (os.stat(path).st_mode & 0o170000) not in (0o100000, 0o040000)
    except OSError:
        return False


def write_stream(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to the pipe or device ``path``.

    Raises:
        OutputError: when it cannot be opened, or refuses the data.
    """
    try:
        with open(path, "wb", buffering=0) as stream:
            view = memoryview(data)
            while len(view):
                view = view[stream.write(view) :]
    except OSError as error:
        raise OutputError(f"cannot write: {error.strerror}", path=path) from error


def hold_standard() -> None:
    """Give stdin, stdout and stderr something to be where whoever started us closed them.

    Else the next file that is opened gets a number below 3: our notes would be written into it,
    and MLX takes 0 for a file that it could not open.
    """
    fd = 0
    while fd < 3:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def show_what_can_be_shown() -> None:
    """Let stdout and stderr write what their encoding lacks as ``?`` or an escape, and bytes of
    file names as they are."""
    for stream, otherwise in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if utf8 else otherwise)


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` is that stdout or stderr could not be written.

    It names no file, and every other call of ours that writes turns its failure into one of ours.
    """
    return isinstance(error, OSError) and error.filename is None and error.errno in _WRITING


def drop_rest(stream: TextIO) -> None:
    """Forget what ``stream`` still holds: Python flushes it at exit and would complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
