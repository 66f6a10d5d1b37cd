"""``--trace``: note what the router chooses while a model runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mbolt_mlx.engine.runtime import engine_of
from mbolt_mlx.profile.trace_file import Recorder
from mbolt_mlx.profile.traces import DECODE, PREFILL, LayerInfo


class _Waiting:
    """Choices on their way to a recorder, forward by forward.

    A layer that fits whole needs no readback of its choices. To wait for each would cost a tenth of
    the speed, so they are read when their values are there anyway: after a layer of the same
    forward that did read back, or when the second forward after theirs begins (mlx-lm begins one
    before the last one has been computed).
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forwards: deque[list[tuple[str, int, mx.array | np.ndarray]]] = deque([[]])
        self._last: tuple[str, int] | None = None

    def note(self, phase: str, layer: int, chosen: mx.array | np.ndarray) -> None:
        """Expert ids ``[..., top_k]``; of numpy where what comes before is computed as well."""
        if self._last is not None and (phase != self._last[0] or layer <= self._last[1]):
            self._forwards.append([])
        self._last = phase, layer
        self._forwards[-1].append((phase, layer, chosen))
        self.write(keep=0 if isinstance(chosen, np.ndarray) else 2)

    def write(self, keep: int) -> None:
        """Pass on all but the last ``keep`` forwards."""
        while len(self._forwards) > max(keep, 1):
            self._record(self._forwards.popleft())
        if not keep:
            self._record(self._forwards[0])
            self._forwards[0].clear()

    def _record(self, forward: list[tuple[str, int, mx.array | np.ndarray]]) -> None:
        for phase, layer, chosen in forward:
            ids = np.array(chosen)
            self._recorder.record(phase, layer, ids.reshape(-1, ids.shape[-1]))

    def new_session(self) -> None:
        """What comes next belongs to another conversation."""
        self.write(keep=0)
        self._recorder.new_session()


@contextmanager
def recorded(model: Any, path: str | Path, *, name: str = "") -> Iterator[Recorder]:
    """Write what ``model`` chooses in this context as a trace.

    Layers that fit whole are recorded too. What was chosen in a forward that fails is left out as
    far as it was not read back.

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

    with Recorder(path, infos, model=name) as recorder:
        waiting = _Waiting(recorder)

        def note(layer: int, chosen: mx.array | np.ndarray) -> None:
            decoding = fetcher.counts is engine._stats.decode
            waiting.note(DECODE if decoding else PREFILL, layer, chosen)

        fetcher.note = note
        engine.on_new_session = waiting.new_session
        try:
            yield recorder
        except BaseException:
            waiting.write(keep=1)
            raise
        else:
            waiting.write(keep=0)
        finally:
            fetcher.note = None
            engine.on_new_session = None
