"""One measurement: forced prefill, forced decode, and every counter around them.

It knows no engine. An engine is an object with the methods of ``Engine`` below; the adapters are in
``worker.py`` and, for other projects, in examples/bench.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from mbolt_mlx.bench import cold
from mbolt_mlx.bench.counters import Counters, peak_rss_bytes, rss_bytes


@dataclass
class Job:
    """What one process measures. Travels as JSON.

    ``prompt`` and ``decode`` are token ids. ``side_file``: "auto", a path, or None for the shards.
    ``drop`` lists files and folders whose pages leave the cache before the run when ``cold``.
    ``options`` is for engines of other projects.
    """

    engine: str
    model: str
    prompt: list[int]
    decode: list[int]
    resident: float | None = None
    memory_limit: str | None = None
    side_file: str | None = "auto"
    policy: str = "default"
    read_threads: int | None = None
    direct: bool | None = None
    prefill_step_size: int = 2048
    cold: bool = False
    drop: list[str] = field(default_factory=list)
    drop_everything: bool = False
    keep_token_times: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Job:
        """The job in ``data``; keys that are unknown are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})

    def as_dict(self) -> dict[str, Any]:
        """The job as JSON can hold it."""
        return asdict(self)


@dataclass
class Counts:
    """What an engine has counted since it was loaded. Bytes, and seconds. None: not counted."""

    hits: int | None = 0
    misses: int | None = 0
    reads: int | None = 0
    bytes: int | None = 0
    evictions: int | None = 0
    read_wait_s: float | None = 0.0
    readback_wait_s: float | None = 0.0

    def since(self, before: Counts) -> Counts:
        """What was added since ``before``."""
        now, old = asdict(self), asdict(before)
        return Counts(
            **{k: None if v is None or old[k] is None else v - old[k] for k, v in now.items()}
        )


class Engine(Protocol):
    """What ``measure`` needs of an engine."""

    def import_only(self) -> None:
        """Import what stock mlx-lm imports, and nothing more."""

    def load(self, job: Job) -> None:
        """Load the model of ``job``, ready to run."""

    def make_cache(self) -> list[Any]:
        """A fresh KV cache."""

    def forward(self, tokens: Any, cache: list[Any]) -> Any:
        """Logits [batch, tokens, vocabulary] of ``tokens`` [batch, tokens]."""

    def counts(self) -> Counts:
        """Everything counted so far."""

    def describe(self) -> dict[str, Any]:
        """resident, side_file, policy, slot_bytes, dense_bytes and what else is known."""


def prefill(engine: Engine, cache: list[Any], prompt: list[int], step: int) -> Any:
    """Run ``prompt`` as mlx-lm's generate does and return the last position's logits [vocabulary].

    All tokens but the last go through in chunks of at most ``step``, of which only the cache is
    evaluated; the last token gives the logits.
    """
    import mlx.core as mx

    tokens = mx.array([prompt])
    done = 0
    while len(prompt) - done > 1:
        size = min(step, len(prompt) - done - 1)
        engine.forward(tokens[:, done : done + size], cache)
        mx.eval([c.state for c in cache])
        done += size
        mx.clear_cache()
    logits = engine.forward(tokens[:, done:], cache)[0, -1]
    mx.eval(logits)
    return logits


