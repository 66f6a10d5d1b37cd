#!/usr/bin/env python3
"""Peak memory: ours against what it may be, and against stock's transient.

    python examples/bench/memory.py --model MODELS/f32 --memory 1300M

1. At --prefill-step-size 512, prompts of --prompts tokens, under the kernel's memory limit: the
   high-water mark of resident memory may be at most that of a process which has only imported
   mlx_lm, plus dense weights, slots, KV cache and 100 MB.
2. At mlx-lm's default step (2048) and the longest prompt: what a run needs beyond import, weights
   or slots, and KV cache, must not be more than stock's own.
Time is not measured, so the runs go --parallel at a time. Linux only: macOS has no VmHWM.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common

ALLOWANCE = 100 * 10**6
STEP, DEFAULT_STEP = 512, 2048
_IMPORT = (
    "import mlx_lm\nfor line in open('/proc/self/status'):\n"
    " if line.startswith('VmHWM'): print(int(line.split()[1]) * 1024)"
)


def beyond(run: dict[str, Any], import_only: int) -> int:
    """Bytes of the peak that are not import, weights, slots or KV cache."""
    known = import_only + run["dense_bytes"] + run["slot_bytes"] + run["kv_bytes"]
    return run["peak_rss_bytes"] - known


def main() -> int:
    parser = common.parser_of(__doc__, decode=4)
    parser.add_argument("--prompts", default="32,512,2000", help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    # Runs side by side must not each put the drive's readahead back.
    limits = common.replace(common.limits_of(args), readahead_kib=None)
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True)
    import_only = int(done.stdout)
    lengths = [int(part) for part in args.prompts.split(",")]
    jobs = []
    for length in lengths:
        args.prefill = length
        jobs.append(common.job_of(args, prefill_step_size=STEP))
    for make in (lambda job: job, common.stock):
        jobs.append(make(common.job_of(args, prefill_step_size=DEFAULT_STEP)))
    print(f"{len(jobs)} runs, {args.parallel} at a time", file=sys.stderr)
    # The machine's page cache is dropped once at each start; cold or not does not matter here.
    jobs = [common.replace(job, cold=False, keep_token_times=False) for job in jobs]
    with ThreadPoolExecutor(args.parallel) as pool:
        runs = list(pool.map(common.runner(limits), jobs))
    for n, run in enumerate(runs):
        run.update(round=0, setting=n, order=n)
        if "error" not in run:
            run["beyond_bytes"] = beyond(run, import_only)
    common.save(
        args,
        f"memory-{args.model.name}",
        runs,
        limits=common.asdict(limits),
        import_only_bytes=import_only,
    )
    failed = any("error" in run for run in runs)
    print(f"import of mlx_lm alone: {import_only / 1e6:.0f} MB")
    for run in runs[: len(lengths)]:
        if "error" in run:
            continue
        fits = run["beyond_bytes"] <= ALLOWANCE
        failed |= not fits
        print(
            f"{run['prefill_tokens']} tokens, step {STEP}: peak {run['peak_rss_bytes'] / 1e6:.0f}"
            f" MB = import + dense {run['dense_bytes'] / 1e6:.0f} + slots "
            f"{run['slot_bytes'] / 1e6:.0f} + KV {run['kv_bytes'] / 1e6:.0f} + "
            f"{run['beyond_bytes'] / 1e6:.0f} MB (target <= 100): {'ok' if fits else 'TOO MUCH'}"
        )
    ours, stock = runs[-2:]
    if "error" not in ours and "error" not in stock:
        fits = ours["beyond_bytes"] <= stock["beyond_bytes"]
        failed |= not fits
        print(
            f"{lengths[-1]} tokens, step {DEFAULT_STEP}: transient {ours['beyond_bytes'] / 1e6:.0f}"
            f" MB, stock {stock['beyond_bytes'] / 1e6:.0f} MB: {'ok' if fits else 'TOO MUCH'}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    common.main(main)
