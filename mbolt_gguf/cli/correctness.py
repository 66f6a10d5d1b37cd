"""``mbolt-gguf correctness``: four gates between a GGUF and a rewritten copy of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_gguf.build import binary
from mbolt_gguf.correctness import GAP, Checker, Gate, default_tokens
from mbolt_gguf.evaluate import DRIVER
from mbolt_gguf.model import Model
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import UsageError

HELP = "prove that a rewritten model computes what the original computes: four gates"
DESCRIPTION = """\
Four gates: every byte, through the permutation; identity and interleave without a permutation give
the same logits bit for bit; the same experts at equal inputs, layer by layer; and the KL divergence
of the rewritten file inside what the engine differs from itself between two legal ways of
computing, which is measured. Exit status 1 when one fails.

Gates 2 and 3 write rewrites of the original into a temporary folder, one at a time: --scratch names
a folder with room for one copy. Everything is evaluated several times: use a few hundred tokens."""
_TOKENS_MAX = 1 << 24


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("original", metavar="ORIGINAL", type=Path)
    add("rewritten", metavar="REWRITTEN", type=Path)
    add("--tokens", metavar="FILE", type=Path, help="ids as u32, little-endian, or as JSON list")
    add("--count", type=int, metavar="N", help="tokens (default: 64, or all of --tokens)")
    add("--seed", type=int, default=0, help="of the random ids without --tokens")
    add("--layers", type=int, metavar="N", help="permute at most N layers alone (default: all)")
    add("--gap", type=float, default=GAP, help="bound of the router's gap (default: %(default)g)")
    add("--threads", "-t", type=int, default=1, help="default: %(default)s")
    add("--scratch", metavar="DIR", type=Path, help="for temporary files (default: the system's)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("-q", "--quiet", action="store_true", help="do not say what is being done")


def run(args: argparse.Namespace) -> int:
    """Run the gates that ``args`` ask for; 0 when all passed."""
    driver = binary(DRIVER)

    def say(text: str) -> None:
        if not args.quiet:
            print(f"mbolt-gguf correctness: {text}", file=sys.stderr, flush=True)

    checker = Checker(
        args.original,
        args.rewritten,
        driver=driver,
        tokens=_tokens(args),
        scratch=args.scratch,
        layers=args.layers,
        gap=args.gap,
        threads=args.threads,
        say=say,
    )
    gates: list[Gate] = []
    for gate in checker.run():
        gates.append(gate)
        if not args.json:
            print(f"{gate.name:<13}{'pass' if gate.passed else 'FAIL':<6}{gate.found}", flush=True)
    if args.json:
        print(json.dumps(document(args, gates), indent=2))
    return 0 if all(gate.passed for gate in gates) else 1


def document(args: argparse.Namespace, gates: list[Gate]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "format": "mbolt-correctness",
        "version": 1,
        "original": args.original.name,
        "rewritten": args.rewritten.name,
        "passed": all(gate.passed for gate in gates),
        "gates": [gate.document() for gate in gates],
    }


def _tokens(args: argparse.Namespace) -> list[int]:
    if args.count is not None and args.count < 16:
        raise UsageError("--count is at least 16", found=args.count)
    if args.tokens is None:
        return default_tokens(Model.open(args.original), args.count or 64, args.seed)
    data = files.read_whole(args.tokens, limit=_TOKENS_MAX)
    try:
        ids = json.loads(data)
    except ValueError:
        if len(data) % 4:
            raise UsageError(
                "neither a JSON list nor whole u32 numbers", path=args.tokens
            ) from None
        ids = np.frombuffer(data, "<u4").tolist()
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise UsageError("not a list of token ids", path=args.tokens)
    return ids[: args.count]
