"""Experts that are no ranges of the model's files: mlx-lm computes them, a layer at a time.

The model is lazy, so evaluating one layer's arrays reads and computes what that layer needs and
nothing else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mbolt_mlx.engine.locate import Built, build
from mbolt_mlx.engine.switch import resolve
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.computed import versions
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.gather import Gatherer, Window, pieces_in, zero_padding

_NAMED = 6


def open_experts(
    checkpoint: Checkpoint,
) -> tuple[tuple[ExpertLayer, ...], ComputedExperts | None]:
    """The expert layers of ``checkpoint``, and what computes those that need it, if any do.

    Raises:
        UnsupportedError, CheckpointError: as `mbolt_mlx.engine.locate.build`.
    """
    built = build(checkpoint)
    if not any(layer.computed for layer in built.layers):
        return built.layers, None
    return built.layers, ComputedExperts(built, checkpoint)


class ComputedExperts:
    """Fills windows of a side-file, in the order of layers and on one thread.

    One layer of experts is in memory, and while the next is computed, one of its pieces.

    Args:
        built: the lazy model. Its experts are used up.
        checkpoint: its files.
    """

    threads = 0

    def __init__(self, built: Built, checkpoint: Checkpoint) -> None:
        self._modules = dict(built.model.named_modules())
        self._gatherer = Gatherer([shard.path for shard in checkpoint.shards])
        self._layer: ExpertLayer | None = None
        self._rows: list[np.ndarray] = []
        kind = type(built.model)
        self.note: dict[str, Any] = {
            "by": f"{kind.__module__}.{kind.__name__}.sanitize",
            **versions(),
            "layers": {
                path: {"tensors": len(names), "of": list(names[:_NAMED])}
                for path, names in built.sources.items()
            },
        }

    def fill(self, window: Window, out: np.ndarray) -> None:
        """Put the bytes of ``window`` into ``out`` (uint8, one dimension), padding as zeros.

        Raises:
            ReadError: when a range of a shard cannot be read.
        """
        layer = window.layer.source
        if not layer.computed:
            self._gatherer.fill(window, out)
            return
        if layer is not self._layer:
            self._compute(layer)
        zero_padding(window, out)
        width = window.hi - window.lo
        for piece, at, first, last in pieces_in(window):
            for i, expert in enumerate(window.experts):
                place = i * width + first - window.lo
                out[place : place + last - first] = self._rows[piece][
                    expert, first - at : last - at
                ]

    def _compute(self, layer: ExpertLayer) -> None:
        self._layer, self._rows = layer, []
        container = self._modules[layer.module]
        for piece in layer.pieces:
            module, attribute = resolve(container, piece.name)
            array = module[attribute]
            raw = mx.contiguous(array.reshape(layer.experts, -1)).view(mx.uint8)
            module[attribute] = mx.zeros((1,))
            del array
            self._rows.append(np.array(raw))
            del raw
            mx.clear_cache()
