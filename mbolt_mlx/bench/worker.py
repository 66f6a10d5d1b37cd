"""The process of one measurement: a job as JSON on stdin, its result as the last line of stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mbolt_mlx.bench.measure import Counts, Engine, Job, measure
from mbolt_mlx.core.errors import MboltError, UsageError

MARK = "RESULT "


class StockEngine:
    """mlx-lm as it is, everything in memory."""

    def __init__(self) -> None:
        self.model: Any = None
        self._sizes: dict[str, Any] = {}

    def import_only(self) -> None:
        import mlx_lm  # noqa: F401

    def load(self, job: Job) -> None:
        from mlx_lm import load

        self.model, _ = load(job.model)
        self._sizes = sizes(self.model)

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def forward(self, tokens: Any, cache: list[Any]) -> Any:
        return self.model(tokens, cache=cache)

    def counts(self) -> Counts:
        return Counts()

    def describe(self) -> dict[str, Any]:
        return {"resident": 1.0, "side_file": None, "policy": None, **self._sizes}


class MboltEngine(StockEngine):
    """This project's engine."""

    def load(self, job: Job) -> None:
        import mbolt_mlx

        options: dict[str, Any] = {"side_file": job.side_file, "policy": job.policy}
        for name in ("resident", "memory_limit", "read_threads", "direct"):
            if getattr(job, name) is not None:
                options[name] = getattr(job, name)
        options.update(job.options)
        self.model, _ = mbolt_mlx.load(job.model, **options)

    def counts(self) -> Counts:
        import mbolt_mlx

        stats = mbolt_mlx.stats(self.model)
        total = Counts()
        for phase in (stats.prefill, stats.decode):
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(phase, name))
        return total

    def describe(self) -> dict[str, Any]:
        import mbolt_mlx

        stats = mbolt_mlx.stats(self.model)
        slots = sorted(set(stats.slots.values()))
        return {
            "resident": stats.resident,
            "side_file": stats.side_file,
            "policy": stats.policy,
            "slot_bytes": stats.slot_bytes,
            "dense_bytes": stats.dense_bytes,
            "expert_bytes": stats.expert_bytes,
            "direct": stats.direct,
            "read_threads": stats.read_threads,
            "slots": slots[0] if len(slots) == 1 else slots,
            "offloaded_layers": stats.offloaded_layers,
        }


ENGINES: dict[str, Callable[[], Engine]] = {"mbolt": MboltEngine, "mlx-lm": StockEngine}


def sizes(model: Any) -> dict[str, int]:
    """Bytes of the experts and of all other weights of a loaded stock ``model``."""
    from mlx.utils import tree_flatten
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    def total(module: Any) -> int:
        return sum(value.nbytes for _, value in tree_flatten(module.parameters()))

    experts = sum(total(m) for m in model.modules() if isinstance(m, SwitchGLU | SwitchMLP))
    return {"slot_bytes": experts, "dense_bytes": total(model) - experts}


def serve(engines: dict[str, Callable[[], Engine]]) -> int:
    """Read a job from stdin, run it on its engine and print the result. The exit status.

    A failure is a result too: {"engine", "error"}, and status 1.
    """
    job = Job.from_dict(json.load(sys.stdin))
    # What libraries print must not be taken for the result.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        if job.engine not in engines:
            raise UsageError(f"no engine {job.engine!r}", expected=sorted(engines))
        result = measure(engines[job.engine](), job)
    except (MboltError, OSError, RuntimeError, ValueError, ImportError) as error:
        if os.environ.get("MBOLT_DEBUG"):
            raise
        result = {"engine": job.engine, "error": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(result), file=answer, flush=True)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(serve(ENGINES))
