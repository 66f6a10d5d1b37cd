"""What it takes to start a binary of llama.cpp so that experts are streamed: flags and environment.

The flags are those of the pinned version. The user's own come last and win; a flag of ours is left
out where the user says the same thing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbolt_gguf.blocks import AUTO, WHOLE, choose_blocks
from mbolt_gguf.build import PRELOAD, binary
from mbolt_gguf.elf import needed_libraries
from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.interleaved import KEY_INTERLEAVED
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import is_stale, map_path, write_map
from mbolt_mlx.core.errors import BuildError, UnsupportedError
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.mblt import is_mblt
from mbolt_mlx.profile.trace_file import refuse_other

MODES, ADVICES = ("read", "willneed"), ("random", "none")
# GNU's OpenMP lets a thread that waits spin for milliseconds, on the core that another one needs to
# read the experts that it waits for. So much is a few microseconds: from product to product.
SPIN = {"GOMP_SPINCOUNT": "1000"}
_WAITING = {"OMP_WAIT_POLICY", *SPIN}

_MAPPED = ("--load-mode", "mmap")
# What streaming needs → the user's flags that speak of the same.
_FLAGS: dict[tuple[str, ...], tuple[str, ...]] = {
    # A repacked weight is a copy in memory: nothing is left to stream.
    ("--no-repack",): ("--repack", "-nr", "--no-repack"),
    ("--cpu-moe",): ("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor"),
    _MAPPED: ("-lm", "--load-mode"),
    # The warm-up goes through every expert: it would read the whole model.
    ("--no-warmup",): ("--warmup", "--no-warmup"),
}
# Large batches would be copied to a GPU slice by slice, which blocks of pieces do not allow.
_INTERLEAVED = {("--no-op-offload",): ("--op-offload", "--no-op-offload")}


@dataclass(frozen=True)
class Prefetch:
    """How chosen experts are read.

    Args:
        mode: ``read`` waits for them; ``willneed`` only tells the system.
        threads: reads at a time.
        advice: ``random`` turns readahead off in the experts' part of the memory map.
        stats: print totals at the end.
        blocks: how the blocks of an interleaved file are read: of `BLOCKS`, or "auto".
        law: of the drive, for "auto".
    """

    mode: str = "read"
    threads: int = 4
    advice: str = "random"
    stats: bool = False
    blocks: str = AUTO
    law: Law | None = None

    def blocks_of(self, layers: Sequence[MoeLayer]) -> str | None:
        """How the blocks of ``layers`` are to be read; None for what the map that is there says.

        Nothing is computed while reads are waited for, so there is nothing to gain from slices.
        """
        if self.blocks != AUTO:
            return self.blocks
        if self.law is None:
            return None
        return choose_blocks(layers, self.law) if self.mode == "willneed" else WHOLE

    def environment(self, path: Path) -> dict[str, str]:
        """The patches' variables, for the map ``path``."""
        return {
            "MBOLT_PREFETCH": str(path),
            "MBOLT_PREFETCH_MODE": self.mode,
            "MBOLT_PREFETCH_THREADS": str(self.threads),
            "MBOLT_PREFETCH_ADVICE": self.advice,
            **({"MBOLT_PREFETCH_STATS": "1"} if self.stats else {}),
        }


@dataclass(frozen=True)
class Launch:
    """A program, its arguments (the first is its name) and its environment."""

    program: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def start(self) -> None:
        """Become the program; returns only by raising.

        Raises:
            BuildError: when the system refuses to start it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execve(self.program, self.arguments, self.environment)
        except OSError as error:
            raise BuildError(f"cannot start: {error.strerror}", path=self.program) from error


def prepare(
    name: str,
    path: str | Path,
    flags: Sequence[str] = (),
    *,
    prefetch: Prefetch | None = Prefetch(),  # noqa: B008 (frozen)
    trace: Path | None = None,
    own: Path | None = None,
) -> Launch:
    """The launch of the built ``name`` with the model ``path`` and the user's ``flags``.

    The prefetch map is written first when it is missing or stale, or reads blocks in another way
    than ``prefetch`` asks for. A model without experts gets no
    map, and none of our flags.

    Args:
        own: a program of an unmodified llama.cpp, started instead of ``name`` with our library
            loaded before its own; experts cannot be interleaved there.

    Raises:
        BuildError: when ``name``, or the library for ``own``, is not built.
        GgufError, UnsupportedError: when the model is malformed, or ``own`` cannot take our library
            or the model.
        OutputError: when the map cannot be written, or ``trace`` is a file of another kind.
    """
    model = Model.open(path)
    layers = find_experts(model)
    if trace is not None:
        refuse_other(trace, is_mblt)
    program = binary(name) if own is None else own.absolute()
    ours: list[str] = []
    environment = dict(os.environ)
    if own is not None:
        before = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = ":".join(
            [str(_preload_for(program, model)), *([before] if before else [])]
        )
    if layers:
        wanted = {**_FLAGS, **(_INTERLEAVED if model.get(KEY_INTERLEAVED) else {})}
        if own is not None:  # older versions do not know the flag, and map the file without it
            wanted.pop(_MAPPED)
        for flag, same in wanted.items():
            if not any(given.partition("=")[0] in same for given in flags):
                ours += flag
        if prefetch is not None:
            place, blocks = map_path(model), prefetch.blocks_of(layers)
            if is_stale(model, blocks=blocks):
                write_map(model, blocks=blocks or WHOLE)
            environment |= prefetch.environment(place)
            if not _WAITING & environment.keys():
                environment |= SPIN
    if trace is not None:
        environment["MBOLT_TRACE"] = str(trace)
    arguments = (str(program), "-m", str(model.path), *ours, *flags)
    return Launch(program, arguments, environment)


def _preload_for(program: Path, model: Model) -> Path:
    """Our library, when the unmodified ``program`` can take it and ``model``."""
    if sys.platform != "linux":
        raise UnsupportedError(
            "an unmodified llama.cpp can be helped on Linux only",
            path=program, hint="leave it to what `mbolt-gguf build-llama` builds",
        )  # fmt: skip
    if model.get(KEY_INTERLEAVED):
        raise UnsupportedError(
            "an unmodified llama.cpp cannot load interleaved experts",
            path=model.path, hint="leave it to what `mbolt-gguf build-llama` builds",
        )  # fmt: skip
    if not any(name.startswith(("libllama", "libggml")) for name in needed_libraries(program)):
        raise UnsupportedError(
            "it is not linked to llama.cpp's shared libraries (libllama, libggml-base), so nothing "
            "can be put before them",
            path=program, hint="if it is of llama.cpp, build that with -DBUILD_SHARED_LIBS=ON",
        )  # fmt: skip
    library = binary(PRELOAD)
    if set(str(library)) & set(" :"):
        raise UnsupportedError(
            "LD_PRELOAD takes no path with a space or a colon",
            path=library,
            hint="set XDG_CACHE_HOME",
        )
    return library
