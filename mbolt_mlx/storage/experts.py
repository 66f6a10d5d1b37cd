"""Which tensors are experts, and where each expert's pieces lie.

Two layouts hold an expert's bytes as the model runs them: one stacked tensor a piece, experts
first, and one tensor for each expert. A layout is a pattern and how it counts experts; layouts
whose bytes mlx-lm computes at load (fused, transposed, requantised) are named and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbolt_mlx.core.errors import CheckpointError, UnsupportedError
from mbolt_mlx.storage.checkpoint import Checkpoint, Tensor
from mbolt_mlx.storage.header import DTYPE_BITS

DTYPE_BYTES = {name: bits // 8 for name, bits in DTYPE_BITS.items() if bits >= 8}

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
PARTS = ("weight", "scales", "biases", "bias", "global_scale")
_RENAMED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_COMPLETE = (
    frozenset({"gate_proj", "up_proj", "down_proj"}),
    frozenset({"fc1", "fc2"}),
)

_STACKED = re.compile(
    r"^(?P<module>(?:.+\.)?(?:switch_mlp|switch_glu|experts))"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|fc1|fc2)"
    r"\.(?P<part>weight|scales|biases|bias|global_scale)$"
)
_SINGLE = re.compile(
    r"^(?P<parent>(?:.+\.)?)(?P<container>experts|moe\.mlp)\.(?P<expert>\d+)"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3|fc1|fc2)"
    r"\.(?P<part>weight|scales|biases|bias|global_scale)$"
)
_COMPUTED = re.compile(
    r"(?:^|\.)(?:experts|switch_mlp|switch_glu)\.(?:\d+\.)?"
    r"(?:gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3|fc1|fc2|mlp\.)"
    r"|\.block_sparse_moe\.(?:input|output)_linear\."
    r"|\.moe\.(?:gate|up|down)_proj\."
)
# What MLX's kernels take as a weight; anything else is converted at load.
_WEIGHT_DTYPES = frozenset({"F32", "F16", "BF16", "U32"})
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# mlx-lm stacks these under the raw name instead of `switch_mlp`.
_STACK_IN_PLACE = frozenset({"Klear", "afmoe", "dots1"})
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of every expert of a layer; ``shape`` and ``nbytes`` are of one expert."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """The experts of one layer.

    ``files[p, e]`` (int32) is the shard, an index into ``Checkpoint.shards``, and
    ``offsets[p, e]`` (int64) the absolute byte where piece ``p`` of expert ``e`` begins. Both are
    -1 throughout where the experts are no ranges of the files, but computed from them.
    """

    layer: int
    module: str
    experts: int
    pieces: tuple[Piece, ...]
    files: np.ndarray
    offsets: np.ndarray

    @property
    def computed(self) -> bool:
        """Whether no range of the files holds these experts."""
        return bool((self.files < 0).any())

    @property
    def block_bytes(self) -> int:
        """Bytes of one expert, without padding."""
        return sum(piece.nbytes for piece in self.pieces)


def find_experts(checkpoint: Checkpoint) -> tuple[ExpertLayer, ...]:
    """The expert layers of ``checkpoint``, by layer number.

    Layers past the config's number of layers (extra prediction heads that mlx-lm drops) are left
    out.

    Raises:
        CheckpointError: when experts of one layer differ in shape or dtype, or one lacks a piece.
        UnsupportedError: when there are no experts that can be read as they lie.
    """
    found: dict[str, dict[tuple[str, str], Any]] = {}
    sources: dict[str, Tensor] = {}
    last = _first_int(checkpoint.config, _LAYER_KEYS)
    for tensor in checkpoint.tensors.values():
        key = _place(tensor.name, checkpoint.config)
        if key is None:
            if _COMPUTED.search(tensor.name) and not _is_extra(tensor.name, last):
                raise _computed(checkpoint, tensor)
            continue
        module, projection, part, expert = key
        number = _layer_of(module, checkpoint, tensor)
        if number is None or (last is not None and number >= last):
            continue
        pieces = found.setdefault(module, {})
        sources.setdefault(module, tensor)
        if expert is None:
            clash = (projection, part) in pieces
            pieces[projection, part] = tensor
        else:
            entry = pieces.setdefault((projection, part), {})
            clash = isinstance(entry, Tensor) or expert in entry
            if not clash:
                entry[expert] = tensor
        if clash:
            raise _wrong(checkpoint, tensor, f"another tensor holds this piece of {module} too")
    if not found:
        raise _no_experts(checkpoint)
    numbers: dict[int, str] = {}
    layers = []
    for module, pieces in found.items():
        number = _layer_of(module, checkpoint, sources[module])
        if number in numbers:
            raise UnsupportedError(
                f"layer {number} has two expert containers, {numbers[number]} and {module}",
                path=checkpoint.path, tensor=sources[module].name,
            )  # fmt: skip
        numbers[number] = module
        layers.append(_layer(checkpoint, number, module, pieces, sources[module]))
    return tuple(sorted(layers, key=lambda layer: layer.layer))


def _place(name: str, config: dict[str, Any]) -> tuple[str, str, str, int | None] | None:
    """(module, projection, part, expert or None) of an expert tensor; None for any other."""
    match = _STACKED.match(name)
    if match:
        return match["module"], match["projection"], match["part"], None
    match = _SINGLE.match(name)
    if not match:
        return None
    projection = _RENAMED.get(match["projection"], match["projection"])
    parent, kind = match["parent"], config.get("model_type")
    if match["container"] == "moe.mlp":
        parent += "moe."
    if kind == "kimi_linear":
        parent = parent.replace("block_sparse_moe.", "mlp.")
    if kind == "nemotron_h":
        projection = {"up_proj": "fc1", "down_proj": "fc2"}.get(projection, projection)
    stack = "experts" if kind in _STACK_IN_PLACE else "switch_mlp"
    return f"{parent}{stack}", projection, match["part"], int(match["expert"])


def _layer_of(module: str, checkpoint: Checkpoint, tensor: Tensor) -> int | None:
    """The layer's number; None for extra prediction heads."""
    if _is_extra(module, None):
        return None
    match = _LAYER.search(module)
    if match is None:
        raise UnsupportedError(
            "an expert tensor whose layer cannot be told from its name",
            path=checkpoint.shards[tensor.shard].path, tensor=tensor.name,
        )  # fmt: skip
    return int(match[1])


