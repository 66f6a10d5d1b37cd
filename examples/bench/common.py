"""What the scripts of this folder share: limits, jobs, rounds, ratios and the JSON they keep."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
if str(ROOT) not in sys.path:  # a checkout works without installation
    sys.path.insert(0, str(ROOT))

from mbolt_mlx.bench import machine, plan, report, tokens  # noqa: E402
from mbolt_mlx.bench.counters import Counters  # noqa: E402
from mbolt_mlx.bench.measure import Engine, Job  # noqa: E402
from mbolt_mlx.cli.arguments import fraction  # noqa: E402
from mbolt_mlx.core.errors import MboltError  # noqa: E402

RIVAL = HERE / "rival_mlxvlm.py"
PROBE = HERE / "probe.py"
RIVAL_PYTHON = Path.home() / ".cache/mbolt/mlx-vlm/bin/python"


@dataclass(frozen=True)
class Limits:
    """A smaller machine and a slower drive; None is no limit. ``readahead_kib`` holds meanwhile."""

    memory: str | None = None
    read_mbps: int | None = None
    read_iops: int | None = None
    readahead_kib: int | None = 128

    def prefix(self, path: Path | str) -> list[str]:
        """What to put before a command whose model is at ``path``."""
        options = []
        for name, value in asdict(self).items():
            if value is not None:
                options += [f"--{name.replace('_', '-')}", str(value)]
        return [str(HERE / "limited.sh"), *options, "--path", str(path), "--"]

    @property
    def name(self) -> str:
        """Short enough for a file name."""
        parts = [f"{self.read_mbps}mbps"] if self.read_mbps else []
        parts += [f"{self.read_iops}iops"] if self.read_iops else []
        return "-".join(parts) or "bare"


def parser_of(
    doc: str,
    *,
    pairs: int = 7,
    prefill: int = 32,
    decode: int = 32,
    residents: str | None = None,
    models: bool = False,
):
    """A parser with the options that every script takes.

    With ``residents``, its default, --resident takes several fractions; with ``models``, --models
    takes several folders in place of --model.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if models:
        add("--models", type=Path, nargs="+", required=True, help="folders of make_model.py")
    else:
        add("--model", type=Path, required=True, help="folder of a model of make_model.py")
    if residents is None:
        add("--resident", type=float, default=0.2, help="default: %(default)s")
    else:
        add("--resident", type=fractions, default=residents, help="default: %(default)s")
    add("--memory", default="1300M", help="kernel memory limit (default: %(default)s); none")
    add("--read-mbps", type=int, help="limit of the drive, 10^6 bytes a second")
    add("--read-iops", type=int, help="limit of the drive, reads a second")
    add("--pairs", type=int, default=pairs, help="rounds (default: %(default)s)")
    add("--prefill", type=int, default=prefill, help="prompt tokens (default: %(default)s)")
    add("--decode", type=int, default=decode, help="decoded tokens (default: %(default)s)")
    add("--policy", default="default")
    add("--rival-python", type=Path, default=RIVAL_PYTHON, help="python with mlx-vlm 0.7.10")
    add("--out", type=Path, help="where the JSON goes (default: results/ with a speaking name)")
    return parser


