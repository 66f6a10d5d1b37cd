"""What a drive can do: seconds a read by its size and by how many are under way, past the cache."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx import __version__
from mbolt_mlx.core import files, reads
from mbolt_mlx.core.errors import ReadError, TraceError, UsageError
from mbolt_mlx.core.scratch import remove_left, scratch
from mbolt_mlx.profile.law import Law, errors, fit

FORMAT, VERSION = "mbolt-probe", 1
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 4, 16)
FILE_BYTES = 512 << 20
LEAST_BYTES = 64 << 20
_PAGE = 4096
# What a file may say of a drive: seconds that a read adds, bytes a second.
_T_OP_MAX, _RATE_MIN, _RATE_MAX = 10.0, 1e3, 1e15
_SIZE_MAX = 16 << 20
_WARM_UP = 0.2
_SCRATCH = ".mbolt-probe-"


@dataclass(frozen=True)
class Point:
    """``seconds`` that one read of ``nbytes`` adds with ``depth`` under way: wall time ÷ reads."""

    nbytes: int
    depth: int
    reads: int
    seconds: float


@dataclass(frozen=True)
class Probe:
    """A drive, measured.

    Args:
        path: the file that was read, or the folder in which one was written for it.
        direct: whether the page cache was bypassed; else the file was dropped from it.
        points: what was measured.
        laws: depth → the law that fits the points of that depth.
        worst: depth → the largest relative error of its law.
    """

    path: str
    direct: bool
    points: tuple[Point, ...]
    laws: dict[int, Law]
    worst: dict[int, float]

    def law(self, depth: int = reads.THREADS) -> Law:
        """The law at ``depth``, or at the depth that comes nearest."""
        nearest = min(self.laws, key=lambda d: abs(np.log2(d / depth)))
        return self.laws[nearest]

    def document(self) -> dict[str, Any]:
        """The probe as JSON values; ``t_op_s`` and ``bytes_per_s`` are of the engine's depth."""
        law = self.law()
        return {
            "format": FORMAT,
            "version": VERSION,
            "tool": f"mbolt-mlx {__version__}",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "path": self.path,
            "direct": self.direct,
            "depth": min(self.laws, key=lambda d: abs(np.log2(d / reads.THREADS))),
            **law_document(law),
            "laws": [
                {"depth": depth, **law_document(one), "worst_error": self.worst[depth]}
                for depth, one in sorted(self.laws.items())
            ],
            "points": [
                {"bytes": p.nbytes, "depth": p.depth, "reads": p.reads, "s_per_read": p.seconds}
                for p in self.points
            ],
        }


def probe(
    folder: str | Path,
    *,
    seconds: float = 30.0,
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = DEPTHS,
    file_bytes: int = FILE_BYTES,
    step: Callable[[int, int], None] | None = None,
) -> Probe:
    """Measure the drive that ``folder`` (or the file of that name) lies on.

    Reads a large file that is there; where none is, writes one of random bytes and removes it.

    Args:
        folder: a folder, or one file to read.
        seconds: about how long the reads take in all.
        sizes, depths: of the reads.
        file_bytes: size of the file that is written.
        step: called with (measurements done, measurements in all).

    Raises:
        UsageError: when there is no such folder, or the file is too small.
        ReadError, OutputError: when the drive refuses.
    """
    place = Path(folder)
    if not place.exists():
        raise UsageError("no such folder", path=place)
    if place.is_dir():
        remove_left(place, _SCRATCH)
    target = place if place.is_file() else _largest(place)
    if target is not None:
        return _measure(target, seconds, sizes, depths, step)
    nbytes = min(file_bytes, files.free_space(place) // 2)
    if nbytes < LEAST_BYTES:
        raise UsageError("too little space to probe this drive", path=place)
    with scratch(place, _SCRATCH) as (fd, made):
        _fill(fd, nbytes, made)
        found = _measure(made, seconds, sizes, depths, step)
    return replace(found, path=str(place.resolve()))


def law_document(law: Law) -> dict[str, Any]:
    """The law as JSON values; `read_probe` reads them."""
    return {"t_op_s": law.t_op, "bytes_per_s": law.bandwidth, "slower": law.slower}


def read_probe(document: dict[str, Any]) -> Law:
    """The law in a probe's JSON, or in any JSON object with ``t_op_s`` and ``bytes_per_s``.

    ``slower`` (whether the slower of the two decides) is false where it is left out.

    Raises:
        TraceError: when it has none.
    """
    values = document.get("t_op_s"), document.get("bytes_per_s")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise TraceError("not the result of a probe: it has no t_op_s and bytes_per_s")
    t_op, rate = values
    # Nor infinite, nor not a number.
    if not (0 <= t_op <= _T_OP_MAX and _RATE_MIN <= rate <= _RATE_MAX):
        raise TraceError(
            "the probe's figures have no meaning",
            expected=f"0 to {_T_OP_MAX:g} s a read, {_RATE_MIN:g} to {_RATE_MAX:g} bytes/s",
            found=f"{_short(t_op)} s, {_short(rate)} bytes/s",
        )
    slower = document.get("slower", False)
    if not isinstance(slower, bool):
        raise TraceError("the probe's figures have no meaning", found=f"slower {_short(slower)}")
    return Law(float(t_op), float(rate), slower)


def read_laws(document: dict[str, Any]) -> dict[int, Law]:
    """Reads at a time → law, of a probe's JSON; none where it has no ``laws``.

    Raises:
        TraceError: when they have no meaning.
    """
    laws = document.get("laws", [])
    if not isinstance(laws, list) or not all(isinstance(one, dict) for one in laws):
        raise TraceError("the probe's laws have no meaning")
    out = {}
    for one in laws:
        depth = one.get("depth")
        if type(depth) is not int or not 0 < depth <= 1 << 16:
            raise TraceError("the probe's laws have no meaning", found=f"depth {_short(depth)}")
        out[depth] = read_probe(one)
    return out


def _short(value: object) -> str:
    """``value`` of a file, for an error: never more than a few words of it."""
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:20]}…"


