"""Run our driver of the patched llama.cpp on given tokens: logits, routing, scores, counters."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError, UnsupportedError
from mbolt_mlx.profile.traces import Trace, read_trace

DRIVER, STOCK_DRIVER = "mbolt-driver", "mbolt-driver-stock"
_FILE_MAX = 64 << 30


@dataclass(frozen=True)
class Way:
    """One legal way of computing; all others of the same engine give nearly the same.

    Args:
        name: for people.
        flash: flash attention.
        repack: weights copied into another order that the processor likes; nothing is streamed.
        batch: tokens in one forward pass.
        threads: of the computation.
        decode: so many of the last tokens are evaluated one at a time.
    """

    name: str = "as it is"
    flash: bool = False
    repack: bool = False
    batch: int = 512
    threads: int = 1
    decode: int = 0

    def options(self) -> list[str]:
        """The driver's."""
        return [
            *("--flash", str(int(self.flash)), "--repack", str(int(self.repack))),
            *("--batch", str(self.batch), "-t", str(self.threads)),
            *("--decode", str(self.decode)),
        ]


AS_IT_IS = Way()


@dataclass(frozen=True, eq=False)
class Run:
    """What one run of the driver gave.

    Args:
        report: its JSON line.
        logits: ``[tokens, vocabulary]`` float32, of every position, or None.
        routes: layer → ``[tokens, top_k]`` expert positions, all passes joined, or empty.
        scores: layer → ``[tokens, experts]`` float32 that the router sorted, or empty.
        trace: the same choices as ``routes`` by pass, or None.
    """

    report: dict[str, Any]
    logits: np.ndarray | None = None
    routes: Mapping[int, np.ndarray] = field(default_factory=dict)
    scores: Mapping[int, np.ndarray] = field(default_factory=dict)
    trace: Trace | None = None


def evaluate(
    model: Path,
    tokens: Sequence[int],
    way: Way = AS_IT_IS,
    *,
    driver: Path,
    logits: bool = True,
    routes: bool = True,
    scores: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Evaluate ``tokens`` of ``model`` and read what the driver wrote.

    Without ``logits`` the last layer routes only the last token of each pass, for llama.cpp leaves
    out what no output needs.

    Raises:
        UnsupportedError: when the driver refuses the model, with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="mbolt-evaluate-") as name:
        folder = Path(name)
        (folder / "tokens").write_bytes(np.asarray(tokens, "<u4").tobytes())
        command = [str(driver), "-m", str(model), "--tokens", str(folder / "tokens")]
        command += [*way.options(), "--json"]
        for wanted, option in ((logits, "logits"), (routes, "experts"), (scores, "scores")):
            if wanted:
                command += [f"--{option}", str(folder / option)]
        report = run_driver(command, model, environment)
        found = Run(report)
        if logits:
            values = np.frombuffer(_whole(folder / "logits"), "<f4")
            found = replace(found, logits=values.reshape(len(tokens), -1))
        if routes:
            trace = read_trace(folder / "experts")
            joined = {layer: trace.rows(layer) for layer in trace.layers}
            found = replace(found, routes=joined, trace=trace)
        if scores:
            found = replace(found, scores=read_scores(_whole(folder / "scores")))
    return found


def run_driver(
    command: Sequence[str], model: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run the driver and return the JSON of its last line.

    Args:
        command: its words.
        model: for the error.
        environment: all of it (default: this process's without MBOLT_…, so that no trace is written
            and nothing is prefetched).

    Raises:
        UnsupportedError: when it fails, with the last line that it wrote.
    """
    if environment is None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MBOLT_")}
    done = subprocess.run(
        list(command), capture_output=True, text=True, errors="replace", env=environment
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise UnsupportedError(
            f"{Path(command[0]).name} failed with status {done.returncode}: {lines[-1]}",
            path=model,
        )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise UnsupportedError(
            f"{Path(command[0]).name} ended without its line of JSON", path=model
        ) from error


def read_scores(data: bytes) -> dict[int, np.ndarray]:
    """The file of ``--scores``: records u32 layer, experts, tokens, then f32 [tokens, experts]."""
    parts: dict[int, list[np.ndarray]] = {}
    position = 0
    while position < len(data):
        layer, experts, tokens = np.frombuffer(data, "<u4", 3, position).tolist()
        position += 12
        if position + 4 * experts * tokens > len(data):
            raise ReadError("the scores end within a record", offset=position)
        values = np.frombuffer(data, "<f4", experts * tokens, position)
        parts.setdefault(layer, []).append(values.reshape(tokens, experts))
        position += values.nbytes
    return {layer: np.concatenate(some) for layer, some in parts.items()}


def _whole(path: Path) -> bytes:
    return files.read_whole(path, limit=_FILE_MAX)
