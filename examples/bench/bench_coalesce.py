"""Write phase of a rewrite against `cp` plus sync of the same bytes, alternating, cold.

    python examples/bench/bench_coalesce.py --model DIR --output FOLDER --json OUT.json

Each pair copies the model's files (cp --reflink=never, then fsync of each copy) and rewrites them
(bytes on the drive, fsync and rename included; reading back is timed apart), in alternating order.
Before each the source is dropped from the page cache: its own pages always, everything when root.
Without --model a random model of 16 layers x 64 experts, float32, 3.2 GB, is made in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mbolt_mlx.bench.counters import peak_rss_bytes
from mbolt_mlx.bench.machine import describe
from mbolt_mlx.core import files
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.experts import find_experts

DROP_ALL = Path("/proc/sys/vm/drop_caches")


def make_source(folder: Path, layers: int = 16, experts: int = 64, side: int = 512) -> Path:
    """A model folder of random float32 experts in two files, without MLX."""
    folder.mkdir(parents=True)
    config = {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 8}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    for half in range(2):
        header, position = {}, 0
        for layer in range(half * layers // 2, (half + 1) * layers // 2):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = [experts, side, side]
                end = position + math.prod(shape) * 4
                header[f"model.layers.{layer}.mlp.switch_mlp.{name}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": [position, end],
                }
                position = end
        text = json.dumps(header).encode()
        with open(folder / f"model-{half + 1:05d}-of-00002.safetensors", "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            while position:
                part = min(position, 32 << 20)
                f.write(rng.bytes(part))
                position -= part
            f.flush()
            os.fsync(f.fileno())
    return folder


def drop_caches(paths: list[Path]) -> str:
    """Make the next read of ``paths`` come from the drive; returns what could be done."""
    os.sync()
    for path in paths:
        fd = files.open_read(path)
        files.drop_cached(fd)
        files.close(fd)
    try:
        DROP_ALL.write_text("3\n")
        return "dropped: source files, then everything"
    except OSError:
        return "dropped: source files"


def drive_reads() -> int | None:
    """Bytes that this process has read from the drive so far, where the system counts them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(y.split()[1]) for y in lines if y.startswith("read_bytes")), None)


def run_copy(paths: list[Path], folder: Path) -> dict:
    """cp and fsync; seconds and bytes."""
    flags = ["--reflink=never"] if sys.platform != "darwin" else []
    folder.mkdir()
    started = time.perf_counter()
    subprocess.run(["cp", "-L", *flags, *map(str, paths), str(folder)], check=True)
    for path in paths:
        fd = files.open_read(folder / path.name)
        files.sync(fd)
        files.close(fd)
    seconds = time.perf_counter() - started
    size = sum((folder / p.name).stat().st_size for p in paths)
    shutil.rmtree(folder)
    return {"engine": "cp", "seconds": seconds, "bytes": size, "bytes_per_s": size / seconds}


def run_rewrite(model: Path, target: Path) -> dict:
    """One rewrite; ``seconds`` is all of it but reading back."""
    read_before = drive_reads()
    cpu = time.process_time()
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    report = coalesce(checkpoint, find_experts(checkpoint), target, progress=False, resume=False)
    seconds = time.perf_counter() - started - report.verify_seconds
    cpu = time.process_time() - cpu
    read = drive_reads()
    target.unlink()
    Path(f"{target}.manifest.json").unlink()
    return {
        "engine": "mbolt",
        "seconds": seconds,
        "bytes": report.bytes,
        "bytes_per_s": report.bytes / seconds,
        "verify_seconds": report.verify_seconds,
        "cpu_seconds_with_verify": cpu,
        "drive_read_bytes": None if read is None else read - read_before,
    }


def main() -> int:
    """Run the pairs, print medians and ranges, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: one is made)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the raw figures go")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    model = args.model
    if model is None:
        model = args.output / "bench-source"
        if not model.exists():
            make_source(model)
    checkpoint = Checkpoint.open(model)
    paths = [shard.path for shard in checkpoint.shards]
    target, copy = args.output / "bench.mbolt", args.output / "bench-copy"
    machine = describe([model, args.output])  # may import MLX: before the memory is measured
    before = peak_rss_bytes()
    runs = []
    for pair in range(args.pairs):
        order = ["cp", "mbolt"] if pair % 2 == 0 else ["mbolt", "cp"]
        for engine in order:
            cache = drop_caches(paths)
            run = run_copy(paths, copy) if engine == "cp" else run_rewrite(model, target)
            runs.append({"pair": pair, "cache": cache, **run})
            print(
                f"pair {pair + 1} {engine:5} {run['seconds']:6.2f} s  "
                f"{format_size(run['bytes_per_s'])}/s",
                file=sys.stderr,
            )
    ratios = [
        next(r["bytes_per_s"] for r in runs if r["pair"] == p and r["engine"] == "mbolt")
        / next(r["bytes_per_s"] for r in runs if r["pair"] == p and r["engine"] == "cp")
        for p in range(args.pairs)
    ]
    result = {
        "machine": machine,
        "model": model.name,
        "pairs": args.pairs,
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "rss_growth_bytes": peak_rss_bytes() - before,
        "runs": runs,
    }
    for engine in ("cp", "mbolt"):
        rates = [r["bytes_per_s"] for r in runs if r["engine"] == engine]
        low, middle, high = min(rates), statistics.median(rates), max(rates)
        print(
            f"{engine:6} median {format_size(middle)}/s  "
            f"({format_size(low)} to {format_size(high)})"
        )
    print(
        f"ratio  median {result['ratio_median']:.2f}  ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{args.pairs} pairs; memory grew by {format_size(result['rss_growth_bytes'])}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
