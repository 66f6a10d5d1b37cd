"""Which measurements, in which order, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mbolt_mlx.bench.measure import Job
from mbolt_mlx.bench.worker import MARK
from mbolt_mlx.core.errors import UsageError

Setting = TypeVar("Setting")
WORKER = (sys.executable, "-m", "mbolt_mlx.bench.worker")


def alternating(settings: Sequence[Setting], runs: int) -> Iterator[tuple[int, int, Setting]]:
    """``runs`` rounds over ``settings``, every other one backwards, as (round, place, setting).

    A drift of the machine then falls on all settings alike.

    Raises:
        UsageError: without settings or runs.
    """
    if not settings or runs < 1:
        raise UsageError("nothing to measure", expected="at least one setting and one run")
    for round_ in range(runs):
        order = range(len(settings))
        for place in order if round_ % 2 == 0 else reversed(order):
            yield round_, place, settings[place]


def settings_of(
    base: Job, residents: Sequence[float], side_files: Sequence[str | None], baseline: bool
) -> list[Job]:
    """One job for each residency and side-file, after stock mlx-lm if ``baseline``.

    Raises:
        UsageError: for a residency that is not above 0 and at most 1.
    """
    jobs = [replace(base, engine="mlx-lm", resident=None, side_file=None)] if baseline else []
    for resident in residents:
        if not 0 < resident <= 1:
            raise UsageError("a residency is above 0 and at most 1", found=resident)
        for side_file in side_files:
            jobs.append(replace(base, engine="mbolt", resident=resident, side_file=side_file))
    return jobs


def run_job(
    job: Job,
    *,
    command: Sequence[str] = WORKER,
    prefix: Sequence[str] = (),
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Run ``job`` in a fresh process and return its result; a failure is {"engine", "error"}.

    Args:
        command: the worker; it reads the job from stdin.
        prefix: put before the command, such as one that sets the kernel's limits.
    """
    try:
        done = subprocess.run(
            [*prefix, *command],
            input=json.dumps(job.as_dict()),
            capture_output=True,
            text=True,
            env=environment(),
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return failed(job, f"not finished after {timeout_s:g} s")
    except OSError as error:
        return failed(job, f"cannot start {[*prefix, *command][0]}: {error.strerror}")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            result = json.loads(line[len(MARK) :])
            return failed(job, result["error"]) if "error" in result else result
    last = done.stderr.strip().splitlines()[-3:]
    why = "killed by the system, out of memory?" if done.returncode in (-9, 137) else ""
    return failed(job, " | ".join(filter(None, [f"exit {done.returncode}", why, *last])))


def failed(job: Job, error: str) -> dict[str, Any]:
    """The entry of a run that gave no figures."""
    return {
        "engine": job.engine,
        "resident": 1.0 if job.engine == "mlx-lm" else job.resident,
        "side_file": job.side_file,
        "policy": None if job.engine == "mlx-lm" else job.policy,
        "cold": False,
        "error": error,
    }


def environment() -> dict[str, str]:
    """The environment of a worker: this one, and this package can be imported."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_all(
    settings: Sequence[Job],
    runs: int,
    *,
    run: Callable[[Job], dict[str, Any]] | None = None,
    done: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run every setting ``runs`` times in alternating order, with ``run`` or ``run_job``.

    ``done`` sees all results after each run.
    Each result gets ``round``, ``setting`` (its place in ``settings``) and ``order`` (when it ran).
    """
    results: list[dict[str, Any]] = []
    for order, (round_, place, job) in enumerate(alternating(settings, runs)):
        result = (run or run_job)(job)
        result.update(round=round_, setting=place, order=order)
        results.append(result)
        if done is not None:
            done(results)
    return results
