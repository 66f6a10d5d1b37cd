"""Write phase of a GGUF rewrite against `cp` plus sync of the same file, alternating, cold.

    python examples/bench/bench_gguf_rewrite.py --output FOLDER --json OUT.json [--model FILE.gguf]

Each pair copies the model (cp --reflink=never, then fsync) and rewrites it with random orders in
each layer (bytes on the drive, fsync and rename included; the check is timed apart), in alternating
order. Before each the source is dropped from the page cache. Without --model a random one of
24 layers x 128 experts, Q4_0, 3.3 GB with slices of 360,448 bytes, is made in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from bench_coalesce import drop_caches, run_copy  # isort: skip
from mbolt_gguf.experts import find_experts
from mbolt_gguf.metadata import Info, encode_header, number, padded, text
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_gguf.types import nbytes_of
from mbolt_mlx.bench.counters import peak_rss_bytes
from mbolt_mlx.bench.machine import describe
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.perms import in_file_order

Q4_0, F32 = 2, 0
LAYERS, EXPERTS, HIDDEN, WIDTH = 24, 128, 1024, 626


def make_model(path: Path) -> Path:
    """A file of random bytes that has the tensors of a MoE model, written and synced."""
    infos = []
    for layer in range(LAYERS):
        infos.append((f"blk.{layer}.ffn_gate_inp.weight", F32, (HIDDEN, EXPERTS)))
        for role in ("gate", "down", "up"):
            infos.append((f"blk.{layer}.ffn_{role}_exps.weight", Q4_0, (HIDDEN, WIDTH, EXPERTS)))
    entries = [Info(name, kind, shape, nbytes_of(kind, shape)) for name, kind, shape in infos]
    keys = [
        text("general.architecture", "bench"),
        number("bench.expert_count", EXPERTS),
        number("bench.expert_used_count", 8),
    ]
    head, _ = encode_header(3, keys, entries)
    rng = np.random.default_rng(0)
    with open(path, "wb") as f:
        f.write(head)
        left = sum(padded(entry.nbytes) for entry in entries)
        while left:
            part = min(left, 32 << 20)
            f.write(rng.bytes(part))
            left -= part
        f.flush()
        os.fsync(f.fileno())
    return path


def random_profile(model: Path):
    """A profile with a random order of each layer."""
    rng = np.random.default_rng(1)
    layers = find_experts(Model.open(model))
    orders = {y.layer: rng.permutation(y.experts).tolist() for y in layers}
    return in_file_order(orders, {})


def run_rewrite(model: Path, target: Path, layout: str) -> dict:
    """One rewrite; ``seconds`` is all of it but the check."""
    perms = random_profile(model)
    cpu, started = time.process_time(), time.perf_counter()
    report = rewrite(model, perms, target, layout=layout, progress=False, resume=False)
    seconds = time.perf_counter() - started - report.verify_seconds
    cpu = time.process_time() - cpu
    for path in report.paths:
        path.unlink()
    return {
        "engine": layout,
        "seconds": seconds,
        "bytes": report.bytes,
        "bytes_per_s": report.bytes / seconds,
        "verify_seconds": report.verify_seconds,
        "cpu_seconds_with_verify": cpu,
    }


def main() -> int:
    """Run the pairs, print medians and ranges, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: one is made)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--layouts", nargs="+", default=["chain+pipeline", "interleave+chain"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the raw figures go")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    model = args.model or args.output / "bench-source.gguf"
    if args.model is None and not model.exists():
        make_model(model)
    paths = [file.path for file in Model.open(model).files]
    machine = describe([model, args.output])
    before, runs = peak_rss_bytes(), []
    for pair in range(args.pairs):
        engines = ["cp", *args.layouts]
        for engine in engines if pair % 2 == 0 else engines[::-1]:
            cache = drop_caches(paths)
            if engine == "cp":
                run = run_copy(paths, args.output / "bench-copy")
            else:
                run = run_rewrite(model, args.output / "bench-out.gguf", engine)
            runs.append({"pair": pair, "cache": cache, **run})
            print(
                f"pair {pair + 1} {engine:18} {run['seconds']:6.2f} s  "
                f"{format_size(run['bytes_per_s'])}/s",
                file=sys.stderr,
            )

    def rate(pair: int, engine: str) -> float:
        return next(r["bytes_per_s"] for r in runs if (r["pair"], r["engine"]) == (pair, engine))

    result = {"machine": machine, "pairs": args.pairs, "ratios": {}, "runs": runs}
    for layout in args.layouts:
        ratios = [rate(p, layout) / rate(p, "cp") for p in range(args.pairs)]
        middle = statistics.median(ratios)
        result["ratios"][layout] = {"median": middle, "range": [min(ratios), max(ratios)]}
        print(f"{layout}: {middle:.2f} of cp ({min(ratios):.2f} to {max(ratios):.2f})")
    result["rss_growth_bytes"] = peak_rss_bytes() - before
    print(f"memory grew by {format_size(result['rss_growth_bytes'])}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
