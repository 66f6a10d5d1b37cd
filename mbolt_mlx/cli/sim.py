"""``mbolt-sim``: the first implementation's names for commands of ``mbolt-mlx``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbolt_mlx.cli import main as commands

NAMES = {
    "stats": "trace-stats",
    "trace-stats": "trace-stats",
    "cluster": "cluster",
    "simulate": "simulate",
    "replay": "simulate",
    "gate": "gate",
    "drive": "probe",
    "probe": "probe",
    "plan": "plan",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    for place, word in enumerate(given):
        if not word.startswith("-"):
            given[place] = NAMES.get(word, word)
            break
    return commands.main(given)


if __name__ == "__main__":
    sys.exit(main())