def _layer(
    checkpoint: Checkpoint,
    number: int,
    module: str,
    pieces: dict[tuple[str, str], Any],
    any_tensor: Tensor,
) -> ExpertLayer:
    projections = {projection for projection, part in pieces if part == "weight"}
    if projections not in _COMPLETE:
        whole = next((c for c in _COMPLETE if projections & c), _COMPLETE[0])
        if projections <= whole:
            lacking = min(whole - projections, key=PROJECTIONS.index)
            raise _wrong(checkpoint, any_tensor, f"{module} has no {lacking}.weight")
        raise _wrong(
            checkpoint, any_tensor, f"{module} has projections that do not belong together",
            found=", ".join(sorted(projections)),
        )  # fmt: skip
    order = sorted(pieces, key=lambda key: (PROJECTIONS.index(key[0]), PARTS.index(key[1])))
    experts = _count(checkpoint, module, pieces, order[0])
    made: list[Piece] = []
    files = np.empty((len(order), experts), np.int32)
    offsets = np.empty((len(order), experts), np.int64)
    for row, key in enumerate(order):
        if key[0] not in projections:
            tensor = _any(pieces[key])
            raise _wrong(checkpoint, tensor, f"{module} has no {key[0]}.weight")
        name = ".".join(key)
        entry = pieces[key]
        if isinstance(entry, Tensor):
            made.append(_stacked(checkpoint, module, name, entry, experts))
            files[row] = entry.shard
            offsets[row] = entry.offset + made[-1].nbytes * np.arange(experts, dtype=np.int64)
        else:
            made.append(_single(checkpoint, module, name, entry, experts))
            files[row] = [entry[e].shard for e in range(experts)]
            offsets[row] = [entry[e].offset for e in range(experts)]
    _check_config(checkpoint, module, experts, any_tensor)
    files.setflags(write=False)
    offsets.setflags(write=False)
    return ExpertLayer(number, module, experts, tuple(made), files, offsets)


def _count(
    checkpoint: Checkpoint,
    module: str,
    pieces: dict[tuple[str, str], Any],
    first: tuple[str, str],
) -> int:
    entry = pieces[first]
    if isinstance(entry, Tensor):
        if not entry.shape or not entry.shape[0]:
            raise _wrong(checkpoint, entry, f"{module} has no experts", found=entry.shape)
        return entry.shape[0]
    return max(max(e) for e in pieces.values() if not isinstance(e, Tensor)) + 1


