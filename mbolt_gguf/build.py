"""llama.cpp with our patches, built once into the user's cache.

``<cache>/llama/<key>/`` holds src, driver, build, bin, build.log and, when targets are finished,
build.json. The key is a hash of the pin, the patches, the driver and the flags, so another version
of any of them is another folder. The unpatched tree (for mbolt-driver-stock) has a folder too.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbolt_gguf import compile as compiling
from mbolt_gguf.llama_source import Pin, prepare
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import BuildError, MboltError, UsageError
from mbolt_mlx.core.output import write_whole
from mbolt_mlx.core.places import cache_folder

DRIVER, STOCK_DRIVER = "mbolt-driver", "mbolt-driver-stock"
TARGETS = ("llama-cli", "llama-server", "llama-perplexity", "llama-quantize", DRIVER)
ALSO = ("llama-completion", "llama-bench", "llama-imatrix", "llama-gguf-split", STOCK_DRIVER)
_RECORD = "build.json"


@dataclass(frozen=True)
class Variant:
    """One tree and one set of flags; ``series`` is the hash of all but the flags."""

    pin: Pin
    patched: bool
    flags: tuple[str, ...]
    series: str

    @classmethod
    def of(cls, pin: Pin, flags: Iterable[str], *, patched: bool) -> Variant:
        """The variant of ``pin`` with ``flags``."""
        driver = sorted((pin.folder / "driver").iterdir())
        total = hashlib.sha256(f"{pin.sha256} {platform.machine()} {patched}".encode())
        for path in [*(pin.patches if patched else ()), *driver]:
            total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return cls(pin, patched, tuple(flags), total.hexdigest())

    @property
    def folder(self) -> Path:
        """Where it is built."""
        key = hashlib.sha256("\n".join([self.series, *self.flags]).encode()).hexdigest()[:16]
        return cache_folder() / "llama" / key


def build(
    targets: Sequence[str] = TARGETS,
    *,
    source: Path | None = None,
    metal: bool = False,
    cuda: bool = False,
    defines: Sequence[str] = (),
    jobs: int | None = None,
    quiet: bool = False,
) -> dict[str, Path]:
    """Build ``targets`` that are not built yet and return name → binary for all of them.

    Args:
        targets: of `TARGETS` and `ALSO`; ``mbolt-driver-stock`` is built from the unpatched tree.
        source: the pinned sdist, or a folder with the pinned tree; None fetches the sdist.
        metal, cuda: with that backend; else for the processor alone.
        defines: more NAME=VALUE for cmake.
        jobs: compilers at a time; None for one a processor.

    Raises:
        UsageError: for a target that there is not.
        BuildError: when a tool is missing, the source is another one, or compiling fails.
    """
    unknown = [name for name in targets if name not in (*TARGETS, *ALSO)]
    if unknown or not targets:
        known = ", ".join((*TARGETS, *ALSO))
        raise UsageError(f"there is no target {', '.join(unknown) or '(none)'}", hint=f"of {known}")
    if metal and sys.platform != "darwin":
        raise UsageError("Metal is there on macOS only")
    pin = Pin.read()
    flags = compiling.flags(pin.commit, metal=metal, cuda=cuda, defines=defines)
    found: dict[str, Path] = {}
    for patched in (True, False):
        wanted = [name for name in targets if (name != STOCK_DRIVER) == patched]
        if wanted:
            variant = Variant.of(pin, flags, patched=patched)
            found |= _build(variant, wanted, source, jobs or os.cpu_count() or 1, quiet)
    return found


def binaries() -> dict[str, Path] | None:
    """Name → binary of what was built before with these patches, whatever the flags (the latest
    build wins); None when there is nothing."""
    try:
        pin = Pin.read()
        series = {Variant.of(pin, (), patched=patched).series for patched in (True, False)}
    except (MboltError, OSError):
        return None
    records = []
    for path in (cache_folder() / "llama").glob(f"*/{_RECORD}"):
        record = _read_record(path)
        if record.get("series") in series:
            records.append((record.get("finished", 0), path.parent))
    found = {}
    for _, folder in sorted(records):
        found |= {path.name: path for path in sorted((folder / "bin").iterdir()) if path.is_file()}
    return found or None


def binary(name: str) -> Path:
    """The built ``name``.

    Raises:
        BuildError: when it is not built.
    """
    found = (binaries() or {}).get(name)
    if found is None:
        raise BuildError(f"{name} is not built", hint="run `mbolt-gguf build-llama`")
    return found


def _build(
    variant: Variant, wanted: list[str], source: Path | None, jobs: int, quiet: bool
) -> dict[str, Path]:
    folder, started = variant.folder, time.time()
    found = {name: folder / "bin" / name for name in wanted}
    if (folder / _RECORD).exists() and all(path.is_file() for path in found.values()):
        return found
    compiling.check_tools()
    files.make_folder(folder / "bin")
    lock = files.open_write(folder / ".lock")
    try:
        if not files.try_lock(lock):
            raise BuildError("another process is building here", path=folder)
        _make_sources(variant, source, quiet)
        if not quiet:
            print(f"compiling {', '.join(wanted)} ({jobs} at a time)", file=sys.stderr)
        stock = [] if variant.patched else ["-DMBOLT_STOCK=ON"]
        tree = f"-DLLAMA_TREE={folder / 'src'}"
        log = folder / "build.log"
        compiling.configure(
            folder / "driver", folder / "build", [*variant.flags, tree, *stock], log
        )
        compiling.compile_targets(folder / "build", wanted, log, jobs=jobs, quiet=quiet)
        for name, path in found.items():
            part = path.with_name(f".{name}.partial")
            shutil.copy2(folder / "build" / "bin" / name, part)
            files.replace(part, path)
        _write_record(variant, time.time() - started)
    finally:
        files.close(lock)
    return found


def _make_sources(variant: Variant, source: Path | None, quiet: bool) -> None:
    folder = variant.folder
    if not (folder / "src").is_dir():
        prepare(variant.pin, folder / "src", source=source, patched=variant.patched, quiet=quiet)
    if not (folder / "driver").is_dir():
        part = folder / ".driver.partial"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(variant.pin.folder / "driver", part)
        files.replace(part, folder / "driver")


def _write_record(variant: Variant, seconds: float) -> None:
    path = variant.folder / _RECORD
    earlier = _read_record(path).get("seconds", 0.0)
    record = {
        "version": 1,
        "series": variant.series,
        "patched": variant.patched,
        "commit": variant.pin.commit,
        "flags": list(variant.flags),
        "seconds": round(earlier + seconds, 1),
        "finished": time.time(),
    }
    write_whole(path, json.dumps(record, indent=1).encode())


def _read_record(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
