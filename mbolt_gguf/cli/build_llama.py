"""``mbolt-gguf build-llama``: llama.cpp with our patches."""

from __future__ import annotations

import argparse
from pathlib import Path

from mbolt_gguf import build
from mbolt_mlx.core.errors import UsageError

HELP = "fetch, patch and build llama.cpp"
DESCRIPTION = f"""\
Fetch the pinned llama.cpp (the sdist of llama-cpp-python on PyPI, by pip), check its hash, apply
llama_patch and build it into the user's cache. What is built already is not built again; the second
time needs no network. Prints where the binaries are.

Needs cmake, a C++ compiler, and ninja or make. With ccache on the PATH a rebuild takes seconds.

Targets: {", ".join(build.TARGETS)} (the default); {", ".join(build.ALSO)}.
{build.PRELOAD}, for a llama.cpp of your own, takes seconds (Linux)."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a copy of the pinned sdist, or a folder with the pinned llama.cpp, instead of PyPI",
    )
    parser.add_argument("--targets", metavar="A,B,…", help="build these only")
    parser.add_argument(
        "--stock",
        action="store_true",
        help=f"build {build.STOCK_DRIVER} too, from the tree without the patches",
    )
    backend = parser.add_mutually_exclusive_group()
    backend.add_argument("--metal", action="store_true", help="with Metal (macOS)")
    backend.add_argument("--cuda", action="store_true", help="with CUDA")
    parser.add_argument(
        "-D", dest="defines", action="append", default=[], metavar="NAME=VALUE",
        help="one more option of cmake; may be repeated",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Build what ``args`` ask for and print name and place of each binary."""
    if args.jobs is not None and args.jobs < 1:
        raise UsageError("--jobs is at least 1", found=args.jobs)
    bad = [text for text in args.defines if "=" not in text]
    if bad:
        raise UsageError(f"-D {bad[0]} is not NAME=VALUE")
    targets = list(build.TARGETS)
    if args.targets is not None:
        targets = [name.strip() for name in args.targets.split(",") if name.strip()]
    if args.stock and build.STOCK_DRIVER not in targets:
        targets.append(build.STOCK_DRIVER)
    found = build.build(
        targets,
        source=args.source,
        metal=args.metal,
        cuda=args.cuda,
        defines=args.defines,
        jobs=args.jobs,
        quiet=args.quiet,
    )
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {path}")
    return 0
