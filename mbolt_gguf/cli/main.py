"""``mbolt-gguf COMMAND …``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbolt_mlx.core.commands import CommandLine

LOGGERS = ("mbolt_mlx", "mbolt_gguf")

# A command is imported only when it is used.
COMMANDS = {
    "map": "mbolt_gguf.cli.map",
    "rewrite": "mbolt_gguf.cli.rewrite",
    "profile": "mbolt_gguf.cli.profile",
    "verify": "mbolt_gguf.cli.verify",
    "correctness": "mbolt_gguf.cli.correctness",
    "prefetch-map": "mbolt_gguf.cli.prefetch_map",
    "build-llama": "mbolt_gguf.cli.build_llama",
    "run": "mbolt_gguf.cli.run",
    "serve": "mbolt_gguf.cli.serve",
}

_LINE = CommandLine(
    "mbolt-gguf",
    "Run mixture-of-experts GGUF models that are bigger than memory, with llama.cpp.",
    COMMANDS,
    LOGGERS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return _LINE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
