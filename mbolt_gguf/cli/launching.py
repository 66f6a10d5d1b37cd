"""What `run` and `serve` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from mbolt_gguf.blocks import AUTO
from mbolt_gguf.cli.blocks import CHOICES, DRIVE_HELP, law_of
from mbolt_gguf.launch import ADVICES, MODES, Prefetch, prepare
from mbolt_mlx.core.errors import UsageError

OPTIONS = (
    "--no-prefetch",
    "--prefetch-mode",
    "--prefetch-threads",
    "--prefetch-advice",
    "--prefetch-blocks",
    "--drive",
    "--stats",
    "--trace",
    "--llama-cli",
    "--llama-server",
)


def add_options(parser: argparse.ArgumentParser, program: str) -> None:
    """Add the options of a command that starts ``program``."""
    parser.usage = f"%(prog)s [options] MODEL [-- {program}'s flags]"
    parser.add_argument("model", metavar="MODEL", help="a GGUF file; any file of a split model")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    group = parser.add_argument_group("prefetch")
    group.add_argument("--no-prefetch", action="store_true", help="leave reading to page faults")
    group.add_argument(
        "--prefetch-mode",
        choices=MODES,
        default=MODES[0],
        help="read the chosen experts and wait (read), or only announce them (willneed)",
    )
    group.add_argument(
        "--prefetch-threads", type=int, default=4, metavar="N", help="reads at a time (4)"
    )
    group.add_argument(
        "--prefetch-advice",
        choices=ADVICES,
        default=ADVICES[0],
        help="no readahead in the experts' part of the memory map (random), or as usual (none)",
    )
    group.add_argument(
        "--prefetch-blocks",
        choices=CHOICES,
        default=AUTO,
        metavar="HOW",
        help="blocks of an interleaved file: whole, slices, or auto: what suits the mode and "
        "--drive; without --drive, as in the map that is there",
    )
    group.add_argument("--drive", metavar="PROBE.json", help=DRIVE_HELP)
    group.add_argument("--stats", action="store_true", help="print what was read, at the end")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the chosen experts to FILE (MBLT v1)"
    )
    parser.add_argument(
        f"--{program}",
        dest="own",
        type=Path,
        metavar="PATH",
        help=f"this {program} of an unmodified llama.cpp, with shared libraries, instead of ours "
        "(Linux)",
    )


def start(program: str, args: argparse.Namespace) -> int:
    """Start ``program`` in the place of this process."""
    if not 1 <= args.prefetch_threads <= 64:
        raise UsageError("--prefetch-threads is a number from 1 to 64", found=args.prefetch_threads)
    # argparse drops the -- on some versions of Python and keeps it on others.
    flags = list(args.flags[1:] if args.flags[:1] == ["--"] else args.flags)
    ours = [flag for flag in flags if flag.partition("=")[0] in OPTIONS]
    if ours:
        raise UsageError(f"{ours[0]} is not a flag of {program}", hint="it comes before the model")
    prefetch = Prefetch(
        args.prefetch_mode,
        args.prefetch_threads,
        args.prefetch_advice,
        stats=args.stats,
        blocks=args.prefetch_blocks,
        law=law_of(args.drive),
    )
    launch = prepare(
        program,
        args.model,
        flags,
        prefetch=None if args.no_prefetch else prefetch,
        trace=args.trace,
        own=args.own,
    )
    launch.start()
    return 0
