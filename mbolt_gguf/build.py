"""llama.cpp with our patches, built once into the user's cache.

``<cache>/llama/<key>/`` holds bin and build.json. The key is a hash of the pin, the patches, the
driver and the flags, so another version of any of them is another folder; the unpatched tree (for
mbolt-driver-stock) has one too. All are compiled in ``<cache>/llama/work/``, which keeps the last
one's sources and objects: names in there are the same for every key, so ccache finds what did not
change.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
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
# To be loaded before an unmodified libllama; of Linux only.
PRELOAD = "libmbolt-preload.so"
TARGETS = (
    *("llama-cli", "llama-server", "llama-perplexity", "llama-quantize", DRIVER),
    *((PRELOAD,) if sys.platform == "linux" else ()),
)
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
        driver = sorted(path for path in (pin.folder / "driver").rglob("*") if path.is_file())
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
    if source is not None and not source.exists():  # even where nothing is left to be built of it
        raise BuildError("no such file or folder", path=source)
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
        names = sorted(path.name for path in (folder / "bin").iterdir())
        found |= {name: folder / "bin" / name for name in names if not name.startswith(".")}
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
    work = folder.parent / "work"
    files.make_folder(work)
    files.make_folder(folder / "bin")
    lock = files.open_write(work / ".lock")
    try:
        if not files.try_lock(lock):
            raise BuildError("another process is building here", path=work)
        _make_sources(variant, work, source, quiet)
        if not quiet:
            print(f"compiling {', '.join(wanted)} ({jobs} at a time)", file=sys.stderr)
        # Shared, as most people have it, so that PRELOAD can be tried on it.
        stock = [] if variant.patched else ["-DMBOLT_STOCK=ON", "-DBUILD_SHARED_LIBS=ON"]
        options = [*variant.flags, f"-DLLAMA_TREE={work / 'src'}", *stock]
        log = work / "build.log"
        compiling.configure(work / "driver", work / "build", options, log)
        compiling.compile_targets(work / "build", wanted, log, jobs=jobs, quiet=quiet)
        built = work / "build" / "bin"
        libraries = [] if variant.patched else _libraries(built)
        for name in [*libraries, *found]:
            part = folder / "bin" / f".{name}.partial"
            shutil.copy2(built / name, part)
            files.replace(part, folder / "bin" / name)
        _write_record(variant, time.time() - started)
    finally:
        files.close(lock)
    return found


def _libraries(folder: Path) -> list[str]:
    """The names in ``folder`` by which programs ask for llama.cpp's libraries."""
    name = re.compile(r"lib.+(?:\.so\.\d+|\.\d+\.dylib)")
    return sorted(path.name for path in folder.iterdir() if name.fullmatch(path.name))


def _make_sources(variant: Variant, work: Path, source: Path | None, quiet: bool) -> None:
    """Fill ``work`` for ``variant``, unless it is there from an earlier build."""
    stamp = work / "key"
    if stamp.is_file() and stamp.read_text() == variant.folder.name:
        return
    files.unlink(stamp)
    for name in ("build", "driver"):
        shutil.rmtree(work / name, ignore_errors=True)
    prepare(variant.pin, work / "src", source=source, patched=variant.patched, quiet=quiet)
    shutil.copytree(variant.pin.folder / "driver", work / "driver")
    write_whole(stamp, variant.folder.name.encode())


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
