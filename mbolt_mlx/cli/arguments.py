"""Options that several commands share, and their checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeVar

from mbolt_mlx.core.errors import UsageError
from mbolt_mlx.core.reads import THREADS
from mbolt_mlx.core.residency import DEFAULT_POLICY, POLICIES
from mbolt_mlx.core.sizes import parse_size

MODEL_HELP = (
    "a folder, a hub repository ORG/NAME, a short name that `mbolt-mlx models` lists, or demo, "
    "the small model that ships"
)
READ_THREADS_HELP = f"reads at a time, 1 to 256 (default: {THREADS})"
GGUF_HELP = "a GGUF file (of a split model, any of its files)"

T = TypeVar("T")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, required."""
    parser.add_argument("--model", required=True, help=MODEL_HELP)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is held in memory and read."""
    group = parser.add_argument_group("memory and reading")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--resident",
        type=fraction,
        metavar="FRACTION",
        help="fraction of each layer's experts to keep in memory, over 0 and up to 1",
    )
    size.add_argument(
        "--memory-limit",
        type=memory_limit,
        metavar="SIZE",
        help="memory for the whole process, such as 24GB or 4000MiB, instead of --resident "
        "(with neither: what fits in 70 %% of the memory)",
    )
    file = group.add_mutually_exclusive_group()
    file.add_argument(
        "--side-file",
        metavar="FILE",
        help="coalesced experts that `mbolt-mlx coalesce` wrote (default: the model's own one in "
        "the cache, when there is one)",
    )
    file.add_argument(
        "--no-side-file", action="store_true", help="read the model's own files instead"
    )
    group.add_argument(
        "--policy",
        choices=["default", *POLICIES],
        default="default",
        help=f"which experts stay in memory (default: {DEFAULT_POLICY})",
    )
    group.add_argument("--read-threads", type=read_threads, metavar="N", help=READ_THREADS_HELP)
    group.add_argument(
        "--direct",
        action=argparse.BooleanOptionalAction,
        help="read past the page cache, or through it (default: as the engine finds better)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `mbolt_mlx.load` that the options of `add_engine_options` mean."""
    return {
        "resident": args.resident,
        "memory_limit": args.memory_limit,
        "side_file": None if args.no_side_file else args.side_file or "auto",
        "policy": args.policy,
        "read_threads": args.read_threads,
        "direct": args.direct,
    }


def fraction(text: str) -> float:
    """Parse ``--resident``: over 0 and up to 1."""
    value = _number(text, float)
    if value is not None and 0.0 < value <= 1.0:
        return value
    percent = _number(text.rstrip("% "), float)
    hint = "write a fraction over 0 and up to 1, such as 0.2"
    if percent is not None and 1.0 < percent <= 100.0:
        hint = f"for {percent:g} % write {percent / 100:g}"
    raise UsageError(f"--resident {text!r} is not a fraction of the experts", hint=hint)


def memory_limit(text: str) -> int:
    """Parse ``--memory-limit``: a size in bytes."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"--memory-limit {error.message}", hint=error.hint) from None


def read_threads(text: str) -> int:
    """Parse ``--read-threads``: 1 to 256."""
    value = _number(text, int)
    if value is None or not 1 <= value <= 256:
        raise UsageError(f"--read-threads {text!r} is not a number from 1 to 256")
    return value


def _number(text: str, kind: Callable[[str], T]) -> T | None:
    try:
        value = kind(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