def measure(engine: Engine, job: Job) -> dict[str, Any]:
    """Load, run and describe. Returns one entry of the benchmark's ``runs``."""
    import mlx.core as mx
    import numpy as np

    engine.import_only()
    import_rss = peak_rss_bytes()
    started = time.perf_counter()
    engine.load(job)
    load_s = time.perf_counter() - started
    load_peak = peak_rss_bytes()
    cache = engine.make_cache()
    if job.cold:
        if job.drop_everything:
            cold.drop_everything()
        # The engine may have found a side-file that the job does not name.
        cold.drop(cold.weight_files(*job.drop, engine.describe().get("side_file")))
    digest = hashlib.sha256()

    def note(logits: Any) -> None:
        digest.update(np.array(logits.astype(mx.float32)).tobytes())

    before, counted = Counters.read(), engine.counts()
    logits = prefill(engine, cache, job.prompt, job.prefill_step_size)
    after_prefill, counted_prefill = Counters.read(), engine.counts()
    prompt_peak = peak_rss_bytes()
    note(logits)
    times = []
    start, counted_start = Counters.read(), engine.counts()
    for token in job.decode:
        began = time.perf_counter()
        logits = engine.forward(mx.array([[token]]), cache)[0, -1]
        mx.eval(logits)
        times.append(time.perf_counter() - began)
        note(logits)
    end, counted_end = Counters.read(), engine.counts()

    phases = {
        "prefill": (after_prefill.since(before), counted_prefill.since(counted)),
        "decode": (end.since(start), counted_end.since(counted_start)),
    }
    result = {
        "engine": job.engine,
        **summary(phases, len(job.prompt), times),
        "peak_rss_bytes": peak_rss_bytes(),
        **engine.describe(),
        "model": Path(job.model).name,
        "tokens_sha256": hashlib.sha256(repr((job.prompt, job.decode)).encode()).hexdigest(),
        "prefill_tokens": len(job.prompt),
        "decode_tokens": len(job.decode),
        "prefill_step_size": job.prefill_step_size,
        "load_s": load_s,
        "logits_sha256": digest.hexdigest(),
        "import_rss_bytes": import_rss,
        "load_peak_rss_bytes": load_peak,
        "prefill_peak_rss_bytes": prompt_peak,
        "end_rss_bytes": rss_bytes(),
        "kv_bytes": sum(c.nbytes for c in cache if hasattr(c, "nbytes")),
        "mlx_peak_bytes": mx.get_peak_memory(),
    }
    if job.keep_token_times:
        result["token_s"] = [round(t, 6) for t in times]
    verdict = cold.judge(
        (name, counts.bytes or 0, counters.drive_read_bytes)
        for name, (counters, counts) in phases.items()
    )
    result["cold"] = job.cold and verdict.cold
    result["cold_asked"] = job.cold
    result["cold_share"] = verdict.share
    result["cold_reason"] = verdict.reason if job.cold else None
    return result


def summary(
    phases: dict[str, tuple[Counters, Counts]], prompt: int, times: list[float]
) -> dict[str, Any]:
    """The benchmark's figures from what was counted in prefill and decode.

    ``prompt`` is the number of prompt tokens, ``times`` the seconds of each decoded token.
    """
    (pre, pre_counts), (dec, dec_counts) = phases["prefill"], phases["decode"]
    decoded = len(times)
    out: dict[str, Any] = {
        "prefill_tps": prompt / pre.time_s,
        "ttft_s": pre.time_s,
        "decode_tps": _per(decoded, sum(times)),
        "decode_hit_rate": _hit_rate(dec_counts),
        "decode_misses_per_token": _per(dec_counts.misses, decoded),
        "decode_reads_per_token": _per(dec_counts.reads, decoded),
        "decode_bytes_per_token": _per(dec_counts.bytes, decoded),
        "read_wait_s_per_token": _per(dec_counts.read_wait_s, decoded),
        "readback_wait_s_per_token": _per(dec_counts.readback_wait_s, decoded),
        "drive_read_bytes": None,
        "drive_read_bytes_prefill": pre.drive_read_bytes,
        "drive_read_bytes_decode": dec.drive_read_bytes,
        "prefill_hit_rate": _hit_rate(pre_counts),
        "cpu_s_prefill": pre.cpu_s,
        "cpu_s_decode": dec.cpu_s,
    }
    if pre.drive_read_bytes is not None and dec.drive_read_bytes is not None:
        out["drive_read_bytes"] = pre.drive_read_bytes + dec.drive_read_bytes
    for name, value in asdict(pre_counts).items():
        out[f"prefill_{name}"] = value
        out[f"decode_{name}"] = getattr(dec_counts, name)
    return out


def _per(total: float | None, count: float) -> float | None:
    return None if total is None or not count else total / count


def _hit_rate(counts: Counts) -> float | None:
    if counts.hits is None or counts.misses is None:
        return None
    return _per(counts.hits, counts.hits + counts.misses)
