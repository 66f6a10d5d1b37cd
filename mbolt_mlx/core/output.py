"""Files are written whole or not at all.

A large file grows under a hidden name beside its target, with a journal of the units that are on
the drive; a later run with the same stamp goes on where the last one ended. Only a finished file
gets the target's name, in one step.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mbolt_mlx.core import files, streams
from mbolt_mlx.core.errors import OutputError
from mbolt_mlx.core.sizes import format_size

_MAGIC = "mbolt-journal 1"
_JOURNAL_MAX = 1 << 30


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` as the file ``path``: under another name first, synced, then renamed.

    Of a link it is the file that the link leads to. A pipe or a device, such as /dev/stdout, keeps
    its name and is written to.

    Raises:
        OutputError: when it cannot be written; an older file ``path`` is then unharmed.
    """
    if streams.is_special(path):
        streams.write_stream(path, data)
        return
    path = Path(os.path.realpath(path) if os.path.islink(path) else path)
    partial = path.with_name(f".{path.name}.partial")
    fd = _open_locked(partial, path)
    try:
        files.truncate(fd, 0, path=str(partial))
        files.pwrite_all(fd, data, 0, path=str(path))
        files.sync(fd, path=str(path))
        files.replace(partial, path)
    except BaseException:
        files.unlink(partial)
        raise
    finally:
        files.close(fd)


def check_not_pipe(path: str | os.PathLike[str]) -> None:
    """Refuse a pipe, socket or drive that lies in a folder: opening it may wait for ever.

    A terminal, /dev/null, and the pipes that the shell names in /dev are there to be written to.

    Raises:
        OutputError: when ``path`` is one.
    """
    if not streams.is_special(path) or Path(path).is_char_device():
        return
    if not (Path(path).is_fifo() and os.path.abspath(path).startswith(("/dev/", "/proc/"))):
        raise OutputError("a pipe or a device; name a file", path=path)


@dataclass
class Output:
    """A large file in the making. Use ``open_output``; all methods may be called by any thread.

    ``done`` maps the number of a unit, finished in an earlier run, to what was recorded of it.
    """

    target: Path
    partial: Path
    journal: Path
    size: int
    fd: int
    lock_fd: int
    done: dict[int, str]
    direct: bool = False
    _journal_end: int = 0
    _pending: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _syncing: threading.Lock = field(default_factory=threading.Lock)

    def write(self, buffer: memoryview | bytes, offset: int) -> None:
        """Write ``buffer`` at byte ``offset`` of the file.

        Raises:
            OutputError: when the drive is full or fails, or the file would outgrow its size.
        """
        if offset < 0 or offset + len(buffer) > self.size:
            raise OutputError("a write past the end", path=self.target, offset=offset)
        try:
            files.pwrite_all(self.fd, buffer, offset, path=str(self.target))
        except OutputError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and files.is_full(cause):
                raise OutputError(
                    error.message, path=error.path, offset=error.offset,
                    hint=f"{error.hint}: it resumes",
                ) from cause  # fmt: skip
            if not (isinstance(cause, OSError) and cause.errno == errno.EINVAL and self.direct):
                raise
            self._leave_direct()
            files.pwrite_all(self.fd, buffer, offset, path=str(self.target))

    def _leave_direct(self) -> None:
        """Some file systems open a file for direct writes and then refuse them."""
        with self._lock:
            if self.direct:
                fd = files.open_write(self.partial)
                files.make_alias(fd, self.fd)
                files.close(fd)
                self.direct = False

    def record(self, unit: int, note: str) -> None:
        """Remember that ``unit`` was written; it counts as done after the next ``checkpoint``."""
        with self._lock:
            self._pending.append((unit, note))

    def checkpoint(self) -> None:
        """Bring what was written to the drive, then enter the recorded units in the journal.

        The order matters: after a crash the journal names no unit whose bytes are not there.

        Raises:
            OutputError: when the drive reports a failure.
        """
        with self._syncing:
            with self._lock:
                pending, self._pending = self._pending, []
            files.sync_data(self.fd, path=str(self.partial))
            if pending:
                lines = b"".join(_line(f"{unit} {note}") for unit, note in pending)
                files.pwrite_all(self.lock_fd, lines, self._journal_end, path=str(self.journal))
                self._journal_end += len(lines)
                self.done.update(pending)

    def commit(self, companions: Iterable[tuple[Path, bytes]] = ()) -> None:
        """Give the finished file its name; before that, write small files that belong to it.

        A crash in between leaves a companion without the file it describes, so companions must
        be checked against the file by whoever reads them. The next run then finishes.

        Raises:
            OutputError: when the system refuses.
        """
        self.checkpoint()
        files.sync(self.fd, path=str(self.partial))
        for path, data in companions:
            write_whole(path, data)
        files.replace(self.partial, self.target)
        files.unlink(self.journal)
        self.close()

    def discard(self) -> None:
        """Remove all that was written so far."""
        files.unlink(self.partial)
        files.unlink(self.journal)
        self.close()

    def close(self) -> None:
        """Let go of the files; what was written stays for a later run."""
        for name in ("fd", "lock_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                files.close(fd)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_output(
    target: str | os.PathLike[str],
    size: int,
    stamp: str,
    *,
    resume: bool = True,
    direct: bool = False,
) -> Output:
    """Begin the file ``target`` of ``size`` bytes, or go on with it.

    With ``direct`` the page cache is bypassed where the file system lets it; whoever writes then
    keeps buffers, lengths and offsets to multiples of 4096.

    An earlier attempt is continued when it had the same ``stamp`` and ``size``; any other is
    thrown away. The space is reserved before this returns.

    Raises:
        OutputError: when another process is writing this target, the folder cannot be written,
            the drive has too little space, or the target is a pipe or a device.
    """
    target = Path(target)
    if streams.is_special(target):
        raise OutputError("a pipe or a device; name a file", path=target)
    partial, journal = partial_paths(target)
    lock_fd = _open_locked(journal, target)
    fd, done = -1, {}
    try:
        first = _line(f"{_MAGIC} {size} {stamp}")
        done, end = _read_journal(journal, first, size) if resume else ({}, 0)
        if not end or not partial.exists():
            done, end = {}, len(first)
            files.unlink(partial)
            files.truncate(lock_fd, 0, path=str(journal))
            files.pwrite_all(lock_fd, first, 0, path=str(journal))
        else:
            files.truncate(lock_fd, end, path=str(journal))
        check_space(target, size)
        fd, direct = _open_partial(partial, direct)
        files.preallocate(fd, size, path=str(target))
        return Output(target, partial, journal, size, fd, lock_fd, done, direct, end)
    except BaseException:
        if not done:  # nothing was begun that is worth keeping
            files.unlink(partial)
            files.unlink(journal)
        if fd >= 0:
            files.close(fd)
        files.close(lock_fd)
        raise


