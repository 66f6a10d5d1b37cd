#!/usr/bin/env python3
"""What `mbolt-mlx plan` says of memory and speed, against the engine.

    python examples/bench/plan_check.py --models MODELS
    mbolt-mlx plot measured examples/bench/results/plan-400mbps.json -o predicted.png

A folder of models stands for its f32, q8, scale64 and scale512 (no constant of the plan was chosen
by the last). For each model: `mbolt-mlx probe` of the drive under the limit, and of the bare drive
before and after; a trace of other tokens than those that are decoded later; then rounds of fresh
processes, cold, under the limit, at each residency from the side-file and from the model's own
files, and one with every expert in memory and no limit, which gives the time that computing takes.
From these, and nothing else, `mbolt-mlx plan` predicts. A model with little to compute decodes more
tokens, since a run of a tenth of a second says nothing.

What is judged is the plan from the bare drive with `--limit`, the mean of the times from both
probes; "limited" is the plan from the probe under the limit, which does not see that a limit saves
up what computing leaves unused.

An error is predicted ÷ measured − 1, of the median speed and of the highest peak of memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import common
import record

NAMES = ("f32", "q8", "scale64", "scale512")
SPEED, MEMORY = 0.25, 0.05
SOURCES = ("side_file", "shards")
# Bytes of experts a token below which a model is small, and how many times as much it decodes.
SMALL, LONGER = 50e6, 8


def folders(paths: list[Path]) -> list[Path]:
    """The models at ``paths``; a folder that is no model stands for those in it."""
    found = []
    for path in paths:
        model = (path / "config.json").exists()
        found += [path] if model else [path / name for name in NAMES]
    return found


def token_bytes(model: Path) -> float:
    """Bytes of the experts that a token of ``model`` uses."""
    config = json.loads((model / "config.json").read_text())
    used = config["num_experts_per_tok"] / config["num_experts"]
    return used * common.side_file(model).stat().st_size


def measure(args: Namespace, model: Path, at: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The runs of one model, and its plans. Files go to the folder ``at``."""
    args = Namespace(**{**vars(args), "model": model})
    limits = common.limits_of(args)
    if token_bytes(model) < SMALL:
        args.decode *= LONGER
    base = common.job_of(args)
    bare = common.replace(limits, memory=None, read_mbps=None)

    def probe(name: str, drive: common.Limits) -> None:
        out = ("--seconds", args.probe_seconds, "-o", at / f"{name}.json")
        common.product("probe", base.side_file, *out, prefix=drive.prefix(base.side_file))

    probe("limited", common.replace(limits, memory=None))
    probe("before", bare)
    trace = record.record(model, at / "trace", args.prefill, args.trace_tokens)

    ids = record.held_out(args)
    jobs = [
        common.replace(
            base,
            prompt=ids[: args.prefill],
            decode=ids[args.prefill :],
            resident=1.0,
            cold=False,
            direct=None,
        )
    ]
    for resident in args.resident:
        for source in SOURCES:
            side = base.side_file if source == "side_file" else None
            jobs.append(common.replace(base, resident=resident, side_file=side))
    limited, free = common.runner(limits), common.runner(common.replace(bare, readahead_kib=None))
    runs = common.rounds(
        jobs, args.pairs, lambda job: (free if job.resident == 1.0 else limited)(job), model.name
    )
    for run in runs:
        if "error" in run:
            raise common.MboltError(f"{model.name}: {run['error']}")
    probe("after", bare)
    whole = [run for run in runs if run["setting"] == 0]
    compute_ms = 1e3 / common.median(whole, "decode_tps")
    options = ("--model", model, "--trace", trace, "--compute-ms", compute_ms)
    options += ("--resident", ",".join(map(str, args.resident)), "--memory", "1TB")
    # Room is planned for a prompt of the whole context; what is decoded needs next to none here.
    options += ("--context", 2 * args.prefill, "--json")
    held = ("--limit", f"{args.read_mbps}MB") if args.read_mbps else ()
    plans = {}
    for name, limit in (("before", held), ("after", held), ("limited", ())):
        drive = ("--drive", at / f"{name}.json", *limit)
        plans[name] = json.loads(common.product("plan", *options, *drive))
    return runs, {"compute_ms": compute_ms, **plans}


