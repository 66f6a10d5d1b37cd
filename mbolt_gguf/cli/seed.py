"""``mbolt MODEL.gguf PERMS.json -o OUT.gguf [--layout …]``: the first implementation's command.

It is `mbolt-gguf rewrite` under another name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbolt_gguf.cli.rewrite import HELP, configure, run
from mbolt_mlx.core.commands import script

__all__ = ["HELP", "configure", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return script("mbolt", "mbolt_gguf.cli.seed", argv, loggers=("mbolt_mlx", "mbolt_gguf"))


if __name__ == "__main__":
    sys.exit(main())
