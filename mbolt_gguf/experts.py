"""Which tensors of a model belong to its experts, and where each expert's bytes lie, by layer.

The names are those of llama.cpp's llama-arch.cpp; their use is in its models/*.cpp and in
build_moe_ffn of llama-graph.cpp. An expert's weights are ``ffn_{up,gate,down}_exps`` or
``ffn_{gate_up,down}_exps`` (a model without gates has no gate), stacked with the expert as the
slowest dimension. Whatever else has one entry an expert moves with them: biases, scales, the
router's rows (``ffn_gate_inp``) and the biases of the choice (``exp_probs_b``). Anything that we
do not know and that may be indexed by expert is kept as an obstacle, which ``permutable`` raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_gguf import tensor_names
from mbolt_gguf.header import Tensor
from mbolt_gguf.interleaved import BLOB_STEM, PIECE_ROLES, PieceTable
from mbolt_gguf.model import Model
from mbolt_mlx.core.errors import GgufError, UnsupportedError

ROLES = {"ffn_up_exps": "up", "ffn_gate_exps": "gate", "ffn_gate_up_exps": "gate_up",
         "ffn_down_exps": "down"}  # fmt: skip
_COMPLETE = ({"up", "down"}, {"up", "gate", "down"}, {"gate_up", "down"})
_ROUTER = {
    ("ffn_gate_inp", "weight"): "router.weight",
    ("ffn_gate_inp", "bias"): "router.bias",
    ("exp_probs_b", ""): "probs.bias",
    ("exp_probs_b", "weight"): "probs.bias",
    ("exp_probs_b", "bias"): "probs.bias",
    ("exp_probs_b_vl", ""): "probs_vl.bias",
    ("exp_probs_b_vl", "weight"): "probs_vl.bias",
    ("exp_probs_b_vl", "bias"): "probs_vl.bias",
}
# Gemma 4 scales the router's input: as long as a row, not as the experts are many.
_NOT_BY_EXPERT = {("ffn_gate_inp", "scale"), ("ffn_gate_inp", "input_scale")}
_TABLE = "ffn_gate_tid2eid"
_ADJUGATE = ("ffn_gate_chexps", "ffn_up_chexps", "ffn_down_chexps")
_OBSTACLES = {_TABLE: "a table that names experts by their ids"} | dict.fromkeys(
    _ADJUGATE, "adjugate experts, which belong to ranges of expert ids"
)
_LEGACY = ("ffn_gate.", "ffn_up.", "ffn_down.")


@dataclass(frozen=True, slots=True)
class Slices:
    """One expert-indexed tensor, or one piece of the blocks of an interleaved one.

    Expert e's ``nbytes`` bytes begin at byte ``offset(e)`` of the file ``tensor.file``, which is
    ``tensor.offset + start + e * stride``. ``type`` and ``shape`` (row first) are one expert's; a
    whole block of an interleaved tensor (role "ilv") is bytes: type I8, shape (nbytes,).
    """

    name: str
    role: str
    tensor: Tensor
    nbytes: int
    stride: int
    type: int
    shape: tuple[int, ...]
    start: int = 0

    def offset(self, expert: int) -> int:
        """The byte of its file where the slice of ``expert`` (its place in the file) begins."""
        return self.tensor.offset + self.start + expert * self.stride


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One layer's experts.

    ``weights`` is what a token reads from the drive for each expert, in the order up, gate, down
    (or gate_up, down; a single "ilv" when interleaved). ``pieces`` are the same tensors one by one:
    equal to ``weights``, or the parts of the interleaved blocks in the order of their bytes.
    ``small`` are biases and scales by expert, ``router`` all that chooses experts and is indexed by
    them. ``group_size`` is how many experts a routing group has, None without groups.
    ``obstacles`` are (tensor, why) for what forbids another order of experts.
    """

    layer: int
    experts: int
    top_k: int
    weights: tuple[Slices, ...]
    small: tuple[Slices, ...]
    router: tuple[Slices, ...]
    group_size: int | None
    interleaved: bool
    pieces: tuple[Slices, ...]
    obstacles: tuple[tuple[str, str], ...]
    path: Path

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, padding apart."""
        return sum(piece.nbytes for piece in self.pieces)


def find_experts(model: Model) -> tuple[MoeLayer, ...]:
    """The layers of ``model`` that have experts, in the order of their numbers.

    Raises:
        GgufError: when tensors contradict one another or the metadata.
        UnsupportedError: when the model has no experts that can be told apart.
    """
    blocks: dict[int, dict[tuple[str, str], Tensor]] = {}
    for name, tensor in model.tensors.items():
        found = tensor_names.parse(name)
        if found is not None:
            blocks.setdefault(found[0], {})[found[1:]] = tensor
    moe = {
        layer: block
        for layer, block in sorted(blocks.items())
        if any(stem in ROLES or stem == BLOB_STEM for stem, _ in block)
    }
    if not moe:
        raise _without_experts(model, blocks)
    experts, groups = _expert_count(model), _group_count(model)
    table = PieceTable.read(model, [n for n in moe if (BLOB_STEM, "weight") in moe[n]])
    return tuple(
        _Block(model, layer, block, experts).layer_of(table, groups) for layer, block in moe.items()
    )


def permutable(layer: MoeLayer) -> None:
    """Raise unless the experts of ``layer`` may change places.

    Groups do not forbid it: with ``layer.group_size``, experts may move inside their group only.

    Raises:
        UnsupportedError: naming the tensor that is in the way.
    """
    for tensor, why in layer.obstacles:
        raise UnsupportedError(
            f"its experts cannot be reordered: {why}", path=layer.path, tensor=tensor
        )


class _Block:
    """The tensors of one block, by stem and suffix."""

    def __init__(
        self, model: Model, layer: int, block: dict[tuple[str, str], Tensor], experts: int
    ) -> None:
        self.model, self.layer, self.block, self.experts = model, layer, block, experts

    def layer_of(self, table: PieceTable | None, groups: int) -> MoeLayer:
        interleaved = (BLOB_STEM, "weight") in self.block
        if interleaved:
            weights, pieces = self._interleaved(table)
        else:
            weights = pieces = self._weights()
        small, router, obstacles = [], [], []
        for (stem, suffix), tensor in self.block.items():
            if (stem, suffix) in _ROUTER:
                self._take(tensor, _ROUTER[stem, suffix], router, obstacles)
            elif stem in ROLES and suffix in ("bias", "scale", "input_scale"):
                small.append(self._slices(tensor, f"{ROLES[stem]}.{suffix}"))
            elif not self._is_known(stem, suffix):
                obstacle = self._obstacle(tensor, stem)
                obstacles += [obstacle] if obstacle else []
        if not any(s.role == "router.weight" for s in router) and not obstacles:
            name = f"blk.{self.layer}.ffn_gate_inp.weight"
            obstacles.append((name, "it has no router whose rows could move with them"))
        return MoeLayer(
            layer=self.layer,
            experts=self.experts,
            top_k=_top_k(self.model, self.layer, self.experts),
            weights=weights,
            small=tuple(small),
            router=tuple(router),
            group_size=self.experts // groups if groups > 1 else None,
            interleaved=interleaved,
            pieces=pieces,
            obstacles=tuple(obstacles),
            path=self.model.path,
        )

    def _weights(self) -> tuple[Slices, ...]:
        found = {
            ROLES[stem]: self._slices(tensor, ROLES[stem], rank=3)
            for (stem, suffix), tensor in self.block.items()
            if stem in ROLES and suffix == "weight"
        }
        if set(found) not in _COMPLETE:
            raise GgufError(
                f"layer {self.layer} does not have what an expert consists of",
                path=self.model.path, expected="up, gate and down, or gate_up and down",
                found=", ".join(sorted(found)) or "no weight",
            )  # fmt: skip
        return tuple(found[role] for role in PIECE_ROLES if role in found)

    def _interleaved(
        self, table: PieceTable | None
    ) -> tuple[tuple[Slices, ...], tuple[Slices, ...]]:
        blob = self.block[BLOB_STEM, "weight"]
        for (stem, suffix), tensor in self.block.items():
            if stem in ROLES and suffix == "weight":
                raise self._wrong(tensor, "there beside the interleaved experts of its layer")
        whole = self._slices(blob, "ilv", rank=2)
        parts = []
        for piece in table.pieces(self.layer, blob) if table else ():
            stem = next(stem for stem, role in ROLES.items() if role == piece.role)
            parts.append(
                Slices(
                    f"blk.{self.layer}.{stem}.weight", piece.role, blob, piece.nbytes,
                    whole.stride, piece.type, piece.shape, piece.start,
                )
            )  # fmt: skip
        if {part.role for part in parts} not in _COMPLETE:
            raise self._wrong(blob, "its blocks do not hold what an expert consists of")
        used = max(part.start + part.nbytes for part in parts)
        whole = Slices(blob.name, "ilv", blob, used, whole.stride, blob.type, (used,))
        return (whole,), tuple(parts)

    def _take(
        self, tensor: Tensor, role: str, router: list[Slices], obstacles: list[tuple[str, str]]
    ) -> None:
        """A part of the router; one that is not as long as the experts are many is an obstacle."""
        if not tensor.shape or tensor.shape[-1] != self.experts:
            why = f"the router chooses among {tensor.shape[-1:] or [1]} and not {self.experts}"
            obstacles.append((tensor.name, why.replace("(", "").replace(",)", "")))
        else:
            router.append(self._slices(tensor, role))

    def _slices(self, tensor: Tensor, role: str, *, rank: int | None = None) -> Slices:
        shape = tensor.shape
        if rank is not None and len(shape) != rank:
            raise self._wrong(tensor, f"not of {rank} dimensions", found=list(shape))
        if not shape or shape[-1] != self.experts:
            raise self._wrong(
                tensor, "its last dimension is not the number of experts in the metadata",
                expected=self.experts, found=shape[-1] if shape else "a single number",
            )  # fmt: skip
        if tensor.nbytes % self.experts:
            raise self._wrong(tensor, "an expert is not a whole number of its bytes")
        each = tensor.nbytes // self.experts
        return Slices(tensor.name, role, tensor, each, each, tensor.type, shape[:-1])

    def _is_known(self, stem: str, suffix: str) -> bool:
        return (
            (stem in ROLES and suffix == "weight")
            or (stem, suffix) == (BLOB_STEM, "weight")
            or stem in tensor_names.PLAIN_STEMS
            or (stem, suffix) in _NOT_BY_EXPERT
        )

    def _obstacle(self, tensor: Tensor, stem: str) -> tuple[str, str] | None:
        if stem in _OBSTACLES:
            return tensor.name, _OBSTACLES[stem]
        by_length = bool(tensor.shape) and tensor.shape[-1] == self.experts
        if by_length or "exp" in stem or stem.startswith(("ffn_gate_inp", *_LEGACY)):
            return tensor.name, "it may be indexed by expert and its meaning is not known"
        return None

    def _wrong(self, tensor: Tensor, message: str, **more: Any) -> GgufError:
        return GgufError(message, path=self.model.file_of(tensor), tensor=tensor.name, **more)


def _expert_count(model: Model) -> int:
    found = model.get("expert_count")
    if type(found) is not int or found < 1:
        raise GgufError(
            f"it has tensors of experts and no usable {model.arch}.expert_count",
            path=model.path, found=found,
        )  # fmt: skip
    return found


def _group_count(model: Model) -> int:
    """Routing groups; 1 where there are none."""
    experts, groups = _expert_count(model), model.get("expert_group_count", 0)
    if type(groups) is not int or groups < 0 or (groups and experts % groups):
        raise GgufError(
            "the number of routing groups does not divide that of experts",
            path=model.path, expected=f"a divisor of {experts}", found=groups,
        )  # fmt: skip
    return max(1, groups)


def _top_k(model: Model, layer: int, experts: int) -> int:
    found = model.get("expert_used_count")
    if isinstance(found, list):
        found = found[layer] if layer < len(found) else None
    if type(found) is not int or not 0 < found <= experts:
        raise GgufError(
            f"no usable {model.arch}.expert_used_count for layer {layer}",
            path=model.path, expected=f"1 to {experts}", found=found,
        )  # fmt: skip
    return found


def _without_experts(
    model: Model, blocks: dict[int, dict[tuple[str, str], Tensor]]
) -> UnsupportedError:
    for block in blocks.values():
        for (stem, _), tensor in block.items():
            if stem.startswith(_LEGACY):
                return UnsupportedError(
                    "its experts are separate tensors, which llama.cpp no longer reads",
                    path=model.file_of(tensor), tensor=tensor.name,
                    hint="convert the model again",
                )  # fmt: skip
    for name, tensor in model.tensors.items():
        if "_exps." in name:
            return UnsupportedError(
                "experts outside the blocks of a language model (a vision encoder's) are not read "
                "by token",
                path=model.file_of(tensor), tensor=name,
            )  # fmt: skip
    if model.get("expert_count"):
        return UnsupportedError(
            f"its metadata names experts ({model.get('expert_count')}) but no tensor holds them",
            path=model.path,
        )  # fmt: skip
    return UnsupportedError(f"a dense model ({model.arch}): it has no experts", path=model.path)
