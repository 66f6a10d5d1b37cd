#!/usr/bin/env python3
"""Measure mlx-vlm's expert offload with the same forced tokens and the same JSON keys as ours.

mlx-vlm 0.7.10 pins other versions than ours may, so it lives in an environment of its own:

    python3.11 -m venv RIVAL
    RIVAL/bin/pip install 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2' 'mlx-vlm==0.7.10'
    RIVAL/bin/python examples/bench/rival_mlxvlm.py --model M --resident 0.2 --prefill 32,300 --cold

The model is repacked once, into M-mlxvlm. Each run is a fresh process. compare.py runs it beside
ours. Without a budget mlx-vlm never evicts on a CPU; here it gets as many bytes as our slots have.
Its prefill loads some layers whole without counting them, so misses count decode only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mbolt_mlx.bench import measure, worker  # noqa: E402


class MlxVlmEngine:
    """mlx-vlm with its experts offloaded; ``options``: the repacked folder and the share kept."""

    def __init__(self) -> None:
        self._model: Any = None
        self._language: Any = None
        self._table = self._budget = self._expert_bytes = 0

    def import_only(self) -> None:
        import mlx_lm  # noqa: F401

    def load(self, job: measure.Job) -> None:
        from mlx_vlm.utils import load_model

        folder = Path(job.options["offload"])
        index = json.loads((folder / "offload_index.json").read_text())
        layers = sorted((folder / "experts").glob("layer_*.safetensors"))
        self._table = sum(_weight_bytes(path) for path in layers)
        self._expert_bytes = self._table // (len(layers) * index["num_experts"])
        self._budget = int(self._table * job.options["share"])
        self._resident = job.resident
        self._model = load_model(folder, expert_cache_gb=self._budget / 1e9)
        self._language = self._model.language_model

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        return make_prompt_cache(self._language)

    def forward(self, tokens: Any, cache: list[Any]) -> Any:
        return self._language(tokens, cache=cache).logits

    def counts(self) -> measure.Counts:
        stats = self._model.moe_offload_store.stats()
        misses = stats["misses"]
        return measure.Counts(
            hits=stats["hits"],
            misses=misses,
            reads=None,
            bytes=misses * self._expert_bytes,
            evictions=stats["evictions"],
            read_wait_s=None,
            readback_wait_s=None,
        )

    def describe(self) -> dict[str, Any]:
        from mlx.utils import tree_flatten

        return {
            "resident": self._resident,
            "side_file": None,
            "policy": "lru",
            "slot_bytes": self._budget,
            "dense_bytes": sum(v.nbytes for _, v in tree_flatten(self._model.parameters())),
            "expert_bytes": self._table,
            "metadata_reloads": self._model.moe_offload_store.stats()["metadata_reloads"],
        }


def _weight_bytes(path: Path) -> int:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def main() -> int:
    if "--worker" in sys.argv[1:]:
        return worker.serve({"mlx-vlm": MlxVlmEngine})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--resident", type=float, default=0.2)
    parser.add_argument("--prefill", default="32,300", help="prompt lengths, comma-separated")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", help="write everything here")
    args = parser.parse_args()
    import common

    from mbolt_mlx.bench import machine, plan, report, tokens

    jobs = []
    for length in (int(part) for part in args.prefill.split(",")):
        ids = tokens.forced_tokens(length + args.decode, tokens.vocabulary(args.model))
        job = measure.Job(
            "mlx-vlm", str(args.model.resolve()), ids[:length], ids[length:], cold=args.cold
        )
        job.resident = args.resident
        jobs.append(common.rival(job, Path(sys.executable)))
    command = (sys.executable, __file__, "--worker")
    runs = common.rounds(jobs, args.runs, lambda job: plan.run_job(job, command=command), "mlx-vlm")
    data = report.document(machine.describe([args.model]), runs)
    if args.json:
        report.write(args.json, data)
    print(report.table(data["summary"]))
    return 1 if any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
