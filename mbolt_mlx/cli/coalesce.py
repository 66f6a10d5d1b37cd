"""``mbolt-mlx coalesce``: write the side-file of a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mbolt_mlx.cli.experts import open_experts
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.places import user_path
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.profile.perms import read_perms, tier_hints
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import coalesce
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.locate import default_side_file
from mbolt_mlx.storage.plan import Hints

HELP = "write a model's experts as one block each, so that a miss is one read"
ASK_FROM = 20 * 10**9


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "--model", required=True, help="a folder, a hub repository, or a short name"
    )
    parser.add_argument("--revision", help="revision of the hub repository")
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of all programs that write a side-file."""
    parser.add_argument(
        "-o", "--output", type=Path, help="the side-file (default: in the user's cache)"
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask before writing 20 GB and more"
    )
    parser.add_argument(
        "--order",
        metavar="PERMS.json",
        help="write the blocks in the order of this profile, and its heat into the manifest "
        "(`mbolt-mlx cluster` makes one; default: as a side-file that is there has them, or by "
        "expert number)",
    )
    parser.add_argument(
        "--order-kind",
        choices=["chain", "clique", "heat"],
        default="chain",
        help="which of the profile's orders (default: %(default)s)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a side-file of another source, or write a good one again",
    )
    parser.add_argument(
        "--no-resume", action="store_true", help="throw away what an interrupted run has written"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the blocks back from the drive"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Write the side-file that ``args`` ask for; returns the exit status."""
    from mbolt_mlx.names import resolve

    folder = resolve(args.model, revision=getattr(args, "revision", None), progress=not args.quiet)
    checkpoint = Checkpoint.open(folder)
    layers, computer = open_experts(checkpoint)
    target = args.output
    if target is None:
        target = default_side_file(checkpoint)
        files.make_folder(target.parent)

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr)

    def before(size: int, free: int) -> None:
        say(
            f"{target}: {format_size(size)} to write, {sum(y.experts for y in layers)} experts in "
            f"{len(layers)} layers; {format_size(free)} free"
        )
        if size >= ASK_FROM and not args.yes:
            _ask(size)

    for warning in checkpoint.warnings:
        say(f"warning: {warning}")
    if computer is not None:
        say("mlx-lm computes these experts from the model's files, so they are computed once, now")
    try:
        report = coalesce(
            checkpoint,
            layers,
            target,
            progress=not args.quiet,
            resume=not args.no_resume,
            verify=not args.no_verify,
            force=args.force,
            name=_name(args.model),
            revision=_revision(args, folder),
            before=before,
            computer=computer,
            **_profile(args, layers),
        )
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on from here")
        raise
    if report.already:
        say(f"{target}: already there and matches the model; nothing to do")
        return 0
    if report.resumed_from:
        say(f"went on from an earlier run: {report.resumed_from} of {report.blocks} blocks")
    rate = ""
    if not report.resumed_from:
        rate = f", {format_size(report.bytes / max(report.write_seconds, 1e-9))}/s"
    say(f"wrote {format_size(report.bytes)} in {report.write_seconds:.1f} s{rate}, drive flushed")
    if not args.no_verify:
        say(f"read back and compared in {report.verify_seconds:.1f} s: all blocks as written")
    return 0


def _profile(args: argparse.Namespace, layers: Sequence[ExpertLayer]) -> dict[str, Any]:
    """What ``--order`` adds to the rewrite.

    Raises:
        UsageError: when the profile is of a model with other experts.
    """
    if args.order is None:
        return {}
    perms = read_perms(args.order)
    wanted = {y.layer: y.experts for y in layers}
    if perms.experts != wanted:
        layer = min(y for y in {*perms.experts, *wanted} if perms.experts.get(y) != wanted.get(y))
        raise UsageError(
            f"--order: the profile is of another model: layer {layer} has other experts",
            path=args.order,
            expected=wanted.get(layer, 0),
            found=perms.experts.get(layer, 0),
        )
    return {
        "order": perms.order(args.order_kind),
        "order_note": {"kind": args.order_kind, "profile_sha256": perms.sha256},
        "hints": {
            layer: Hints(tuple(heat), tuple(tier_hints(heat))) for layer, heat in perms.heat.items()
        },
    }


def _name(model: str) -> str:
    """What the manifest calls the model: of a folder only its name, as paths are private."""
    path = user_path(model)
    return path.resolve().name if path.exists() else model


def _revision(args: argparse.Namespace, folder: Path) -> str | None:
    """The commit of a hub snapshot, which its folder is named by; else what the user said."""
    if folder.parent.name == "snapshots":
        return folder.name
    return getattr(args, "revision", None)


def _ask(size: int) -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"{format_size(size)} would be written", hint="give --yes to agree")
    print("Write it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was written")
