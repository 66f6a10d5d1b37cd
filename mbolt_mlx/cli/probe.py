"""``mbolt-mlx probe``: what a drive can do, in under a minute."""

from __future__ import annotations

import argparse
import json

from tqdm import tqdm

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.reads import THREADS
from mbolt_mlx.core.report import check_report, write_report
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.probe import FORMAT, Probe, probe

HELP = "measure a drive: time a read and bandwidth, by size and number of reads at a time"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "folder",
        help="a folder on the drive, whose largest file is read (without one, a file is written "
        "and removed), or a file",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="about how long to read (default: %(default)g)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the JSON here")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if not 0.5 <= args.seconds <= 600:
        raise UsageError("--seconds is from 0.5 to 600", found=args.seconds)
    if args.output:
        check_report(args.output, FORMAT)
    with tqdm(desc="probing", disable=None, leave=False) as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = probe(args.folder, seconds=args.seconds, step=step)
    document = found.document()
    if args.output:
        write_report(args.output, document)
    print(json.dumps(document, indent=2) if args.json else "\n".join(lines(found)))
    return 0


def lines(found: Probe) -> list[str]:
    """The measurement for people."""
    depths = sorted(found.laws)
    sizes = sorted({p.nbytes for p in found.points})
    at = {(p.nbytes, p.depth): p.seconds for p in found.points}
    how = "past the page cache" if found.direct else "dropped from the page cache first"
    out = [f"{found.path}, {how}; µs a read and MB/s, by reads at a time"]
    out.append(f"{'bytes':>10}" + "".join(f"{f'{d} at a time':>22}" for d in depths))
    for nbytes in sizes:
        cells = [
            f"{at[nbytes, d] * 1e6:>12.0f}{nbytes / at[nbytes, d] / 1e6:>10.0f}" for d in depths
        ]
        out.append(f"{nbytes:>10}" + "".join(cells))
    out.append("")
    for depth in depths:
        law = found.laws[depth]
        mark = "  (the engine's)" if depth == THREADS else ""
        form = ", the slower of the two" if law.slower else ""
        out.append(
            f"{depth:>2} at a time: t_op {law.t_op * 1e6:.0f} µs, BW {format_size(law.bandwidth)}/s"
            f"{form}, within {found.worst[depth]:.0%}{mark}"
        )
    return out
