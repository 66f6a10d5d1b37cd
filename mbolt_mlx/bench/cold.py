"""A cold run is one whose bytes came from the drive. That is counted, not assumed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import MboltError

NEEDED = 0.95
_DROP_ALL = Path("/proc/sys/vm/drop_caches")
_ADVICE = "read past the page cache (--direct) or run under a memory limit smaller than the model"


@dataclass(frozen=True)
class Verdict:
    """Whether a run was cold, and why not. ``share``: bytes off the drive per missed byte."""

    cold: bool
    share: float | None = None
    reason: str | None = None


def weight_files(*places: str | os.PathLike[str] | None) -> list[Path]:
    """The safetensors files at ``places``, each a folder or a file, links resolved, each once."""
    found: dict[Path, None] = {}
    for place in places:
        if place is None:
            continue
        path = Path(place)
        for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
            found[file.resolve()] = None
    return list(found)


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drop the pages of ``paths`` from the page cache. They are written out first, or they stay.

    Raises:
        ReadError: if one cannot be opened.
    """
    for path in paths:
        fd = files.open_read(path)
        try:
            files.sync(fd, path=os.fspath(path))
            files.drop_cached(fd)
        finally:
            files.close(fd)


def drop_everything() -> None:
    """Drop the page cache of the whole machine (Linux, root).

    Raises:
        MboltError: if the system refuses.
    """
    try:
        os.sync()
        _DROP_ALL.write_text("3")
    except OSError as error:
        raise MboltError(
            f"cannot drop the page cache: {error.strerror}", path=_DROP_ALL, hint="run as root"
        ) from error


def judge(phases: Iterable[tuple[str, int, int | None]]) -> Verdict:
    """Judge a run by its phases, each (name, missed bytes, bytes that the drive read or None).

    Every phase that missed anything must have had at least 0.95 of it from the drive. A run that
    missed nothing is not cold, without a reason: it read nothing.
    """
    missed = drive = 0
    reason = None
    for name, phase_missed, phase_drive in phases:
        if phase_missed <= 0:
            continue
        if phase_drive is None:
            return Verdict(False, None, "this system does not count what the drive reads")
        missed += phase_missed
        drive += phase_drive
        if phase_drive < NEEDED * phase_missed and reason is None:
            reason = (
                f"in {name} the drive read {phase_drive / phase_missed:.2f} of the missed bytes, "
                f"{NEEDED} are needed; {_ADVICE}"
            )
    if not missed:
        return Verdict(False)
    return Verdict(reason is None, drive / missed, reason)
