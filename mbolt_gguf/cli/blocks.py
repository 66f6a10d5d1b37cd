"""What the commands that make prefetch maps share: how blocks are read, and on which drive."""

from __future__ import annotations

from mbolt_gguf.blocks import AUTO, BLOCKS
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.probe import open_probe, read_probe

CHOICES = (*BLOCKS, AUTO)
DRIVE_HELP = "what `mbolt-mlx probe` wrote of the drive; auto decides by it"


def law_of(path: str | None) -> Law | None:
    """The law in the probe ``path``; None without one.

    Raises:
        ReadError, TraceError: when it cannot be read, or is no probe.
    """
    return None if path is None else read_probe(open_probe(path))
