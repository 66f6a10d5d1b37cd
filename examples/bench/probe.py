#!/usr/bin/env python3
"""What a drive can do, with the reader that the engine uses. One JSON line on stdout.

    probe.py rate FILE [--threads 4]            large direct reads: bytes a second
    probe.py law FILE [--threads 4]             direct reads of several sizes: t_op and BW
    probe.py misses MODEL --side-file S [--misses 4]   random experts, layer by layer: s a miss
    probe.py misses MODEL                       the same from the plain shards
    probe.py cpu FILE --nbytes N                processor time of one bare direct read of N bytes

Reads are past the page cache and at random places, as misses are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from mbolt_mlx.core import files, reads  # noqa: E402
from mbolt_mlx.profile.law import fit  # noqa: E402
from mbolt_mlx.profile.probe import law_document  # noqa: E402

LARGE = 8 << 20
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
PAGE = 4096
# A drive that the kernel limits starts with some credit; it is used up before anything is timed.
WARM_UP_S = 0.4


def timed(
    reader: reads.Reader, requests: list[reads.Request], group: int
) -> tuple[float, float, float]:
    """Read ``requests``, ``group`` at a time; seconds, and processor seconds of all and of this."""
    cpu, own, start = time.process_time(), time.thread_time(), time.perf_counter()
    for first in range(0, len(requests), group):
        batch = reads.Batch()
        reader.start(requests[first : first + group], batch)
        while batch.left:
            batch.take()
    return (
        time.perf_counter() - start,
        time.process_time() - cpu,
        time.thread_time() - own,
    )


def random_reads(fd: int, size: int, nbytes: int, count: int, seed: int) -> list[reads.Request]:
    """``count`` reads of ``nbytes`` at different aligned places of a file of ``size`` bytes."""
    places = max(1, (size - nbytes) // PAGE)
    offsets = np.random.default_rng(seed).integers(0, places, count) * PAGE
    pool = reads.slot_buffers(min(count, 16), nbytes)
    return [
        reads.Request(fd, int(offset), [pool[n % len(pool)]], nbytes, (n,))
        for n, offset in enumerate(offsets)
    ]


def rate(path: Path, threads: int, total: int, seed: int) -> dict[str, Any]:
    """Bytes a second of large direct reads, once the drive is under way."""
    fd = files.open_read(path, direct=True)
    reader = reads.Reader(threads)
    size = path.stat().st_size
    requests = random_reads(fd, size, LARGE, max(4, total // LARGE), seed)
    sustained(reader, requests[:16], WARM_UP_S)
    seconds, cpu, _ = timed(reader, requests, len(requests))
    return {"bytes_per_s": len(requests) * LARGE / seconds, "cpu_s": cpu, "threads": threads}


def sustained(
    reader: reads.Reader, requests: list[reads.Request], seconds: float
) -> tuple[float, int]:
    """Repeat ``requests`` for about ``seconds``; the seconds it took and the reads done."""
    took, done = 0.0, 0
    while took < seconds:
        took += timed(reader, requests, len(requests))[0]
        done += len(requests)
    return took, done


def law(path: Path, threads: int, seconds: float, seed: int) -> dict[str, Any]:
    """t_op and BW of t = t_op + bytes / BW, fitted to reads of several sizes, ``threads`` at once.

    t is the time a read adds when reads follow each other without a pause: wall time ÷ reads.
    Each size gets about ``seconds``. The fit is least squares on relative errors.
    """
    fd = files.open_read(path, direct=True)
    reader = reads.Reader(threads)
    size = path.stat().st_size
    points = []
    for n, nbytes in enumerate(SIZES):
        requests = random_reads(fd, size, nbytes, 16 * threads, seed + n)
        sustained(reader, requests, WARM_UP_S)
        took, count = sustained(reader, requests, seconds)
        points.append({"bytes": nbytes, "reads": count, "s_per_read": took / count})
    return {
        **law_document(fit((1, p["bytes"], p["s_per_read"]) for p in points)),
        "threads": threads,
        "points": points,
    }


def cpu(path: Path, nbytes: int, seed: int, count: int = 300) -> dict[str, Any]:
    """Processor seconds of the system call alone, for one direct read of ``nbytes``."""
    fd = files.open_read(path, direct=True)
    nbytes = -(-nbytes // PAGE) * PAGE
    requests = random_reads(fd, path.stat().st_size, nbytes, count, seed)
    for request in requests[:16]:  # touch the buffers
        files.pread_into(fd, request.buffers, request.offset)
    start = time.thread_time()
    for request in requests:
        files.pread_into(fd, request.buffers, request.offset)
    return {"cpu_s_per_read": (time.thread_time() - start) / count, "nbytes": nbytes}


def misses(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, processor seconds and reads a miss, when a layer misses --misses experts at once."""
    from mbolt_mlx.storage import store as stores
    from mbolt_mlx.storage.checkpoint import Checkpoint
    from mbolt_mlx.storage.experts import find_experts
    from mbolt_mlx.storage.locate import open_side_file

    checkpoint = Checkpoint.open(args.path)
    layers = find_experts(checkpoint)
    if args.side_file:
        store = stores.from_side_file(open_side_file(args.side_file, checkpoint, layers), layers)
    else:
        store = stores.from_shards(checkpoint, layers)
    fds = [files.open_read(path, direct=True) for path in store.files]
    reader = reads.Reader(args.threads)
    chosen = np.random.default_rng(args.seed)
    seconds = cpu = own = 0.0
    done = calls = nbytes = 0
    buffers: dict[tuple[int, int], memoryview] = {}
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < args.seconds + WARM_UP_S or not done:
        for layer in store.layers:
            experts = chosen.choice(layer.experts, min(args.misses, layer.experts), replace=False)
            requests = []
            for place, expert in enumerate(experts.tolist()):
                for n, run in enumerate(layer.runs):
                    # Direct reads want whole pages: the range is widened to them, as a bounce does.
                    offset = run.offsets[expert] // PAGE * PAGE
                    end = -(-(run.offsets[expert] + run.nbytes) // PAGE) * PAGE
                    key = (place, n)
                    if key not in buffers or len(buffers[key]) < end - offset:
                        (buffers[key],) = reads.slot_buffers(1, end - offset)
                    view = buffers[key][: end - offset]
                    fd = fds[run.files[expert]]
                    requests.append(reads.Request(fd, offset, [view], len(view), (expert,)))
            took, used, mine = timed(reader, requests, len(requests))
            if elapsed < WARM_UP_S:
                continue
            seconds, cpu, own = seconds + took, cpu + used, own + mine
            done += len(experts)
            calls += len(requests)
            nbytes += sum(r.nbytes for r in requests)
    return {
        "s_per_miss": seconds / done,
        "cpu_s_per_miss": cpu / done,
        "cpu_s_per_miss_caller": own / done,
        "reads_per_miss": calls / done,
        "bytes_per_miss": nbytes / done,
        "misses": done,
        "misses_at_once": args.misses,
        "threads": args.threads,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["rate", "law", "misses", "cpu"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--side-file", type=Path)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--misses", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeat", type=int, default=1, help="the median of so many (rate)")
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of one read (cpu)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kind == "rate":
        found = [
            rate(args.path, args.threads, args.bytes, args.seed + n) for n in range(args.repeat)
        ]
        result = dict(found[0], bytes_per_s=statistics.median(f["bytes_per_s"] for f in found))
    elif args.kind == "law":
        result = law(args.path, args.threads, args.seconds, args.seed)
    elif args.kind == "cpu":
        result = cpu(args.path, args.nbytes, args.seed)
    else:
        result = misses(args)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
