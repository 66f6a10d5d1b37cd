"""``mbolt-mlx bench``: speed, reads and memory, measured alike for us and for stock mlx-lm."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mbolt_mlx.bench import machine, plan, report, tokens
from mbolt_mlx.bench.measure import Job
from mbolt_mlx.cli.arguments import MODEL_HELP, READ_THREADS_HELP, fraction, read_threads
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.report import check_report
from mbolt_mlx.core.residency import POLICIES

HELP = "measure prefill, decode, reads and memory with forced tokens"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    add("--model", required=True, help=MODEL_HELP)
    add(
        "--resident",
        default="0.1,0.2,0.5,1.0",
        help="fractions, comma-separated (default: %(default)s)",
    )
    add("--side-file", help="the coalesced experts (default: the one that is found)")
    add(
        "--no-side-file",
        action="store_true",
        help="read from the plain shards; with --side-file as well, measure both",
    )
    add("--baseline", action="store_true", help="run stock mlx-lm beside ours")
    add(
        "--cold",
        action="store_true",
        help="drop the page cache first, and prove that it was cold; reads past it (--direct) "
        "unless --no-direct is given",
    )
    add(
        "--drop-all-caches",
        action="store_true",
        help="with --cold, drop the page cache of the whole machine (Linux, root)",
    )
    add("--runs", type=int, default=5, help="runs of each setting (default: %(default)s)")
    add("--prefill", type=int, default=128, help="prompt tokens (default: %(default)s)")
    add("--decode", type=int, default=64, help="decoded tokens (default: %(default)s)")
    add(
        "--policy",
        choices=["default", *POLICIES],
        default="default",
        help="which experts stay in memory",
    )
    add("--read-threads", type=read_threads, metavar="N", help=READ_THREADS_HELP)
    add(
        "--direct",
        action=argparse.BooleanOptionalAction,
        help="read past the page cache (default: with --cold yes, else as the engine chooses)",
    )
    add("--prefill-step-size", type=int, default=2048, help="largest chunk of a prompt")
    add("--text", type=Path, help="force the tokens of this text, not random ones")
    add("--seed", type=int, default=1234, help="seed of the random tokens")
    add("--zipf", type=float, default=1.0, help="how uneven random tokens are (0: even)")
    add("--token-pool", type=int, default=256, help="different random tokens")
    add("--json", metavar="OUT", help="write everything here; - is stdout")


def run(args: argparse.Namespace) -> int:
    """Measure and report. 1 if a run failed, was not cold when asked, or gave other logits."""
    if args.json and args.json != "-":
        check_report(args.json, report.FORMAT)
    model, settings = prepare(args)
    count = len(settings) * args.runs
    places = [model, *([args.side_file] if args.side_file else [])]
    described = machine.describe(places)
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if _plain(v)}
    asked.pop("prog", None)

    def document(results: list[dict[str, Any]]) -> dict[str, Any]:
        return report.document(described, results, settings=asked)

    def done(results: list[dict[str, Any]]) -> None:
        last = results[-1]
        what = last.get("error") or f"{last['decode_tps']:.2f} tok/s"
        print(
            f"run {len(results)} of {count}: {last['engine']} at {last['resident']:g}: {what}",
            file=sys.stderr,
        )
        if args.json and args.json != "-":
            report.write(args.json, document(results))

    results = plan.run_all(settings, args.runs, done=done)
    final = document(results)
    if args.json == "-":
        print(json.dumps(final, indent=1))
    print(report.table(final["summary"]), file=sys.stderr if args.json == "-" else sys.stdout)
    problems = complaints(results, final["summary"])
    for problem in problems:
        print(f"mbolt-mlx bench: {problem}", file=sys.stderr)
    return 1 if problems else 0


def prepare(args: argparse.Namespace) -> tuple[Path, list[Job]]:
    """The model's folder and one job a setting.

    Raises:
        UsageError: for options that have no meaning.
    """
    from mbolt_mlx.names import resolve

    for name in ("runs", "prefill", "decode", "prefill_step_size"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1", found=getattr(args, name))
    if args.drop_all_caches and not args.cold:
        raise UsageError("--drop-all-caches needs --cold")
    residents = [fraction(part) for part in args.resident.split(",")]
    if args.side_file and not Path(args.side_file).is_file():
        raise UsageError("no such side-file", path=args.side_file)
    model = resolve(args.model)
    total = args.prefill + args.decode
    if args.text is not None:
        ids = tokens.tokens_of_text(args.text, model, total)
    else:
        ids = tokens.forced_tokens(
            total, tokens.vocabulary(model), seed=args.seed, zipf=args.zipf, pool=args.token_pool
        )
    side_files: list[str | None] = [str(Path(args.side_file).resolve())] if args.side_file else []
    if args.no_side_file:
        side_files.append(None)
    side_files = side_files or ["auto"]
    base = Job(
        engine="mbolt",
        model=str(model),
        prompt=ids[: args.prefill],
        decode=ids[args.prefill :],
        policy=args.policy,
        read_threads=args.read_threads,
        direct=True if args.cold and args.direct is None else args.direct,
        prefill_step_size=args.prefill_step_size,
        cold=args.cold,
        drop=[str(model), *(s for s in side_files if s and s != "auto")],
        drop_everything=args.drop_all_caches,
    )
    return model, plan.settings_of(base, residents, side_files, args.baseline)


def complaints(results: list[dict[str, Any]], summary: list[dict[str, Any]]) -> list[str]:
    """What makes the benchmark a failure, one line each; empty if nothing does."""
    found = []
    warm: dict[str, list[str]] = {}
    for result in results:
        where = f"run {result['order'] + 1} ({result['engine']} at {result['resident']:g})"
        if "error" in result:
            found.append(f"{where} failed: {result['error']}")
        elif result.get("cold_asked") and not result["cold"] and result.get("cold_reason"):
            warm.setdefault(result["engine"], []).append(
                f"{where} is not cold: {result['cold_reason']}"
            )
    for engine, lines in warm.items():
        more = f" (and {len(lines) - 1} more of {engine})" if len(lines) > 1 else ""
        found.append(lines[0] + more)
    if any(entry["logits"] == "differ" for entry in summary):
        found.append("the logits are not the same in every setting (expected on Metal only)")
    return found


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | Path)
