"""Run cmake and what it generates for, with a bar, and find the line that matters when it fails."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mbolt_mlx.core.errors import BuildError

_STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]")
_FAULT = re.compile(r"(?:fatal )?error[ :]|CMake Error|undefined reference|No space left", re.I)
_COMMON = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_NUMBER=0",
]
# A native build on a processor with AMX moves weights into a layout of its own, and has crashed.
_X86 = ["GGML_AVX2", "GGML_FMA", "GGML_F16C", "GGML_BMI2"]


def flags(commit: str, *, metal: bool, cuda: bool, defines: Sequence[str]) -> list[str]:
    """The options of cmake that decide what is built; ``defines`` are NAME=VALUE and come last."""
    found = [*_COMMON, f"-DLLAMA_BUILD_COMMIT={commit}"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        found += ["-DGGML_NATIVE=OFF", *(f"-D{name}=ON" for name in _X86)]
    if sys.platform == "darwin":
        found.append(f"-DGGML_METAL={'ON' if metal else 'OFF'}")
    if cuda:
        found.append("-DGGML_CUDA=ON")
    return found + [f"-D{text}" for text in defines]


def check_tools() -> None:
    """Refuse when there is no cmake, no compiler, or nothing that cmake generates for.

    Raises:
        BuildError: naming what is missing and how to get it.
    """
    wanted = {
        "cmake": [["cmake"]],
        "a C compiler": [[os.environ.get("CC") or "cc"], ["gcc"], ["clang"]],
        "a C++ compiler": [[os.environ.get("CXX") or "c++"], ["g++"], ["clang++"]],
        "ninja or make": [["ninja"], ["make"]],
    }
    missing = [
        what
        for what, choices in wanted.items()
        if not any(shutil.which(choice[0].split()[0]) for choice in choices)
    ]
    if missing:
        how = "apt install cmake g++ ninja-build"
        if sys.platform == "darwin":
            how = "xcode-select --install, and cmake from your package manager"
        raise BuildError(f"{' and '.join(missing)} is not installed", hint=f"for example: {how}")


def configure(source: Path, build: Path, options: Sequence[str], log: Path) -> None:
    """Run cmake; objects come from ccache when it is on the PATH.

    Raises:
        BuildError: with cmake's first complaint.
    """
    command = ["cmake", "-S", str(source), "-B", str(build), *options]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    if shutil.which("ccache"):
        command += [f"-DCMAKE_{name}_COMPILER_LAUNCHER=ccache" for name in ("C", "CXX")]
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(build)
        )
    if done.returncode:
        raise BuildError(f"cmake failed: {_fault(log)}", path=log)


def compile_targets(
    build: Path, targets: Sequence[str], log: Path, *, jobs: int, quiet: bool
) -> None:
    """Compile ``targets`` with ``jobs`` compilers at a time.

    Raises:
        BuildError: with the first error of the compiler.
    """
    command = ["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *targets]
    bar = None
    if not quiet and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=0, desc="compiling", unit=" steps", file=sys.stderr)
    with log.open("a") as file:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=_environment(build),
        )  # fmt: skip
        try:
            for line in child.stdout or ():
                file.write(line)
                step = _STEP.match(line)
                if bar is not None and step:
                    bar.total = int(step[2] or 100)
                    bar.n = int(step[1])
                    bar.refresh()
            status = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        finally:
            if bar is not None:
                bar.close()
    if status:
        raise BuildError(f"compiling failed: {_fault(log)}", path=log)


def _environment(build: Path) -> dict[str, str]:
    """With relative names ccache finds what was compiled in another folder."""
    base = {"CCACHE_BASEDIR": str(build.parent), "CCACHE_NOHASHDIR": "1"}
    return {**base, "CCACHE_SLOPPINESS": "time_macros", **os.environ}


def _fault(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for place, line in enumerate(lines):
        if _FAULT.search(line):
            following = lines[place + 1 : place + 2] if line.startswith("CMake Error") else []
            return " ".join([line, *following])[:300]
    return lines[-1][:300] if lines else "it said nothing"
