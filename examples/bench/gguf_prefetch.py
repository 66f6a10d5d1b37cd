#!/usr/bin/env python3
"""Prefetch and layouts of a GGUF that is larger than memory, in alternating runs of llama.cpp.

    python examples/bench/gguf_prefetch.py --models MODELS
    python examples/bench/gguf_prefetch.py --models MODELS --drives 2000iops --modes willneed

A random qwen3moe model of about 1.1 GB is made in MODELS once (24 layers x 64 experts, three slices
of 221 KB each), profiled and rewritten. Settings: stock mmap (unmodified library), and with the
prefetcher: the file as it is, reordered (chain+pipeline), interleaved (interleave+chain) and its
blocks read whole, or slice by slice (interleave-slices). All follow the same forced tokens with the
same warm-up, advice and way of waiting (launch.SPIN), each in a fresh process with the page cache
dropped, --share of the file's size as memory (page cache included) and readahead 128 KiB; drives:
bare, 400 MB/s, 2,000 reads a second.

"wanted" reads are ranges of chosen experts, neighbours merged, whether in memory or not; they
depend on tokens and layout alone and must be what the replay says. "issued" is what was not in
memory; the replay of it is that of Linux's two lists of pages, in what the memory limit leaves
(--overhead-mib: 16 for process and kernel, the rest because a control group's counters lag). --kept
is the share of pages that are spared at the end of a list for no reason of ours, as they are where
DAMON watches memory (a thread kdamond). Both were fitted on one machine to the runs of three
layouts. Needs Linux, root, and `mbolt-gguf build-llama`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np

sys.path.insert(0, str(common.ROOT / "examples" / "gguf"))

from random_gguf import write_gguf  # noqa: E402
from random_shapes import Spec  # noqa: E402

from mbolt_gguf.blocks import SLICES, WHOLE  # noqa: E402
from mbolt_gguf.build import binary  # noqa: E402
from mbolt_gguf.evaluate import DRIVER, STOCK_DRIVER, Way, evaluate  # noqa: E402
from mbolt_gguf.experts import find_experts  # noqa: E402
from mbolt_gguf.launch import SPIN  # noqa: E402
from mbolt_gguf.model import Model  # noqa: E402
from mbolt_gguf.permute import stored_orders  # noqa: E402
from mbolt_gguf.predict import predict_pages  # noqa: E402
from mbolt_gguf.prefetch_map import write_map  # noqa: E402
from mbolt_gguf.rewrite import rewrite  # noqa: E402
from mbolt_mlx.core.errors import UsageError  # noqa: E402
from mbolt_mlx.core.sizes import format_size  # noqa: E402
from mbolt_mlx.profile.perms import make_perms  # noqa: E402
from mbolt_mlx.profile.traces import Pass, Trace  # noqa: E402

SPEC = Spec(
    quant="Q4_0", layers=24, experts=64, top_k=8, embd=768, ff=768, ff_exp=512, heads=12,
    kv_heads=2, vocab=2048, context=1024, name="benchmark",
)  # fmt: skip
SMALL = replace(SPEC, layers=4, experts=16, top_k=4)
LAYOUTS = {"prefetch": None, "reorder": "chain+pipeline", "interleave": "interleave+chain"}
# Setting → the layout of its file, how its blocks are read.
WAYS = {**{name: (name, WHOLE) for name in LAYOUTS}, "interleave-slices": ("interleave", SLICES)}
DRIVES = {
    "bare": common.Limits(),
    "400mbps": common.Limits(read_mbps=400),
    "2000iops": common.Limits(read_iops=2000),
}
SEED = 1234
PROFILED = 256  # tokens


@dataclass(frozen=True)
class Setting:
    """One way to run: stock, or one of `WAYS` with a mode of the prefetcher."""

    way: str
    mode: str | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.way}/{self.mode}" if self.mode else self.way


def files_of(models: Path, spec: Spec, driver: Path) -> dict[str, Path]:
    """The model in each layout, made when it is absent."""
    models.mkdir(parents=True, exist_ok=True)
    base = models / f"gguf-bench-{spec.layers}x{spec.experts}.gguf"
    if not base.exists():
        print(f"making {base.name}", file=sys.stderr)
        write_gguf(base, spec)
    made = {"prefetch": base}
    missing = []
    for name, layout in LAYOUTS.items():
        if layout is not None:
            made[name] = base.with_name(f"{base.stem}-{layout.replace('+', '-')}.gguf")
            missing += [name] if not made[name].exists() else []
    if missing:
        # Tokens before those that are measured, of the same distribution.
        ids = common.tokens.forced_tokens(PROFILED, spec.vocab, seed=SEED)
        perms = make_perms(evaluate(base, ids, driver=driver).trace, phase=None)
        for name in missing:
            rewrite(base, perms, made[name], layout=LAYOUTS[name])
    return made


def trace_of(path: Path, ids: Sequence[int], way: Way, driver: Path) -> Trace:
    """What the model in ``path`` chooses, by original expert id. A layout's own trace: another
    order of the experts rounds differently, and near ties change places."""
    trace = evaluate(path, ids, way, driver=driver, logits=False).trace
    model = Model.open(path)
    orders = stored_orders(model, find_experts(model))
    passes = (
        Pass(one.phase, {n: orders[n][at] for n, at in one.chosen.items()}, one.session)
        for one in trace.passes
    )
    return trace.part(passes)


def command(binary: Path, model: Path, tokens: Path, args: argparse.Namespace) -> list[str]:
    """The driver's command line, the same for every setting."""
    return [
        *(str(binary), "-m", str(model), "--tokens", str(tokens)),
        *("--decode", str(args.warmup + args.decode), "--warmup", str(args.warmup)),
        *("--batch", "64", "-t", str(args.threads), "--flash", "0", "--json"),
    ]


