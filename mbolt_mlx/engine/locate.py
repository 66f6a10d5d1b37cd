"""Build a model lazily and find where the bytes of its experts lie.

Containers are found by what they are in the tree of modules, files by following their tensors
through the model's own ``sanitize``. No weight is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mbolt_mlx.core.errors import CheckpointError, MboltError, UnsupportedError
from mbolt_mlx.engine.explain import (
    AFTER_STACKING,
    CONVERT,
    explained,
    method_of,
    quantisation_of,
)
from mbolt_mlx.engine.slots import DTYPE_NAMES
from mbolt_mlx.engine.trace import Traced, is_traced, tracing, wrap
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import PARTS, PROJECTIONS, ExpertLayer, Piece

log = logging.getLogger(__name__)

# What mlx-lm unpacks after `sanitize`.
_UNPACKED = (".qweight", ".qzeros", ".scales")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Built:
    """A lazy model.

    Args:
        model: as mlx-lm builds it, nothing evaluated.
        config: as mlx-lm returns it.
        layers: where its experts lie, by layer number. Those that mlx-lm computes from the file
            have no place in it.
        sources: by path of a container, the tensors that its experts are computed from.
    """

    model: nn.Module
    config: dict[str, Any]
    layers: tuple[ExpertLayer, ...]
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)


def experts_of(checkpoint: Checkpoint) -> tuple[ExpertLayer, ...]:
    """The expert layers of ``checkpoint``, by layer number, as mlx-lm would load them.

    Raises:
        UnsupportedError: when it has none, or mlx-lm does not know the model.
        CheckpointError: when a tensor is absent or wrong.
    """
    return build(checkpoint).layers


def build(
    checkpoint: Checkpoint,
    *,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Built:
    """Build the model of ``checkpoint`` without reading a weight.

    Args:
        model_config, trust_remote_code: as in ``mlx_lm.load``.

    Raises:
        UnsupportedError, CheckpointError: as in `experts_of`.
    """
    if "model_file" in checkpoint.config:
        raise UnsupportedError(
            "the model brings code of its own, outside mlx-lm's models, so where its experts lie "
            "is not known",
            path=checkpoint.path, found=f"model_file {checkpoint.config['model_file']}",
            hint="load it with mlx_lm.load",
        )  # fmt: skip
    followed: dict[int, Traced] = {}
    stock: list[type[nn.Module]] = []
    late = quantisation_of(checkpoint).get("quant_method") in AFTER_STACKING

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = mlx_lm_utils._get_classes(config)
        stock.append(model_class)
        return _following(model_class, checkpoint, followed, late), args_class

    try:
        model, config = mlx_lm_utils.load_model(
            checkpoint.path,
            lazy=True,
            model_config=model_config,
            get_model_classes=classes,
            trust_remote_code=trust_remote_code,
        )
    except MboltError:
        raise
    except Exception as error:
        raise explained(checkpoint, error) from error
    model.__class__ = stock[0]
    if late:
        _unwrap(model, followed)
    layers = []
    sources = {}
    for path, container in model.named_modules():
        if is_container(container):
            layer, computed_from = _layer(path, container, followed, checkpoint)
            layers.append(layer)
            if layer.computed:
                sources[path] = computed_from
    followed.clear()  # it keeps every array alive
    if not layers:
        raise _no_experts(checkpoint, model)
    layers.sort(key=lambda layer: layer.layer)
    for one, two in zip(layers, layers[1:], strict=False):
        if one.layer == two.layer:
            raise UnsupportedError(
                f"layer {one.layer} has two expert containers, {one.module} and {two.module}",
                path=checkpoint.path,
            )
    return Built(model, config, tuple(layers), sources)


def is_container(module: nn.Module) -> bool:
    """Whether ``module`` runs experts: it has two or more stacked projections."""
    return sum(1 for _ in projections(module)) >= 2


def projections(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The stacked projections of ``container`` by name."""
    for name, child in container.children().items():
        if isinstance(child, (SwitchLinear, QuantizedSwitchLinear)):
            yield name, child


def pieces_of(container: nn.Module) -> list[tuple[str, mx.array]]:
    """The stacked arrays of ``container`` by piece name, in the order of an expert's pieces."""
    found = [
        (name, part, array)
        for name, child in projections(container)
        for part, array in child.items()
        if isinstance(array, mx.array)
    ]
    return [
        (f"{name}.{part}", array)
        for name, part, array in sorted(found, key=lambda f: (_rank(f[0], f[1]), f[0], f[1]))
    ]


