"""The expert container that replaces mlx-lm's: the same kernels on slot numbers.

mlx-lm calls an expert container with rows ``x [..., D]`` and the router's choice ``[..., K]``, and
gets ``[..., K, D]``. The stock container stays what it is; only its stacked arrays are shorter.
Before it runs, the experts that the router named are brought into slots, and their numbers are
replaced by slot numbers (`mbolt_mlx.engine.layer`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.engine.layer import OffloadedLayer


def offload(container: nn.Module, layer: OffloadedLayer) -> None:
    """Turn a stock expert container into one that runs on ``layer``'s slots, in place.

    Its stacked arrays are replaced by the layer's; its class becomes a subclass of its own, so
    that whatever else hangs on it, and whoever asks what it is, finds no difference.
    """
    for name, array in layer.slots.arrays.items():
        module, attribute = resolve(container, name)
        setattr(module, attribute, array)
        if "to_lora" not in type(module).__dict__:
            module.__class__ = _frozen_class(type(module))
    container._offloaded = layer
    container.__class__ = _offloaded_class(type(container))


def rebind(container: nn.Module) -> None:
    """Point the container at its layer's arrays again after they were reallocated."""
    for name, array in container._offloaded.slots.arrays.items():
        module, attribute = resolve(container, name)
        setattr(module, attribute, array)


def resolve(container: nn.Module, piece: str) -> tuple[nn.Module, str]:
    """The submodule and attribute that hold ``piece`` ("gate_proj.weight") in ``container``."""
    *path, attribute = piece.split(".")
    module = container
    for part in path:
        module = module[part]
    return module, attribute


_classes: dict[tuple[type, str], type] = {}


def _offloaded_class(stock: type[nn.Module]) -> type[nn.Module]:
    key = (stock, "container")
    if key not in _classes:

        def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
            layer = self._offloaded
            forward = layer.forward_whole if layer.whole else layer.forward
            return forward(lambda rows, slots: stock.__call__(self, rows, slots), x, indices)

        _classes[key] = type(f"Offloaded{stock.__name__}", (stock,), {"__call__": call})
    return _classes[key]


def _frozen_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A projection on slots: it computes, and refuses what would take slots for experts."""
    key = (stock, "projection")
    if key not in _classes:

        def refuse_lora(self: Any, *args: Any, **kwargs: Any) -> None:
            raise UnsupportedError(
                "LoRA on offloaded experts is not possible: a slot holds one expert after another",
                hint="adapt the attention layers only, or load with mlx_lm.load",
            )

        def refuse_quantisation(self: Any, *args: Any, **kwargs: Any) -> None:
            raise UnsupportedError(
                "offloaded experts cannot be quantised in memory",
                hint="convert the model with mlx_lm.convert first",
            )

        _classes[key] = type(
            f"Offloaded{stock.__name__}",
            (stock,),
            {"to_lora": refuse_lora, "to_quantized": refuse_quantisation},
        )
    return _classes[key]
