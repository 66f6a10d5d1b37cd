#!/usr/bin/env python3
"""The gain of the side-file per missed expert, beside what the speed law predicts.

    python examples/bench/speed_law.py --model MODELS/q8

    g = (n0 · t_op + B / BW) / (n1 · t_op + B / BW)      n0, n1 reads an expert without and with
    speedup = 1 / ((1 - s) + s / g)                      s: share of decoding spent on cold reads

(with max in place of + where the drive's measurements say so, see mbolt_mlx/profile/law.py).

For each drive (bare, 400 MB/s, 2,000 reads a second): t_op and BW come from direct reads of five
sizes, as many at once as the engine has threads. g is measured twice: on storage alone (random
experts, so many at once as a layer misses) and in the engine, as the time waited for reads a miss.
The speedup is that of decoding. Everything is cold, in alternating pairs; median [least-most].
"""

from __future__ import annotations

from typing import Any

import common
from common import Limits

from mbolt_mlx.profile.law import fit, speedup
from mbolt_mlx.profile.probe import law_document

DRIVES = (Limits(), Limits(read_mbps=400), Limits(read_iops=2000))
THREADS = 4


def engine_pairs(args: Any, limits: Limits) -> list[dict[str, Any]]:
    """Runs of our engine without and with the side-file under ``limits``."""
    with_side = common.job_of(args, read_threads=THREADS)
    without = common.replace(with_side, side_file=None)
    memory = None if args.memory == "none" else args.memory
    run = common.runner(common.replace(limits, memory=memory))
    return common.rounds([without, with_side], args.engine_pairs, run, f"engine, {limits.name}")


def storage_pairs(
    args: Any, limits: Limits, side: str, at_once: int
) -> list[dict[str, dict[str, Any]]]:
    """Pairs of storage-only measurements, in alternating order."""
    pairs = []
    base = ("--threads", THREADS, "--misses", at_once, "--seconds", args.seconds)
    for n in range(args.pairs):
        pair = {}
        for name in ("shards", "side_file") if n % 2 == 0 else ("side_file", "shards"):
            more = ("--side-file", side) if name == "side_file" else ()
            pair[name] = common.probe(limits, "misses", args.model, *base, "--seed", n, *more)
        pairs.append(pair)
    return pairs


def measure(args: Any, limits: Limits) -> dict[str, Any]:
    """All of one drive."""
    side = common.job_of(args).side_file
    options = ("--threads", THREADS, "--seconds", args.seconds)
    laws = [common.probe(limits, "law", side, *options)]
    runs = engine_pairs(args, limits)
    ok = [r for r in runs if "error" not in r]
    plain = [r for r in ok if r["side_file"] is None]
    sided = [r for r in ok if r["side_file"] is not None]
    layers = sided[0]["offloaded_layers"]
    at_once = max(1, round(common.median(sided, "decode_misses_per_token") / layers))
    pairs = storage_pairs(args, limits, side, at_once)
    laws.append(common.probe(limits, "law", side, *options, "--seed", 1))
    drive = fit((1, p["bytes"], p["s_per_read"]) for law in laws for p in law["points"])
    nbytes = pairs[0]["side_file"]["bytes_per_miss"]
    n0, n1 = (pairs[0][name]["reads_per_miss"] for name in ("shards", "side_file"))
    g = drive.gain(n0, n1, nbytes)
    by_round = {r["round"]: r for r in sided}
    both = [(r, by_round[r["round"]]) for r in plain if r["round"] in by_round]

    def wait(run: dict[str, Any]) -> float:
        return run["decode_read_wait_s"] / run["decode_misses"]

    share = sum(r["read_wait_s_per_token"] * r["decode_tps"] for r in plain) / len(plain)
    spread = common.report.spread
    return {
        "limits": common.asdict(limits),
        **law_document(drive),
        "laws": laws,
        "expert_bytes": nbytes,
        "misses_at_once": at_once,
        "g_law": g,
        "g_storage": spread(
            p["shards"]["s_per_miss"] / p["side_file"]["s_per_miss"] for p in pairs
        ),
        "storage": pairs,
        "g_engine_wait": spread(wait(a) / wait(b) for a, b in both),
        "reads_per_miss": {
            "shards": spread(r["decode_reads"] / r["decode_misses"] for r in plain),
            "side_file": spread(r["decode_reads"] / r["decode_misses"] for r in sided),
        },
        "read_share": share,
        "speedup": spread(b["decode_tps"] / a["decode_tps"] for a, b in both),
        "speedup_law": speedup(share, g),
        "runs": runs,
    }


def main() -> int:
    parser = common.parser_of(__doc__, decode=24)
    parser.add_argument("--engine-pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each storage measurement")
    args = parser.parse_args()
    found, runs = {}, []
    for limits in DRIVES:
        result = measure(args, limits)
        for run in result.pop("runs"):
            run.update(setting=run["setting"] + 2 * len(found), order=len(runs), drive=limits.name)
            runs.append(run)
        found[limits.name] = result
    common.save(args, f"speed-law-{args.model.name}", runs, speed_law=found)
    bad = any("error" in run for run in runs)
    for name, one in found.items():
        rate = one["bytes_per_s"] / 1e6
        form = ", the slower decides" if one["slower"] else ""
        print(f"\n{name}: t_op {one['t_op_s'] * 1e6:.0f} us, BW {rate:.0f} MB/s{form}")
        for source, reads in one["reads_per_miss"].items():
            common.show(f"  reads a miss, {source}", reads)
        print(f"  g, law: {one['g_law']:.2f}")
        common.show("  g, storage alone", one["g_storage"])
        common.show("  g, wait a miss in the engine", one["g_engine_wait"])
        print(f"  speedup of decoding, law (s = {one['read_share']:.2f}): {one['speedup_law']:.2f}")
        common.show("  speedup of decoding", one["speedup"])
        bad |= one["reads_per_miss"]["side_file"]["max"] > 1
    return 1 if bad else 0


if __name__ == "__main__":
    common.main(main)