def environment(setting: Setting, prefetch_map: Path | None, args: Any) -> dict[str, str]:
    """The driver's environment: as `mbolt-gguf run` has threads wait, and where the prefetcher runs
    its switches."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MBOLT_")} | SPIN
    if setting.mode is None:
        return clean
    return clean | {
        "MBOLT_PREFETCH": str(prefetch_map),
        "MBOLT_PREFETCH_MODE": setting.mode,
        "MBOLT_PREFETCH_THREADS": str(args.prefetch_threads),
        "MBOLT_PREFETCH_ADVICE": "random",
    }


def drive_reads(path: Path) -> int | None:
    """Reads that the kernel has completed on the drive of ``path`` (all processes), if it says."""
    number = os.stat(path).st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        major, minor, _, reads = line.split()[:4]
        if (int(major), int(minor)) == (os.major(number), os.minor(number)):
            return int(reads)
    return None


def run(setting: Setting, words: Sequence[str], env: Mapping[str, str], limits: Any, path: Path):
    """One run in a fresh process under ``limits``; figures a decoded token."""
    before = drive_reads(path)
    done = subprocess.run(
        [*limits.prefix(path), *words], capture_output=True, text=True, env=dict(env)
    )
    entry: dict[str, Any] = {"layout": setting.way, "mode": setting.mode}
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-2:] or ["no message"]
        return {**entry, "error": f"exit {done.returncode}: {' | '.join(lines)}"}
    report = json.loads(done.stdout.splitlines()[-1])
    decode, after = report["decode"], drive_reads(path)
    count = decode["tokens"]
    counted = decode["prefetch"]
    return {
        **entry,
        "tok_s": decode["tok_s"],
        "tokens": count,
        "major_faults_per_token": decode["majflt"] / count,
        "drive_bytes_per_token": decode["read_bytes"] / count,
        "wanted_reads_per_token": counted["wanted_reads"] / count,
        "wanted_bytes_per_token": counted["wanted_bytes"] / count,
        "issued_reads_per_token": counted["reads"] / count,
        "issued_bytes_per_token": counted["bytes"] / count,
        "prefetch_wait_s_per_token": counted["wait_seconds"] / count,
        "prefetch_errors": counted["errors"],
        "prefill_s": report["prefill"]["seconds"],
        "load_s": report["load"]["seconds"],
        "peak_rss_bytes": report["peak_rss"],
        "drive_reads_whole_run": after - before if before is not None and after else None,
    }


def ratio(runs: Sequence[Mapping[str, Any]], key: str, ours: str, theirs: str):
    """Spread of ours ÷ theirs over the rounds in which both gave figures."""
    other = {r["round"]: r[key] for r in runs if r["setting"] == theirs and "error" not in r}
    return common.report.spread(
        r[key] / other[r["round"]]
        for r in runs
        if r["setting"] == ours and "error" not in r and other.get(r["round"])
    )


def ratios(runs: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> dict[str, Any]:
    """The figures that have targets, for each mode of the prefetcher."""
    out = {}
    for mode in modes:
        one, order, block, slices = (f"{way}/{mode}" for way in WAYS)
        out[mode] = {
            "prefetch_speed_over_stock": ratio(runs, "tok_s", one, "stock"),
            "reorder_speed_over_stock": ratio(runs, "tok_s", order, "stock"),
            "interleave_speed_over_stock": ratio(runs, "tok_s", block, "stock"),
            "interleave_speed_over_prefetch": ratio(runs, "tok_s", block, one),
            "interleave_slices_speed_over_stock": ratio(runs, "tok_s", slices, "stock"),
            "interleave_slices_speed_over_prefetch": ratio(runs, "tok_s", slices, one),
            "interleave_slices_speed_over_interleave": ratio(runs, "tok_s", slices, block),
            "prefetch_reads_over_interleave": ratio(runs, "issued_reads_per_token", one, block),
            "prefetch_bytes_over_interleave": ratio(runs, "issued_bytes_per_token", one, block),
            "reorder_reads_over_prefetch": ratio(runs, "issued_reads_per_token", order, one),
        }
    return out


def errors(predicted: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]]):
    """Setting → figure → spread of predicted ÷ measured."""
    out: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(r["setting"] for r in runs if r["mode"]):
        good = [r for r in runs if r["setting"] == name and "error" not in r]
        for key in ("wanted_reads", "wanted_bytes", "issued_reads", "issued_bytes"):
            said = predicted[name.split("/")[0]][key]
            measured = [r[f"{key}_per_token"] for r in good]
            out.setdefault(name, {})[key] = common.report.spread(said / m for m in measured if m)
    return out


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Setting → spread of every figure."""
    out = {}
    for name in dict.fromkeys(r["setting"] for r in runs):
        good = [r for r in runs if r["setting"] == name and "error" not in r]
        keys = [k for k, v in (good[0] if good else {}).items() if isinstance(v, int | float)]
        out[name] = {k: common.report.spread(r[k] for r in good) for k in keys if k != "round"}
    return out


