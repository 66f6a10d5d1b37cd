#!/usr/bin/env python3
"""Predict a replay's reading time, then measure it, on files of real models' piece sizes.

    python examples/bench/gate.py qwen3-30b --scratch FOLDER --read-mbps 400

Runs `mbolt-mlx gate` under the limits of limited.sh: a real recorded trace
(examples/traces), files of random bytes with the pieces of the named model, stock and coalesced,
cold, in alternating order. No conversation with gpt-oss is public, so its pieces are read as the
Qwen3 trace chose experts, in as many layers as make a file of 14 GB.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import sparse

from mbolt_mlx.profile.gate import WITHIN

TRACE = common.ROOT / "examples/traces/qwen3-30b-a3b.route.csv.xz"
MODELS = {
    "qwen3-30b": (48, "mlp.switch_mlp", sparse.affine4(2048, 768)),
    "gpt-oss": (8, "mlp.experts", sparse.mxfp4(2880, 2880)),
}
EXPERTS, TOP_K = 128, 6


def first_layers(layers: int, out: Path) -> Path:
    """The trace of the first ``layers`` layers only, as a file in ``out``."""
    path = out / "trace.csv"
    with lzma.open(TRACE, "rt") as source, path.open("w") as target:
        for line in source:
            if line.startswith("# layer="):
                layer = int(line.split("=")[1].split()[0])
            elif line.startswith("#"):
                line = line.replace("n_layer=48", f"n_layer={layers}")
                layer = 0
            elif line[0].isdigit():
                layer = int(line.split(",")[3])
            else:
                layer = 0
            if layer < layers:
                target.write(line)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", choices=sorted(MODELS))
    add("--scratch", type=Path, required=True, help="a folder on the drive, 18 GB free")
    add("--resident", type=float, default=0.2, help="default: %(default)s")
    add("--read-mbps", type=int, help="limit of the drive, 10^6 bytes a second")
    add("--read-iops", type=int, help="limit of the drive, reads a second")
    add("--tokens", type=int, default=16, help="decoded tokens (default: %(default)s)")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--out", type=Path)
    args = parser.parse_args()
    layers, container, pieces = MODELS[args.name]
    limits = common.Limits(None, args.read_mbps, args.read_iops)
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        folder = Path(place)
        config = {
            "model_type": "qwen3_moe" if args.name == "qwen3-30b" else "gpt_oss",
            "num_hidden_layers": layers,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
        }
        model = sparse.write(folder / args.name, config, pieces, shards=4, container=container)
        trace = first_layers(layers, folder)
        found = folder / "gate.json"
        command = ["gate", str(model), str(trace), "-o", str(found), "--scratch", str(folder)]
        command += ["--resident", str(args.resident), "--tokens", str(args.tokens)]
        command += ["--rounds", str(args.rounds)]
        subprocess.run(
            [*limits.prefix(folder), sys.executable, "-m", "mbolt_mlx.cli.main", *command],
            check=True,
            env=common.plan.environment(),
        )
        document = json.loads(found.read_text())
        described = common.machine.describe([folder])
    for one in (document["drive"], *document["probes"]):
        one["path"] = "SCRATCH"
    described["drives"] = {"SCRATCH": next(iter(described["drives"].values()))}
    document |= {"name": args.name, "limits": common.asdict(limits), "machine": described}
    out = args.out or common.RESULTS / f"gate-{args.name}-{limits.name}.json"
    common.report.write(out, document)
    print(f"written to {out}", file=sys.stderr)
    wrong = [abs(row["error"]) for row in document["rows"]]
    print(f"largest error {max(wrong):.0%}  target {WITHIN:.0%}")
    return 0 if max(wrong) <= WITHIN or limits.name == "bare" else 1


if __name__ == "__main__":
    common.main(main)
