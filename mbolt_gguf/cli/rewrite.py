"""``mbolt-gguf rewrite``: write a GGUF model anew, its experts in the order of a profile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mbolt_gguf.permute import DEFAULT_LAYOUT
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.perms import read_perms

HELP = "write a model anew, its experts ordered by a routing profile"
DESCRIPTION = """\
Write a GGUF model anew so that experts which are used together lie together. The result computes
the same: router, biases and scales move with the experts, and all metadata is kept. A split model
stays split. Every byte is read back and compared before a file gets its name.

Layouts: heat (the most used first), clique and chain (what fires together, side by side), each
with +pipeline (all experts' weights at the end of the file in the order of execution) or without:
these load in any llama.cpp. interleave puts each expert's pieces into one block, for one read
instead of three; alone it leaves the order as it is, interleave+chain changes it too. It needs the
llama.cpp that `mbolt-gguf build-llama` makes. identity moves nothing.

A file that was rewritten can be rewritten again; profiles always name the original experts."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, any file of a split model")
    parser.add_argument(
        "perms",
        metavar="PERMS.json",
        nargs="?",
        help="the profile (`mbolt-sim cluster` makes one); interleave and identity need none",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="the new file (default: beside the model)"
    )
    parser.add_argument("--layout", default=DEFAULT_LAYOUT, help="see above (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    parser.add_argument(
        "--no-resume", action="store_true", help="throw away what an interrupted run has written"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the result back from the drive"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Rewrite what ``args`` name; returns the exit status."""

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr)

    def before(plan, first: Path) -> None:
        if args.perms and files.is_same_file(first, args.perms):
            raise UsageError("the output is the profile itself", path=first)
        free = files.free_space(first.parent)
        number = f" and {len(plan.files) - 1} more" if len(plan.files) > 1 else ""
        say(
            f"{first}{number}: {format_size(plan.size)} to write, layout {plan.layout}; "
            f"{format_size(free)} free"
        )
        for note in plan.notes:
            say(f"note: {note}")

    try:
        report = rewrite(
            args.model,
            read_perms(args.perms) if args.perms else None,
            args.output,
            layout=args.layout,
            force=args.force,
            verify=not args.no_verify,
            progress=not args.quiet,
            resume=not args.no_resume,
            before=before,
        )
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on from here")
        raise
    rate = ""
    if report.resumed:
        say(f"went on from an earlier run, which had written {format_size(report.resumed)}")
    else:
        rate = f", {format_size(report.bytes / max(report.write_seconds, 1e-9))}/s"
    say(f"wrote {format_size(report.bytes)} in {report.write_seconds:.1f} s{rate}, drive flushed")
    if not args.no_verify:
        say(f"compared with the model in {report.verify_seconds:.1f} s: every byte is the same")
    return 0