def _rank(projection: str, part: str) -> tuple[int, int]:
    return (
        PROJECTIONS.index(projection) if projection in PROJECTIONS else len(PROJECTIONS),
        PARTS.index(part) if part in PARTS else len(PARTS),
    )


def _following(
    stock: type[nn.Module], checkpoint: Checkpoint, followed: dict[int, Traced], late: bool
) -> type[nn.Module]:
    """A subclass of a model whose ``sanitize`` notes where each array comes from.

    With ``late``, mlx-lm goes on changing dtypes after it: what it may change stays wrapped.
    """

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        method = getattr(stock, "sanitize", lambda _, weights: weights)
        wrapped = {n: wrap(n, a, checkpoint.tensors.get(n)) for n, a in weights.items()}
        try:
            with tracing():
                result = method(self, wrapped)
        except Exception:
            log.debug("sanitize could not be followed", exc_info=True)
            return method(self, weights)
        weights.clear()
        out = {}
        for name, value in result.items():
            if is_traced(value) and not (late and not name.endswith(_UNPACKED)):
                followed[id(value.array)] = value
                value = value.array
            out[name] = value
        return out

    return type(stock.__name__, (stock,), {"sanitize": sanitize})


def _unwrap(model: nn.Module, followed: dict[int, Traced]) -> None:
    for module in model.modules():
        for name, value in module.items():
            if is_traced(value):
                followed[id(value.array)] = value
                module[name] = value.array


def _check_dtypes(path: str, container: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse bytes that mlx-lm would multiply as if they were numbers."""
    for name, child in projections(container):
        dtype = child.weight.dtype
        kinds = mx.unsignedinteger if isinstance(child, QuantizedSwitchLinear) else mx.floating
        if not mx.issubdtype(dtype, kinds) or dtype == mx.uint8:
            raise UnsupportedError(
                "mlx-lm takes the bytes of these quantised experts for numbers",
                path=checkpoint.path, tensor=f"{path}.{name}.weight",
                found=f"{dtype}, {method_of(checkpoint)}", hint=CONVERT,
            )  # fmt: skip


def _layer(
    path: str, container: nn.Module, followed: dict[int, Traced], checkpoint: Checkpoint
) -> tuple[ExpertLayer, tuple[str, ...]]:
    number = _NUMBER.search(path)
    if number is None:
        raise UnsupportedError(f"the experts of {path} have no layer number", path=checkpoint.path)
    _check_dtypes(path, container, checkpoint)
    arrays = pieces_of(container)
    experts = arrays[0][1].shape[0]
    pieces, places, sources = [], [], set()
    for name, array in arrays:
        if not array.shape or array.shape[0] != experts:
            raise CheckpointError(
                "the number of experts differs within a layer", path=checkpoint.path,
                tensor=f"{path}.{name}", expected=experts, found=list(array.shape),
            )  # fmt: skip
        dtype = DTYPE_NAMES.get(array.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"experts of dtype {array.dtype} are not supported", path=checkpoint.path,
                tensor=f"{path}.{name}",
            )  # fmt: skip
        pieces.append(Piece(name, dtype, tuple(array.shape[1:]), array.nbytes // experts))
        traced = followed.get(id(array))
        places.append(traced.origin.rows() if traced is not None and traced.origin else None)
        sources |= traced.sources if traced is not None else set()
    if None in places:
        files = np.full((len(pieces), experts), -1, np.int32)
        offsets = np.full((len(pieces), experts), -1, np.int64)
    else:
        table = np.array(places, np.int64)
        files, offsets = table[..., 0].astype(np.int32), table[..., 1].copy()
    files.setflags(write=False)
    offsets.setflags(write=False)
    layer = ExpertLayer(int(number[1]), path, experts, tuple(pieces), files, offsets)
    return layer, tuple(sorted(sources))


def _no_experts(checkpoint: Checkpoint, model: nn.Module) -> UnsupportedError:
    kind = checkpoint.config.get("model_type")
    for path, module in model.named_modules():
        experts = module.get("experts") if isinstance(module, dict) else None
        if isinstance(experts, list) and experts:
            return UnsupportedError(
                f"{path} keeps its experts as separate modules and not stacked, which cannot be "
                "offloaded",
                path=checkpoint.path, found=f"model_type {kind}", hint="load it with mlx_lm.load",
            )  # fmt: skip
    return UnsupportedError(
        "no experts found: the model is dense", path=checkpoint.path, found=f"model_type {kind}",
        hint="load it with mlx_lm.load",
    )  # fmt: skip
