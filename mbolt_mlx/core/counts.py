"""Hits, misses and reads: what the engine counts and what a replay predicts, alike."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counts:
    """Counts of a pass or a phase.

    ``hits`` and ``misses`` count experts, once a layer and forward, however many tokens chose
    them. ``reads`` are calls to the drive after merging, ``bytes`` what they asked for.
    """

    tokens: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes: int = 0
    evictions: int = 0

    def add(self, other: Counts) -> None:
        """Count ``other`` too."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were in memory; 1 where none was wanted."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0

    def per_token(self, name: str) -> float:
        """The count ``name`` ÷ tokens."""
        return getattr(self, name) / self.tokens if self.tokens else 0.0