def fractions(text: str) -> list[float]:
    """Several residencies, comma-separated."""
    return [fraction(part) for part in text.split(",")]


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits that the options name."""
    memory = None if args.memory == "none" else args.memory
    return Limits(memory, args.read_mbps, args.read_iops)


def side_file(model: Path) -> Path:
    """The coalesced side-file of ``model``, written beside it on first use."""
    path = model.resolve().with_name(model.name + "-side") / "experts.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        product("coalesce", "--model", model, "-o", path, "--yes")
    return path


def product(*arguments: Any, prefix: Sequence[str] = ()) -> str:
    """Run ``mbolt-mlx ARGUMENTS`` and return what it prints on stdout."""
    return _run([*prefix, sys.executable, "-m", "mbolt_mlx.cli.main", *map(str, arguments)])


def script(path: str, *arguments: Any) -> str:
    """Run a script of this folder and return what it prints on stdout."""
    return _run([sys.executable, path, *map(str, arguments)])


def _run(command: Sequence[str]) -> str:
    options = {"stdout": subprocess.PIPE, "text": True, "env": plan.environment()}
    return subprocess.run(command, check=True, **options).stdout


def job_of(args: argparse.Namespace, **changes: Any) -> Job:
    """A cold job of our engine on the side-file of --model, with ``changes``."""
    model = args.model.resolve()
    ids = tokens.forced_tokens(args.prefill + args.decode, tokens.vocabulary(model))
    side = side_file(model)
    job = Job(
        engine="mbolt",
        model=str(model),
        prompt=ids[: args.prefill],
        decode=ids[args.prefill :],
        resident=args.resident,
        policy=args.policy,
        side_file=str(side),
        direct=True,
        cold=True,
        drop=[str(model), str(side)],
    )
    return replace(job, **changes)


def stock(job: Job) -> Job:
    """``job`` for stock mlx-lm, everything in memory."""
    return replace(job, engine="mlx-lm", resident=None, side_file=None, cold=False)


def rival(job: Job, python: Path) -> Job:
    """``job`` for mlx-vlm's offload: as many experts' bytes in memory as ours, repacked once."""
    config = json.loads((Path(job.model) / "config.json").read_text())
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    slots = min(experts, max(top_k, round(job.resident * experts)))
    offload = Path(job.model).with_name(Path(job.model).name + "-mlxvlm")
    if not (offload / "offload_index.json").exists():
        command = [str(python), "-m", "mlx_vlm.moe_offload", "--build", job.model]
        subprocess.run([*command, "--out", str(offload)], check=True)
    options = {"offload": str(offload), "share": slots / experts}
    return replace(
        job, engine="mlx-vlm", side_file=None, policy="lru", drop=[str(offload)], options=options
    )


def runner(limits: Limits, rival_python: Path | None = None) -> Callable[[Job], dict[str, Any]]:
    """A function that runs a job in a fresh process under ``limits``.

    Stock mlx-lm needs the whole model in memory, so the memory limit is not for it.
    """

    def run(job: Job) -> dict[str, Any]:
        mine = replace(limits, memory=None) if job.engine.startswith("mlx-lm") else limits
        command = plan.WORKER
        if job.engine == "mlx-vlm":
            command = (str(rival_python), str(RIVAL), "--worker")
        result = plan.run_job(job, command=command, prefix=mine.prefix(job.model))
        if "error" in result:
            print(f"{job.engine}: {result['error']}", file=sys.stderr)
        return result

    return run


def rounds(
    jobs: Sequence[Job], count: int, run: Callable[[Job], dict[str, Any]], title: str
) -> list[dict[str, Any]]:
    """Run ``jobs`` ``count`` times in alternating order, saying how long it will still take."""
    started = time.monotonic()
    total = len(jobs) * count

    def done(results: list[dict[str, Any]]) -> None:
        last, n = results[-1], len(results)
        left = (time.monotonic() - started) / n * (total - n)
        speed = last.get("decode_tps")
        what = "failed" if "error" in last else f"first token {last['ttft_s']:.2f} s"
        if speed:
            what += f", decode {speed:.2f} tok/s"
        print(
            f"{title} {n}/{total}: {last['engine']}: {what}; about {left / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )

    return plan.run_all(jobs, count, run=run, done=done)


def probe(limits: Limits, kind: str, *options: Any) -> dict[str, Any]:
    """Run probe.py under ``limits`` (without that of memory) and return what it found."""
    limits = replace(limits, memory=None)
    options = tuple(str(o) for o in options)
    command = [sys.executable, str(PROBE), kind, *options]
    path = options[0]
    done = subprocess.run(
        [*limits.prefix(path), *command], stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def decode_block(
    engine: Engine, cache: list[Any], ids: Sequence[int]
) -> tuple[Counters, list[bytes]]:
    """Decode ``ids`` in this process; what it took, and each position's logits."""
    import mlx.core as mx
    import numpy as np

    logits = []
    before = Counters.read()
    for token in ids:
        logits.append(engine.forward(mx.array([[token]]), cache)[0, -1])
        mx.eval(logits[-1])
    took = Counters.read().since(before)
    return took, [np.array(row).tobytes() for row in logits]


def good(runs: Sequence[dict[str, Any]], engine: str) -> list[dict[str, Any]]:
    """The runs of ``engine`` that gave figures, in their rounds' order."""
    mine = [r for r in runs if r["engine"] == engine and "error" not in r]
    return sorted(mine, key=lambda r: r["round"])


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    """The median of ``key`` over ``runs``."""
    return statistics.median(r[key] for r in runs)


def pair_ratio(
    runs: Sequence[dict[str, Any]], key: str, ours: str = "mbolt", theirs: str = "mlx-vlm"
) -> dict[str, float] | None:
    """Spread of ours ÷ theirs for ``key`` over the rounds in which both gave figures."""
    other = {r["round"]: r for r in good(runs, theirs)}
    return report.spread(
        r[key] / other[r["round"]][key] for r in good(runs, ours) if r["round"] in other
    )


def show(name: str, value: dict[str, float] | None, target: str = "") -> None:
    """Print a spread as one line."""
    if value is None:
        print(f"{name}: not measured")
        return
    text = f"{name}: {value['median']:.3g} [{value['min']:.3g}-{value['max']:.3g}]"
    print(f"{text} over {value['count']}{'  target ' + target if target else ''}")


def save(
    args: argparse.Namespace, name: str, runs: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Write everything to --out or results/NAME.json, print the table, return the document."""
    described = machine.describe([args.model])
    # The folder is the reader's to choose; only its name says something.
    described["drives"] = {Path(k).name: v for k, v in described["drives"].items()}
    command = " ".join(["python", f"examples/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    data = report.document(described, runs, command=_shorten(command, args), **more)
    data = json.loads(_shorten(json.dumps(data), args))
    out = args.out or RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report.write(out, data)
    if runs:
        print(report.table(data["summary"]))
    print(f"written to {out}", file=sys.stderr)
    return data


def _shorten(text: str, args: argparse.Namespace) -> str:
    for path in {str(args.model.resolve().parent), str(args.model.parent)}:
        if path not in (".", "/"):
            text = text.replace(path, "MODELS")
    python = getattr(args, "rival_python", None)
    return text.replace(str(python), "RIVAL/bin/python") if python else text


def main(function: Callable[[], int]) -> None:
    """Run a script's ``function`` and exit with its status; an error is one line."""
    try:
        sys.exit(function())
    except MboltError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
