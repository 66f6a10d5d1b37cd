"""Find the expert containers of a lazily built model and put slots in place of their arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mbolt_mlx.core import memory
from mbolt_mlx.core.budget import FREED_BYTES, LayerShape
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.core.residency import ResidentSet, make_policy
from mbolt_mlx.engine.fetch import Fetcher
from mbolt_mlx.engine.layer import OffloadedLayer
from mbolt_mlx.engine.locate import is_container, pieces_of
from mbolt_mlx.engine.slots import MLX_DTYPES, LayerSlots, widens
from mbolt_mlx.engine.switch import offload
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.store import LayerStore, Store

log = logging.getLogger(__name__)

# On a GPU, what `FREED_BYTES` is on a CPU.
CACHE_BYTES_GPU = 512 << 20
_TOP_K = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "num_experts_per_token",
    "moe_router_topk",
    "top_k_experts",
)


@dataclass(frozen=True)
class Place:
    """An expert container of the model and where its experts are stored."""

    container: nn.Module
    store: LayerStore
    shape: LayerShape


def match(
    model: nn.Module,
    config: dict[str, Any],
    store: Store,
    checkpoint: Checkpoint,
    *,
    widen: bool = False,
) -> list[Place]:
    """Pair each expert container of ``model`` with its layer in ``store``, in layer order.

    Args:
        model, config: as mlx-lm builds it.
        store: where the experts lie.
        checkpoint: the model's files.
        widen: whether slots keep 16-bit numbers as float32.

    Raises:
        UnsupportedError: if a container has no stored layer, or its arrays are not the stored
            bytes; nothing is ever loaded whole without saying so.
    """
    stored = {layer.module: layer for layer in store.layers}
    modules = dict(model.named_modules())
    places = []
    for path, container in modules.items():
        if not is_container(container):
            continue
        layer = stored.pop(path, None)
        if layer is None:
            raise UnsupportedError(
                f"the experts of {path} were not found in the model's files",
                path=checkpoint.path,
                hint="convert the model with mlx_lm.convert",
            )
        _check_arrays(path, container, layer, checkpoint)
        parent = modules.get(path.rpartition(".")[0])
        size = layer.expert_bytes
        if widen:
            size += sum(piece.nbytes for piece in layer.pieces if widens(piece))
        shape = LayerShape(layer.experts, _top_k(parent, config, layer, checkpoint), size)
        places.append(Place(container, layer, shape))
    if not places:
        raise UnsupportedError("mlx-lm builds this model without experts", path=checkpoint.path)
    if stored:
        log.info("not part of the model that mlx-lm builds: %s", ", ".join(stored))
    return sorted(places, key=lambda place: place.store.layer)


def _check_arrays(
    path: str, container: nn.Module, layer: LayerStore, checkpoint: Checkpoint
) -> None:
    pieces = {piece.name: piece for piece in layer.pieces}
    arrays = dict(pieces_of(container))
    for name in sorted(pieces.keys() | arrays.keys()):
        piece, array = pieces.get(name), arrays.get(name)
        stored = (
            f"{piece.dtype} [{layer.experts}, {', '.join(map(str, piece.shape))}]"
            if piece is not None
            else "nothing"
        )
        if (
            piece is None
            or array is None
            or MLX_DTYPES.get(piece.dtype) != array.dtype
            or (layer.experts, *piece.shape) != array.shape
        ):
            built = f"{array.dtype} {list(array.shape)}" if array is not None else "nothing"
            raise UnsupportedError(
                f"mlx-lm computes these experts from the file ({built} from {stored})",
                path=checkpoint.path,
                tensor=f"{path}.{name}",
                hint="convert the model with mlx_lm.convert and use the result",
            )


def _top_k(
    parent: nn.Module | None, config: dict[str, Any], layer: LayerStore, checkpoint: Checkpoint
) -> int:
    """Experts that a token uses in this layer; 1 where neither module nor config says."""
    inner = config.get("text_config")
    configs = [config, inner if isinstance(inner, dict) else {}]
    candidates = [getattr(parent, key, None) for key in ("top_k", *_TOP_K)]
    candidates += [c.get(key) for c in configs for key in _TOP_K]
    # As a key of a config it may be that of sampling.
    for value in [*candidates, *(c.get("top_k") for c in configs)]:
        if isinstance(value, int) and 0 < value <= layer.experts:
            return value
    odd = next((value for value in candidates if type(value) is int), None)
    if odd is not None:
        raise UnsupportedError(
            f"the config says how many experts a token uses in {layer.module}, and it cannot be",
            path=checkpoint.path, expected=f"1 to {layer.experts}", found=odd,
        )  # fmt: skip
    return 1


def check_backend(layers: Sequence[ExpertLayer], checkpoint: Checkpoint) -> bool:
    """Whether 16-bit experts must be kept as float32 to run here.

    MLX's CPU multiplies unquantised experts in float32 only, stock mlx-lm does not run them at all.

    Raises:
        UnsupportedError: when the experts have a format that cannot run here.
    """
    if mx.default_device() == mx.gpu:
        return False
    pieces = [(layer.module, piece) for layer in layers for piece in layer.pieces]
    for module, piece in pieces:
        if piece.name.endswith(".global_scale"):
            raise UnsupportedError(
                "MLX's CPU cannot run experts in nvfp4 with a scale for each expert",
                path=checkpoint.path, tensor=f"{module}.{piece.name}", hint="use a GPU",
            )  # fmt: skip
    return any(p.name.endswith(".weight") and widens(p) for _, p in pieces)


def dense_bytes(model: nn.Module, places: Sequence[Place]) -> int:
    """Bytes of everything but the experts."""
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return total - sum(a.nbytes for place in places for _, a in pieces_of(place.container))


def activation_bytes(model: nn.Module) -> int:
    """Bytes of one activation: those of the widest floating-point parameter."""
    floats = (mx.float32, mx.bfloat16, mx.float16)
    sizes = [a.itemsize for _, a in tree_flatten(model.parameters()) if a.dtype in floats]
    return max(sizes, default=2)


def install(
    places: Sequence[Place],
    slots: Sequence[int],
    fetcher: Fetcher,
    policy: str,
    *,
    widen: bool = False,
) -> list[tuple[nn.Module, OffloadedLayer, LayerShape]]:
    """Give each container its slots and drop every reference to the stacked arrays."""
    layers = []
    for place, count in zip(places, slots, strict=True):
        resident = ResidentSet(place.store.experts, count, make_policy(policy, place.store.experts))
        layer = OffloadedLayer(LayerSlots(place.store, count, widen=widen), resident, fetcher)
        offload(place.container, layer)
        layers.append((place.container, layer, place.shape))
    return layers


def evaluate(model: nn.Module) -> None:
    """Bring all that is not an expert into memory, a module at a time.

    Arrays outside the parameters (RoPE frequencies and the like) too: one that is still lazy
    cannot be evaluated on another thread than the one that made it.
    """
    for _, module in model.named_modules():
        arrays = [v for v in module.values() if isinstance(v, mx.array)]
        arrays += [v for v in vars(module).values() if isinstance(v, mx.array)]
        if arrays:
            mx.eval(arrays)


def limit_cache() -> None:
    """Bound what MLX and the C library keep of freed buffers, for the whole process."""
    gpu = mx.default_device() == mx.gpu
    mx.set_cache_limit(CACHE_BYTES_GPU if gpu else FREED_BYTES)
    memory.return_large_blocks()
