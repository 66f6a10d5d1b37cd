"""``--trace``: note what the router chooses while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.engine.runtime import engine_of
from mbolt_mlx.profile.trace_file import Recorder
from mbolt_mlx.profile.traces import DECODE, PREFILL, LayerInfo


@contextmanager
def recorded(model: Any, path: str | Path, *, name: str = "") -> Iterator[Recorder]:
    """Write what ``model`` chooses in this context as a trace.

    Layers that fit whole are recorded too, which costs them a readback a forward.

    Args:
        model: what `mbolt_mlx.load` gave.
        path: the trace; an older trace there is overwritten, nothing else is.
        name: of the model.

    Raises:
        OutputError: when the file cannot be written.
        UsageError: when mbolt did not load the model.
    """
    engine = engine_of(model)
    fetcher = engine._fetcher
    infos = {
        layer.slots.store.layer: LayerInfo(
            shape.experts, shape.top_k, shape.expert_bytes, len(layer.slots.store.pieces)
        )
        for _, layer, shape in engine._layers
    }

    def note(layer: int, tokens: np.ndarray) -> None:
        decoding = fetcher.counts is engine._stats.decode
        recorder.record(DECODE if decoding else PREFILL, layer, tokens)

    with Recorder(path, infos, model=name) as recorder:
        fetcher.note = note
        engine.on_new_session = recorder.new_session
        try:
            yield recorder
        finally:
            fetcher.note = None
            engine.on_new_session = None