def table(found: Mapping[str, Any]) -> str:
    """The figures of one drive for people: medians, and least to most of the speed."""
    lines = [
        f"{'setting':<22}{'tok/s':>22}{'faults':>9}{'wanted':>9}{'issued':>9}{'MB issued':>11}"
        f"{'MB drive':>10}   replay: wanted, issued"
    ]
    for name, one in found["summary"].items():
        if not one:
            lines.append(f"{name:<22}failed")
            continue
        speed = one["tok_s"]
        text = f"{speed['median']:.2f} [{speed['min']:.2f}-{speed['max']:.2f}]"
        mid = {key: value["median"] for key, value in one.items() if value}
        line = (
            f"{name:<22}{text:>22}{mid['major_faults_per_token']:>9.0f}"
            f"{mid['wanted_reads_per_token']:>9.1f}{mid['issued_reads_per_token']:>9.1f}"
            f"{mid['issued_bytes_per_token'] / 1e6:>11.1f}"
            f"{mid['drive_bytes_per_token'] / 1e6:>10.1f}"
        )
        replayed = found["replay"].get(name.split("/")[0]) if "/" in name else None
        if replayed:
            line += f"   {replayed['wanted_reads']:.1f}, {replayed['issued_reads']:.1f}"
        lines.append(line)
    return "\n".join(lines)