def open_probe(path: str | Path) -> dict[str, Any]:
    """The JSON of a probe.

    Raises:
        ReadError: when it cannot be read.
        TraceError: when it is not JSON, or no probe, or of a newer version.
    """
    data = files.read_whole(path, limit=_SIZE_MAX)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"not JSON: {error}", path=path, hint="`mbolt-mlx probe -o FILE` writes a probe"
        ) from error
    if not isinstance(document, dict):
        raise TraceError("not the result of a probe", path=path)
    kind, version = document.get("format", FORMAT), document.get("version", VERSION)
    if kind != FORMAT:
        raise TraceError(
            "not the result of a probe", path=path, expected=FORMAT, found=f"format {_short(kind)}"
        )
    if type(version) is not int or not 0 < version <= VERSION:
        raise TraceError(
            "an unknown version of a probe",
            path=path,
            expected=VERSION,
            found=_short(version),
            hint="measure again with `mbolt-mlx probe`",
        )
    try:
        read_probe(document)
        read_laws(document)
    except TraceError as error:
        raise TraceError(
            error.message, path=path, expected=error.expected, found=error.found
        ) from None
    return document


def _largest(folder: Path) -> Path | None:
    """The largest file directly in ``folder``, if it is large enough to be read at random."""
    found = [(e.stat().st_size, e.path) for e in os.scandir(folder) if e.is_file()]
    size, path = max(found, default=(0, ""))
    return Path(path) if size >= LEAST_BYTES else None


def _fill(fd: int, nbytes: int, path: Path) -> None:
    """Write random bytes, because drives are faster on zeros, and bring them to the drive."""
    rng, position = np.random.default_rng(), 0
    while position < nbytes:
        chunk = rng.bytes(min(16 << 20, nbytes - position))
        files.pwrite_all(fd, chunk, position, path=str(path))
        position += len(chunk)
    files.sync(fd, path=str(path))
    files.drop_cached(fd)


def _measure(
    path: Path,
    seconds: float,
    sizes: Sequence[int],
    depths: Sequence[int],
    step: Callable[[int, int], None] | None,
) -> Probe:
    fd, direct = files.open_cold(path)
    try:
        size, _ = files.size_and_mtime(fd)
        least = 4 * sorted(sizes)[1]
        sizes = [n for n in sizes if n <= size // 4]
        if len(sizes) < 2:
            raise UsageError(
                "the file is too small to probe a drive with",
                path=path,
                expected=f"at least {least} bytes",
                found=size,
                hint="name another one, or a folder",
            )
        each = seconds / (len(sizes) * len(depths))
        points = []
        for number, (depth, nbytes) in enumerate((d, n) for d in depths for n in sizes):
            points.append(_point(fd, size, nbytes, depth, each, number, cold=not direct))
            if step is not None:
                step(number + 1, len(sizes) * len(depths))
    finally:
        files.close(fd)
    laws, worst = {}, {}
    for depth in depths:
        measured = [(1.0, p.nbytes, p.seconds) for p in points if p.depth == depth]
        laws[depth] = fit(measured)
        worst[depth] = max(abs(e) for e in errors(laws[depth], measured))
    return Probe(str(path), direct, tuple(points), laws, worst)


def _point(
    fd: int, size: int, nbytes: int, depth: int, seconds: float, seed: int, *, cold: bool
) -> Point:
    """Read at random aligned places, ``depth`` threads at once, for about ``seconds``."""
    rng = np.random.default_rng(seed)
    places = (size - nbytes) // _PAGE
    buffers = reads.slot_buffers(depth, nbytes)
    if cold:
        files.drop_cached(fd)
        files.advise_random(fd)
    offsets = (rng.integers(0, places + 1, 1 << 16) * _PAGE).tolist()
    # A control group's or a cloud volume's limit lets a first burst through.
    _read_for(fd, buffers, offsets, seconds * _WARM_UP, least=depth)
    reads_done, took = _read_for(fd, buffers, offsets, seconds * (1 - _WARM_UP), least=2 * depth)
    return Point(nbytes, depth, reads_done, took / reads_done)


def _read_for(
    fd: int, buffers: Sequence[memoryview], offsets: Sequence[int], seconds: float, *, least: int
) -> tuple[int, float]:
    """One thread a buffer, ``least`` reads or more for about ``seconds``: (reads, seconds)."""
    lock = threading.Lock()
    done = [0]
    failed: list[BaseException] = []
    start = time.perf_counter()
    deadline = start + seconds

    def work(buffer: memoryview) -> None:
        try:
            while True:
                with lock:
                    number = done[0]
                    if number >= least and time.perf_counter() >= deadline or failed:
                        return
                    done[0] += 1
                files.pread_into(fd, [buffer], offsets[number % len(offsets)])
        except ReadError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return done[0], time.perf_counter() - start