def partial_paths(target: Path) -> tuple[Path, Path]:
    """The names under which ``target`` grows: its bytes and its journal."""
    return (
        target.with_name(f".{target.name}.partial"),
        target.with_name(f".{target.name}.partial.journal"),
    )


def check_space(target: Path, size: int) -> None:
    """Refuse when ``size`` bytes do not fit on the drive of ``target``.

    What an unfinished attempt already takes up is not needed again.

    Raises:
        OutputError: with the bytes that are needed and free.
    """
    needed = size - files.allocated_bytes(partial_paths(target)[0])
    free = files.free_space(target.parent)
    if needed > free:
        raise OutputError(
            "the drive has too little space", path=target,
            expected=f"{format_size(needed)} ({needed} bytes) more",
            found=f"{format_size(free)} ({free} bytes) free",
        )  # fmt: skip


def _open_locked(path: Path, target: Path) -> int:
    """A descriptor of ``path``, made if absent, locked, and still the file of that name."""
    while True:
        try:
            fd = files.open_write(path)
        except OutputError as error:  # nobody asked for the hidden name
            raise OutputError(error.message, path=target) from error
        if not files.try_lock(fd):
            files.close(fd)
            raise OutputError("another process is writing this file now", path=target)
        if files.is_same_file(fd, path):
            return fd
        files.close(fd)  # its last owner finished and renamed or removed it


def _open_partial(partial: Path, direct: bool) -> tuple[int, bool]:
    if direct:
        try:
            return files.open_write(partial, direct=True), True
        except OutputError:
            pass  # no direct writes here; any other reason shows below
    return files.open_write(partial), False


def _line(text: str) -> bytes:
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _read_journal(journal: Path, first: bytes, size: int) -> tuple[dict[int, str], int]:
    """What a journal that begins with ``first`` says, up to the first torn line, and its end."""
    raw = files.read_whole(journal, limit=_JOURNAL_MAX)
    if not raw.startswith(first):
        return {}, 0
    done: dict[int, str] = {}
    end = len(first)
    for line in raw[end:].split(b"\n")[:-1]:
        text = line[9:].decode("ascii", "replace")
        unit, _, note = text.partition(" ")
        if _line(text) != line + b"\n" or not unit.isdigit():
            break
        done[int(unit)] = note
        end += len(line) + 1
    return done, end
