"""What the engine counts, apart for prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mbolt_mlx.core.counts import Counts


@dataclass
class PhaseStats(Counts):
    """Counts and times of one phase.

    Times are in seconds: ``read_wait_s`` is spent waiting for the drive with nothing left to
    start, ``readback_wait_s`` waiting for the router's choice (which includes the computation
    before it).
    """

    forwards: int = 0
    seconds: float = 0.0
    read_wait_s: float = 0.0
    readback_wait_s: float = 0.0
    readbacks: int = 0

    @property
    def tps(self) -> float:
        """Tokens a second, sampling included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def misses_per_token(self) -> float:
        """Experts read a token, over all layers."""
        return self.per_token("misses")

    @property
    def reads_per_token(self) -> float:
        """Calls to the drive a token."""
        return self.per_token("reads")

    @property
    def bytes_per_token(self) -> float:
        """Bytes read a token."""
        return self.per_token("bytes")

    @property
    def read_wait_s_per_token(self) -> float:
        """Seconds a token spent waiting for the drive."""
        return self.per_token("read_wait_s")

    @property
    def readback_wait_s_per_token(self) -> float:
        """Seconds a token spent waiting for the router's choice."""
        return self.per_token("readback_wait_s")

    @property
    def cold_read_share(self) -> float:
        """s of the speed law: the share of the phase spent waiting for the drive."""
        return min(1.0, self.read_wait_s / self.seconds) if self.seconds else 0.0


_RATES = (
    "hit_rate",
    "misses_per_token",
    "reads_per_token",
    "bytes_per_token",
    "read_wait_s_per_token",
    "readback_wait_s_per_token",
)


@dataclass
class Stats:
    """What a loaded model has done so far, and how it was set up. Sizes in bytes.

    ``dense_bytes`` is all but the experts, ``slot_bytes`` the experts' slots, ``expert_bytes`` all
    experts on the drive. ``slots`` gives each offloaded layer's slots.
    """

    prefill: PhaseStats = field(default_factory=PhaseStats)
    decode: PhaseStats = field(default_factory=PhaseStats)
    dense_bytes: int = 0
    slot_bytes: int = 0
    expert_bytes: int = 0
    layers: int = 0
    offloaded_layers: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    experts: dict[int, int] = field(default_factory=dict)
    resident: float = 1.0
    side_file: str | None = None
    policy: str = ""
    direct: bool = False
    read_threads: int = 0
    shrinks: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The keys of the benchmark's JSON."""
        out: dict[str, Any] = {
            "resident": self.resident,
            "side_file": self.side_file,
            "policy": self.policy,
            "direct": self.direct,
            "read_threads": self.read_threads,
            "slot_bytes": self.slot_bytes,
            "dense_bytes": self.dense_bytes,
            "expert_bytes": self.expert_bytes,
            "layers": self.layers,
            "offloaded_layers": self.offloaded_layers,
            "shrinks": self.shrinks,
        }
        for phase, counts in (("prefill", self.prefill), ("decode", self.decode)):
            out[f"{phase}_tps"] = counts.tps
            for key in _RATES:
                out[f"{phase}_{key}"] = getattr(counts, key)
            for key in ("tokens", "forwards", "seconds", "hits", "misses", "reads", "bytes"):
                out[f"{phase}_{key}"] = getattr(counts, key)
            out[f"{phase}_evictions"] = counts.evictions
        out["read_wait_s_per_token"] = self.decode.read_wait_s_per_token
        out["readback_wait_s_per_token"] = self.decode.readback_wait_s_per_token
        return out