def compared(
    args: Namespace, name: str, runs: list[dict[str, Any]], plans: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each residency and source: predicted, measured, and the errors."""
    rows = []
    for n, resident in enumerate(args.resident):
        before, after, limited = (
            row_at(plans[kind], resident) for kind in ("before", "after", "limited")
        )
        for m, source in enumerate(SOURCES):
            mine = [r for r in runs if r["setting"] == 1 + len(SOURCES) * n + m]
            speed = common.report.spread(r["decode_tps"] for r in mine)
            peak = max(r["peak_rss_bytes"] for r in mine)
            key = f"tps_{source}"
            planned = 2 / (1 / before[key] + 1 / after[key])
            memory = before["memory_bytes"]
            rows.append(
                {
                    "model": name,
                    "resident": resident,
                    "source": source,
                    "predicted_tps": planned,
                    "predicted_tps_before": before[key],
                    "predicted_tps_after": after[key],
                    "predicted_tps_limited": limited[key],
                    "measured_tps": speed,
                    "tps_error": planned / speed["median"] - 1,
                    "tps_error_limited": limited[key] / speed["median"] - 1,
                    "predicted_memory_bytes": memory,
                    "measured_memory_bytes": peak,
                    "memory_error": memory / peak - 1,
                    "predicted_hit_rate": before["hit_rate"],
                    "measured_hit_rate": common.median(mine, "decode_hit_rate"),
                    "compute_ms": plans["compute_ms"],
                    "cold": all(r["cold"] for r in mine),
                    "predicted_ms_per_token": 1e3 / planned,
                    "measured_ms_per_token": 1e3 / speed["median"],
                }
            )
    return rows


def row_at(plan: dict[str, Any], resident: float) -> dict[str, Any]:
    """The row of ``plan`` for ``resident``."""
    return next(r for r in plan["rows"] if r["resident"] == resident and "memory_limit" not in r)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"\n{'model':<10} {'resident':>8} {'from':<9} {'tok/s: plan':>11} {'measured':>18} "
        f"{'error':>6} {'limited':>7}  {'MB: plan':>8} {'peak':>6} {'error':>6}  hits"
    )
    for row in rows:
        speed = row["measured_tps"]
        measured = f"{speed['median']:.2f} [{speed['min']:.2f}-{speed['max']:.2f}]"
        print(
            f"{row['model']:<10} {row['resident']:>8g} {row['source']:<9} "
            f"{row['predicted_tps']:>11.2f} {measured:>18} {row['tps_error']:>+6.0%} "
            f"{row['tps_error_limited']:>+7.0%}  {row['predicted_memory_bytes'] / 1e6:>8.0f} "
            f"{row['measured_memory_bytes'] / 1e6:>6.0f} {row['memory_error']:>+6.1%}  "
            f"{row['predicted_hit_rate']:.1%} {row['measured_hit_rate']:.1%}"
        )


def main() -> int:
    parser = common.parser_of(
        __doc__, pairs=3, prefill=16, decode=16, residents="0.2,0.5", models=True
    )
    parser.add_argument("--trace-tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--probe-seconds", type=float, default=5, help="default: %(default)s")
    parser.set_defaults(memory="none", read_mbps=400)
    args = parser.parse_args()
    if not all(0 < resident < 1 for resident in args.resident):
        parser.error("--resident: above 0 and below 1; all in memory is measured anyway")
    runs, rows, drives = [], [], {}
    models = folders(args.models)
    for model in models:
        with tempfile.TemporaryDirectory() as place:
            mine, plans = measure(args, model, Path(place))
        rows += compared(args, model.name, mine, plans)
        drives[model.name] = {name: plans[name]["drive"] for name in ("before", "after", "limited")}
        settings = len({run["setting"] for run in runs})
        for run in mine:
            run.update(setting=run["setting"] + settings, order=len(runs))
            runs.append(run)
    args.model = models[0]
    limits = common.limits_of(args)
    found = {"targets": {"tps": SPEED, "memory": MEMORY}, "drives": drives, "rows": rows}
    common.save(args, f"plan-{limits.name}", runs, limits=common.asdict(limits), plan_check=found)
    show(rows)
    speed = max(abs(row["tps_error"]) for row in rows)
    memory = max(abs(row["memory_error"]) for row in rows)
    print(f"largest error: tok/s {speed:.0%} (target {SPEED:.0%}), ", end="")
    print(f"memory {memory:.1%} (target {MEMORY:.0%})")
    warm = [row for row in rows if not row["cold"]]
    if warm:
        print(f"{len(warm)} settings were not cold", file=sys.stderr)
    return 1 if warm or speed > SPEED or memory > MEMORY else 0


if __name__ == "__main__":
    common.main(main)
