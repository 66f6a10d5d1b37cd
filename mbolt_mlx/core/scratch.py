"""Large files that a measurement writes for a while and removes again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import MboltError


def remove_left(folder: Path, prefix: str) -> None:
    """Remove what runs that were killed left in ``folder``: scratch files that nobody has locked.

    Args:
        prefix: of their names; a process's number follows.
    """
    for path in folder.glob(f"{prefix}*"):
        if not path.name.removeprefix(prefix).isdecimal() or path.is_symlink():
            continue
        with contextlib.suppress(MboltError):
            fd = files.open_read(path)
            try:
                if files.try_lock(fd):
                    files.unlink(path)
            finally:
                files.close(fd)


@contextlib.contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """A new file in ``folder``, locked while the context lasts and removed at its end.

    Raises:
        OutputError: when it cannot be made.
    """
    path = folder / f"{prefix}{os.getpid()}"
    fd = files.open_write(path, exclusive=True)
    try:
        files.try_lock(fd)
        yield fd, path
    finally:
        files.close(fd)
        files.unlink(path)
