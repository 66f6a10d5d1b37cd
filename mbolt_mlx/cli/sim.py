"""``mbolt-sim``: the first implementation's names for commands of mbolt-mlx and mbolt-gguf."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbolt_mlx.core.commands import CommandLine

NAMES = {
    "cluster": "mbolt_mlx.cli.cluster",
    "gate": "mbolt_mlx.cli.gate",
    "prefetch-map": "mbolt_gguf.cli.prefetch_map",
    "map": "mbolt_gguf.cli.map",
    "trace-stats": "mbolt_mlx.cli.trace_stats",
    "stats": "mbolt_mlx.cli.trace_stats",
    "drive": "mbolt_mlx.cli.probe",
    "probe": "mbolt_mlx.cli.probe",
    "simulate": "mbolt_mlx.cli.simulate",
    "replay": "mbolt_mlx.cli.simulate",
    "plan": "mbolt_mlx.cli.plan",
}

_LINE = CommandLine(
    "mbolt-sim",
    "Profile routing, map models and measure drives (as mbolt-mlx and mbolt-gguf do).",
    NAMES,
    ("mbolt_mlx", "mbolt_gguf"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return _LINE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
