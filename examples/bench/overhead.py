#!/usr/bin/env python3
"""What a miss costs the processor beyond the read itself, and what opening costs.

    python examples/bench/overhead.py --models MODELS

1. Two small models that differ only in experts a layer, 64 and 512 (made here on first use), with
   16 slots a layer each. miss_path.py leads the engine through recorded choices without computing:
   processor time a miss, less that of the bare read call, is what bringing an expert in costs. A
   call of the engine's own costs more than a bare one, so what is outside them is told as well.
   Then the same tokens are really decoded with 16 slots, with one slot less than experts (nearly no
   misses, all else alike) and with every expert in memory. Processor time of the first less the
   second, ÷ misses of the first less the second, less that of the read, has in it what else a miss
   does to a decode: a layer computed in two parts, and code and products that run slower after a
   wait, on experts that are in no cache of the processor. Against the third, the router's readback
   and the mapping to slots, which hits pay too, are in it as well.
2. Opening a side-file of 94 layers x 128 experts (sparse files, nothing is in them).
3. Open files of the model while it is loaded: one a shard, or one side-file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import make_model
import sparse

TARGET_US, TARGET_OPEN_S = 60, 0.3
SLOTS = 16
LAYERS, EXPERTS, HIDDEN, WIDTH = 94, 128, 4096, 1536


def model_of(models: Path, experts: int) -> Path:
    """The model of ``experts`` experts a layer under ``models``, made on first use."""
    path = models / f"scale{experts}"
    if not (path / "config.json").exists():
        make_model.make(path, preset=path.name, mode="none", emb_scale=10.0)
    return path


def misses(args: argparse.Namespace, experts: int) -> dict[str, Any]:
    """Microseconds a miss for the model of ``experts`` experts a layer."""
    options = argparse.Namespace(
        model=model_of(args.models, experts),
        resident=SLOTS / experts,
        prefill=32,
        decode=args.decode,
        policy="default",
    )
    part = common.job_of(options)
    nearly = common.replace(part, resident=(experts - 1) / experts, cold=False)
    whole = common.replace(part, resident=1.0, cold=False)
    run = common.runner(common.Limits(readahead_kib=None))
    runs = common.rounds([part, nearly, whole], args.pairs, run, f"{experts} experts")
    for result in runs:
        if "error" in result:
            raise common.MboltError(result["error"])
    few, most, every = ([r for r in runs if r["setting"] == n] for n in range(3))
    nbytes = few[0]["decode_bytes"] / few[0]["decode_misses"]
    bare = common.probe(
        common.Limits(readahead_kib=None), "cpu", part.side_file, "--nbytes", int(nbytes)
    )["cpu_s_per_read"]

    def beyond(against: list[dict[str, Any]]) -> dict[str, float] | None:
        """Microseconds a miss, from each round's pair."""
        pairs = [(r, next(o for o in against if o["round"] == r["round"])) for r in few]
        return common.report.spread(
            1e6 * (_less(a, b, "cpu_s_decode") / _less(a, b, "decode_misses") - bare)
            for a, b in pairs
        )

    path = json.loads(
        common.script(
            str(common.HERE / "miss_path.py"), options.model, part.side_file, "--slots", SLOTS
        )
    )["runs"]
    return {
        "experts": experts,
        "path_us": common.report.spread(r["us"] - r["read_alone_us"] for r in path),
        "outside_reads_us": common.report.spread(r["us_timed"] - r["us_reading"] for r in path),
        "path": path,
        "beyond_read_us": beyond(most),
        "with_readback_us": beyond(every),
        "bare_read_us": 1e6 * bare,
        "expert_bytes": nbytes,
        "misses_per_token": common.median(few, "decode_misses_per_token"),
        "misses_per_token_nearly": common.median(most, "decode_misses_per_token"),
        "runs": runs,
    }


def _less(a: dict[str, Any], b: dict[str, Any], key: str) -> float:
    return a[key] - b[key]