def measure(args: argparse.Namespace, paths: Mapping[str, Path], found: Mapping[str, Path]):
    """All drives: name → runs, summary, ratios and replay."""
    modes = args.modes.split(",")
    settings = [Setting("stock"), *(Setting(w, m) for m in modes for w in WAYS)]
    count = PROFILED + args.prefill + args.warmup + args.decode
    ids = common.tokens.forced_tokens(count, args.spec.vocab, seed=SEED)[PROFILED:]
    tokens = args.models / "gguf-bench.tokens"
    tokens.write_bytes(np.asarray(ids, "<u4").tobytes())
    way = Way(batch=64, decode=args.warmup + args.decode)
    traces = {name: trace_of(path, ids, way, found[DRIVER]) for name, path in paths.items()}
    opened = {name: Model.open(path) for name, path in paths.items()}
    maps = {}
    for name, (layout, blocks) in WAYS.items():
        place = args.models / f"{paths[layout].stem}-{blocks}.mbpf"
        maps[name] = write_map(opened[layout], place, blocks=blocks)
    memory = int(args.share * opened["prefetch"].size)
    budget = memory - (args.overhead_mib << 20)
    predicted = {
        name: asdict(
            predict_pages(
                traces[layout], opened[layout], budget,
                skip=args.warmup, blocks=blocks, kept=args.kept,
            )
        )
        for name, (layout, blocks) in WAYS.items()
    }  # fmt: skip
    out = {}
    for drive in args.drives.split(","):
        limits = replace(DRIVES[drive], memory=f"{memory >> 20}M")
        runs: list[dict[str, Any]] = []
        started, total = time.monotonic(), args.pairs * len(settings)
        for round_, _, setting in common.plan.alternating(settings, args.pairs):
            path = paths[WAYS[setting.way][0] if setting.mode else "prefetch"]
            binary = found[STOCK_DRIVER if setting.mode is None else DRIVER]
            words = command(binary, path, tokens, args)
            env = environment(setting, maps.get(setting.way), args)
            entry = run(setting, words, env, limits, path)
            runs.append({"setting": setting.name, "round": round_, **entry})
            left = (time.monotonic() - started) / len(runs) * (total - len(runs))
            said = entry.get("error") or f"{entry['tok_s']:.2f} tok/s"
            print(
                f"{drive} {len(runs)}/{total} {setting.name}: {said}; "
                f"about {left / 60:.1f} min left",
                file=sys.stderr,
                flush=True,
            )
        out[drive] = {
            "limits": asdict(limits),
            "replay_memory_bytes": budget,
            "replay_kept": args.kept,
            "replay": predicted,
            "replay_over_measured": errors(predicted, runs),
            "summary": summary(runs),
            "ratios": ratios(runs, modes),
            "runs": runs,
        }
        print(f"\n{drive}\n{table(out[drive])}\n")
        for name, some in out[drive]["replay_over_measured"].items():
            for key, value in some.items():
                common.show(f"  {name}: {key}, replay / measured", value)
        for mode, some in out[drive]["ratios"].items():
            for key, value in some.items():
                common.show(f"  {mode}: {key}", value)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=Path, required=True, help="a folder for the models, about 3.3 GB")
    add("--small", action="store_true", help="a model of 50 MB, to try this script")
    add("--drives", default=",".join(DRIVES), help="default: %(default)s")
    add("--modes", default="read,willneed", help="of the prefetcher (default: %(default)s)")
    add("--pairs", type=int, default=5, help="rounds (default: %(default)s)")
    add("--share", type=float, default=0.4, help="memory as a share of the file (%(default)g)")
    add("--prefill", type=int, default=16, help="prompt tokens (default: %(default)s)")
    add("--warmup", type=int, default=16, help="decoded and not counted (default: %(default)s)")
    add("--decode", type=int, default=48, help="decoded and counted (default: %(default)s)")
    add("--threads", type=int, default=2, help="of the computation (default: %(default)s)")
    add("--prefetch-threads", type=int, default=4, help="default: %(default)s")
    add(
        "--overhead-mib", type=int, default=33, help="not for the file, in the replay (%(default)s)"
    )
    add("--kept", type=float, default=0.0015, help="see above (default: %(default)s)")
    add("--out", type=Path, help="where the JSON goes (default: results/gguf-prefetch.json)")
    args = parser.parse_args()
    if unknown := sorted(set(args.drives.split(",")) - set(DRIVES)):
        raise UsageError(f"unknown drive {unknown[0]}", expected=" or ".join(DRIVES))
    found = {name: binary(name) for name in (DRIVER, STOCK_DRIVER)}
    args.spec = SMALL if args.small else SPEC
    paths = files_of(args.models, args.spec, found[DRIVER])
    size = Model.open(paths["prefetch"]).size
    print(f"{format_size(size)}, {args.share:.0%} of it as memory", file=sys.stderr)
    machine = common.machine.describe([args.models])
    machine["drives"] = {Path(k).name: v for k, v in machine["drives"].items()}
    drives = measure(args, paths, found)
    words = ["python", f"examples/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    data = {
        "format": "mbolt-gguf-bench",
        "version": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(words),
        "machine": machine,
        "model": {**asdict(args.spec), "bytes": size},
        "layouts": LAYOUTS,
        "ways": WAYS,
        "share": args.share,
        "drives": drives,
    }
    text = json.dumps(data, indent=1)
    for folder in {str(args.models.resolve()), str(args.models)} - {".", "/"}:
        text = text.replace(folder, "MODELS")
    out = args.out or common.RESULTS / "gguf-prefetch.json"
    common.report.write(out, json.loads(text))
    print(f"written to {out}", file=sys.stderr)
    return 1 if any("error" in r for one in drives.values() for r in one["runs"]) else 0


if __name__ == "__main__":
    common.main(main)
