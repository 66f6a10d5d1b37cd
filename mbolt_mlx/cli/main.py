"""``mbolt-mlx COMMAND …``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbolt_mlx.core.commands import CommandLine, Parser

__all__ = ["COMMANDS", "Parser", "main"]

# A command is imported only when it is used, and imports MLX no earlier than in configure.
COMMANDS = {
    "generate": "mbolt_mlx.cli.generate",
    "coalesce": "mbolt_mlx.cli.coalesce",
    "verify": "mbolt_mlx.cli.verify",
    "inspect": "mbolt_mlx.cli.inspect",
    "bench": "mbolt_mlx.cli.bench",
    "models": "mbolt_mlx.cli.models",
    "support": "mbolt_mlx.cli.support",
    "plan": "mbolt_mlx.cli.plan",
    "probe": "mbolt_mlx.cli.probe",
    "trace-stats": "mbolt_mlx.cli.trace_stats",
    "cluster": "mbolt_mlx.cli.cluster",
    "profile": "mbolt_mlx.cli.profile",
    "simulate": "mbolt_mlx.cli.simulate",
    "gate": "mbolt_mlx.cli.gate",
    "plot": "mbolt_mlx.cli.plot",
}

_LINE = CommandLine(
    "mbolt-mlx",
    "Run mixture-of-experts models that are bigger than memory, on MLX.",
    COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return _LINE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