def sparse_model(folder: Path) -> Path:
    """A model and side-file as large as Qwen3-235B at 4 bits, without a byte of weights."""
    from mbolt_mlx.storage.checkpoint import Checkpoint
    from mbolt_mlx.storage.experts import find_experts
    from mbolt_mlx.storage.manifest import Manifest, manifest_path, source_of
    from mbolt_mlx.storage.plan import make_plan

    config = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_hidden_layers": LAYERS}
    sparse.write(folder, config, sparse.affine4(HIDDEN, WIDTH), shards=27)
    checkpoint = Checkpoint.open(folder)
    layers = find_experts(checkpoint)
    source = source_of(checkpoint)
    plan = make_plan(layers, source.stamp)
    entries = tuple(y.entry([os.urandom(16).hex() for _ in range(EXPERTS)]) for y in plan.layers)
    side = folder.with_name("side") / "experts.safetensors"
    side.parent.mkdir()
    with side.open("wb") as out:
        out.write(plan.header(entries))
        out.truncate(plan.size)
    Manifest(
        tool="overhead.py",
        created="2026-01-01T00:00:00+00:00",
        source=source,
        alignment=plan.alignment,
        order={"kind": "id", "profile_sha256": None},
        layers=entries,
    ).write(manifest_path(side))
    return side


_OPEN = """
import sys, time
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import find_experts
from mbolt_mlx.storage.locate import open_side_file
checkpoint = Checkpoint.open(sys.argv[1])
layers = find_experts(checkpoint)
start = time.perf_counter()
open_side_file(sys.argv[2], checkpoint, layers)
print(time.perf_counter() - start)
"""


def opening(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to open the side-file of a very large model, each time in a fresh process."""
    with tempfile.TemporaryDirectory(dir=args.models, prefix="sparse-") as place:
        folder = Path(place) / "model"
        folder.mkdir()
        side = sparse_model(folder)
        seconds = []
        for _ in range(args.pairs):
            done = subprocess.run(
                [sys.executable, "-c", _OPEN, str(folder), str(side)],
                stdout=subprocess.PIPE,
                check=True,
                env=common.plan.environment(),
            )
            seconds.append(float(done.stdout))
        return {
            "layers": LAYERS,
            "experts": EXPERTS,
            "side_file_bytes": side.stat().st_size,
            "manifest_bytes": Path(f"{side}.manifest.json").stat().st_size,
            "seconds": common.report.spread(seconds),
        }


_FILES = """
import os, sys, mbolt_mlx
side = sys.argv[2] or None
model, _ = mbolt_mlx.load(sys.argv[1], resident=0.25, side_file=side)
links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
print(sum(link.endswith(".safetensors") for link in links))
"""


def open_files(args: argparse.Namespace) -> dict[str, int]:
    """Weight files that a loaded model keeps open, with and without the side-file."""
    model = model_of(args.models, 512)
    found = {"shards": len(list(model.glob("model*.safetensors")))}
    for name, side in (("open_without", ""), ("open_with", str(common.side_file(model)))):
        done = subprocess.run(
            [sys.executable, "-c", _FILES, str(model), side],
            stdout=subprocess.PIPE,
            check=True,
            env=common.plan.environment(),
        )
        found[name] = int(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder for the models")
    parser.add_argument("--decode", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    found = {n: misses(args, n) for n in (64, 512)}
    runs = []
    for n, one in found.items():
        for run in one.pop("runs"):
            runs.append({**run, "setting": run["setting"] + (3 if n == 512 else 0)})
    opened, handles = opening(args), open_files(args)
    args.model = args.models / "scale512"
    common.save(
        args, "overhead", runs, overhead={"miss": found, "opening": opened, "files": handles}
    )
    for n, one in found.items():
        common.show(
            f"{n} experts a layer: us a miss beyond the read", one["path_us"], f"<= {TARGET_US}"
        )
        common.show("  outside the read calls, by their threads' clocks", one["outside_reads_us"])
        common.show("  of a whole decode, computing in it", one["beyond_read_us"])
        common.show("  with the readback that hits pay too", one["with_readback_us"])
        print(
            f"  a bare read of {one['expert_bytes'] / 1e3:.0f} kB costs {one['bare_read_us']:.0f}"
            f" us, {one['misses_per_token']:.1f} misses a token"
        )
    common.show("opening 94 x 128 experts, s", opened["seconds"], "< 0.3")
    print(
        f"open files: {handles['open_without']} for {handles['shards']} shards, "
        f"{handles['open_with']} with the side-file; all of it took "
        f"{time.monotonic() - started:.0f} s"
    )
    us = [found[n]["path_us"]["median"] for n in (64, 512)]
    # Equal within the spread of the runs counts as no higher.
    higher = found[512]["path_us"]["min"] > found[64]["path_us"]["max"]
    fits = max(us) <= TARGET_US and not higher and opened["seconds"]["median"] < TARGET_OPEN_S
    fits &= handles["open_without"] <= handles["shards"] and handles["open_with"] == 1
    return 0 if fits else 1


if __name__ == "__main__":
    common.main(main)