def _check_dtype(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    if name.endswith(".weight") and tensor.dtype not in _WEIGHT_DTYPES:
        raise _computed(checkpoint, tensor)
    if tensor.dtype not in DTYPE_BYTES:
        raise _wrong(checkpoint, tensor, f"experts of dtype {tensor.dtype} are not supported")
    if not tensor.nbytes:
        raise _wrong(checkpoint, tensor, "an expert piece of no bytes", found=list(tensor.shape))


def _stacked(checkpoint: Checkpoint, module: str, name: str, tensor: Tensor, experts: int) -> Piece:
    if not tensor.shape or tensor.shape[0] != experts:
        raise _wrong(
            checkpoint, tensor, f"the number of experts differs within {module}",
            expected=experts, found=list(tensor.shape),
        )  # fmt: skip
    rank = len(tensor.shape)
    if name.endswith(".weight") and rank != 3:
        raise _wrong(checkpoint, tensor, "a stacked expert weight has three dimensions", found=rank)
    _check_dtype(checkpoint, name, tensor)
    return Piece(name, tensor.dtype, tensor.shape[1:], tensor.nbytes // experts)


def _single(
    checkpoint: Checkpoint, module: str, name: str, entry: dict[int, Tensor], experts: int
) -> Piece:
    first = entry[min(entry)]
    for expert in range(experts):
        tensor = entry.get(expert)
        if tensor is None:
            raise _wrong(checkpoint, first, f"{module}: expert {expert} has no {name}")
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise _wrong(
                checkpoint, tensor, f"differs from the other experts of {module}",
                expected=f"{first.dtype} {list(first.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )  # fmt: skip
    if name.endswith(".weight") and len(first.shape) != 2:
        raise _wrong(
            checkpoint, first, "an expert's weight has two dimensions", found=list(first.shape)
        )
    _check_dtype(checkpoint, name, first)
    return Piece(name, first.dtype, first.shape, first.nbytes)


def _check_config(checkpoint: Checkpoint, module: str, experts: int, tensor: Tensor) -> None:
    told = {
        value
        for config in configs(checkpoint.config)
        for key in _COUNT_KEYS
        if type(value := config.get(key)) is int and value > 0
    }
    if told and experts not in told:
        raise _wrong(
            checkpoint, tensor, f"the number of experts of {module} is not the config's",
            expected=" or ".join(map(str, sorted(told))), found=experts,
        )  # fmt: skip


def _is_extra(name: str, last: int | None) -> bool:
    """Whether ``name`` belongs to an extra prediction head, which mlx-lm drops."""
    match = _LAYER.search(name)
    late = match is not None and last is not None and int(match[1]) >= last
    return late or any(part == "mtp" or part.startswith("mtp_") for part in name.split("."))


def _computed(checkpoint: Checkpoint, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "experts in a layout whose bytes mlx-lm computes at load, so they cannot be read as they "
        "lie",
        path=checkpoint.shards[tensor.shard].path, tensor=tensor.name, found=tensor.dtype,
        hint="convert the model with mlx_lm.convert first",
    )  # fmt: skip


def _no_experts(checkpoint: Checkpoint) -> UnsupportedError:
    return UnsupportedError(
        "no experts found: the model is dense, or its experts are in a layout that is not "
        "recognised",
        path=checkpoint.path, found=f"model_type {checkpoint.config.get('model_type')}",
    )  # fmt: skip


def configs(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """``config`` and the parts of it that may hold the language model's numbers."""
    yield config
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), dict):
            yield config[key]


def _first_int(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for inner in configs(config):
        for key in keys:
            if type(inner.get(key)) is int and inner[key] > 0:
                return inner[key]
    return None


def _any(entry: Any) -> Tensor:
    return entry if isinstance(entry, Tensor) else next(iter(entry.values()))


def _wrong(checkpoint: Checkpoint, tensor: Tensor, message: str, **more: Any) -> CheckpointError:
    return CheckpointError(
        message,
        path=checkpoint.shards[tensor.shard].path,
        tensor=tensor.name,
        offset=tensor.offset,
        **more,
    )
