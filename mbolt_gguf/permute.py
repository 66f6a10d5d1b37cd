"""In which order the experts of a layer shall lie, and what moves with them.

An order lists original expert ids by position: ``order[p]`` is the id at position p. Original means
of the file that was first rewritten; ``mbolt.perm`` keeps it, so that a file can be rewritten again
and again from profiles that all name the same experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mbolt_gguf.experts import MoeLayer, Slices, permutable
from mbolt_gguf.model import Model
from mbolt_gguf.ranges import Rows, whole
from mbolt_mlx.core.errors import GgufError, UnsupportedError, UsageError
from mbolt_mlx.profile.perms import ORDERS, Perms

KEY_PERM, KEY_LAYERS = "mbolt.perm", "mbolt.layers"
DEFAULT_LAYOUT = "chain+pipeline"
_IDENTITY, _INTERLEAVE, _PIPELINE = "identity", "interleave", "pipeline"
LAYOUT_HELP = (
    "heat, clique or chain, each with +pipeline or without; interleave, alone or with one of them "
    "(interleave+chain); identity"
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A layout: ``order`` is a profile's order or None to leave the experts where they are."""

    order: str | None
    pipeline: bool
    interleave: bool
    identity: bool

    def name(self, order: str | None) -> str:
        """What the file says of itself, where ``order`` is the order that its experts have."""
        if self.interleave:
            return "+".join(filter(None, [_INTERLEAVE, order]))
        return (order or _IDENTITY) + ("+pipeline" if self.pipeline else "")


def parse_layout(text: str) -> Wish:
    """The layout that ``text`` names: words in any order, joined by "+".

    Raises:
        UsageError: for an unknown word or words that exclude each other.
    """
    words = text.lower().split("+")
    orders = [word for word in words if word in ORDERS]
    known = {*ORDERS, _IDENTITY, _INTERLEAVE, _PIPELINE}
    interleave, identity = _INTERLEAVE in words, _IDENTITY in words
    if (
        not set(words) <= known
        or len(set(words)) < len(words)
        or len(orders) + identity > 1
        or not (orders or interleave or identity)
    ):
        raise UsageError(f"unknown layout {text!r}", expected=LAYOUT_HELP)
    return Wish(
        order=orders[0] if orders else None,
        pipeline=_PIPELINE in words or interleave,
        interleave=interleave,
        identity=identity and not interleave,
    )


def parse_order(layout: object) -> str | None:
    """The order in the layout's name that a file carries; None without one that we know."""
    words = layout.split("+") if isinstance(layout, str) else ()
    return next((word for word in words if word in ORDERS), None)


def stored_orders(model: Model, layers: Sequence[MoeLayer]) -> dict[int, np.ndarray]:
    """Layer → the order that the experts of ``model`` have: that of an earlier rewrite, or of ids.

    Raises:
        GgufError: when the metadata's permutation does not fit the experts.
    """
    flat = model.get(KEY_PERM)
    if flat is None:
        return {y.layer: np.arange(y.experts) for y in layers}

    def wrong(what: str, expected: object, found: object) -> GgufError:
        return GgufError(
            f"{KEY_PERM} {what}, so the experts' original order is lost",
            path=model.path, expected=expected, found=found,
            hint="rewrite the model's original file",
        )  # fmt: skip

    named = model.get(KEY_LAYERS, [y.layer for y in layers])
    if named != [y.layer for y in layers]:
        raise wrong("is for other layers", [y.layer for y in layers], named)
    total = sum(y.experts for y in layers)
    if not isinstance(flat, list) or len(flat) != total:
        raise wrong("has another length", total, len(flat) if isinstance(flat, list) else flat)
    out, at = {}, 0
    for y in layers:
        order = np.array(flat[at : at + y.experts])
        at += y.experts
        if not is_order(order, y.experts):
            raise wrong(f"does not name each expert of layer {y.layer} once", y.experts, "others")
        if crosses_groups(order, y.group_size):
            raise wrong(f"moves experts of layer {y.layer} to other groups", y.group_size, "others")
        out[y.layer] = order
    return out


def is_order(order: np.ndarray, experts: int) -> bool:
    """Whether ``order`` names each of ``experts`` experts once."""
    return order.dtype.kind in "iu" and np.array_equal(np.sort(order), np.arange(experts))


def crosses_groups(order: np.ndarray, group_size: int | None) -> bool:
    """Whether an expert is at a position of another group than its own."""
    if group_size is None:
        return False
    return bool((order // group_size != np.arange(len(order)) // group_size).any())


def wanted_orders(
    layers: Sequence[MoeLayer],
    stored: Mapping[int, np.ndarray],
    perms: Perms | None,
    wish: Wish,
) -> tuple[dict[int, np.ndarray], list[str]]:
    """Layer → the order that its experts shall have, and remarks for the user.

    Routing in groups takes each group as a range of expert ids, so there experts move inside their
    group only: the profile's order is kept within each. Layers that the profile does not have (as
    the extra layers that predict further tokens, which only some programs run) stay as they are.

    Raises:
        UsageError: when there is no profile for the order, or it is of another model.
        UnsupportedError: naming a tensor of which it is not known how it depends on the experts.
    """
    if perms is not None:
        check_profile(layers, perms)
    if wish.order is None:
        return dict(stored), []
    if perms is None:
        raise UsageError(
            f"the layout {wish.name(wish.order)} needs a profile",
            hint="give the perms.json that `mbolt-sim cluster` made",
        )
    given = perms.order(wish.order)
    orders, notes = {}, []
    for y in layers:
        if y.layer not in given:
            orders[y.layer] = stored[y.layer]
            notes.append(f"layer {y.layer} is not in the profile and stays as it is")
            continue
        order = np.array(given[y.layer])
        if y.group_size is not None:
            order = order[np.argsort(order // y.group_size, kind="stable")]
        if not np.array_equal(order, stored[y.layer]):
            permutable(y)
        orders[y.layer] = order
    if any(y.group_size is not None for y in layers):
        notes.append("the model routes by groups of experts: they move inside their groups only")
    return orders, notes


def check_profile(layers: Sequence[MoeLayer], perms: Perms) -> None:
    """Refuse a profile that names layers or experts that the model does not have.

    Raises:
        UsageError: naming the layer.
    """
    known = {y.layer: y.experts for y in layers}
    for layer, experts in perms.experts.items():
        if known.get(layer) != experts:
            raise UsageError(
                f"the profile is of another model: layer {layer} has other experts",
                path=layers[0].path, expected=known.get(layer, "no experts"), found=experts,
            )  # fmt: skip


class Source:
    """A model whose experts are taken in new orders: what each tensor of the result is made of.

    Args:
        model, layers: what is read.
        stored, wanted: layer → the order of its experts there, and in the result.

    Raises:
        UnsupportedError: when an expert would move and a tensor is in the way of that.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[MoeLayer],
        stored: Mapping[int, np.ndarray],
        wanted: Mapping[int, np.ndarray],
    ) -> None:
        self.model = model
        self.layers = {y.layer: y for y in layers}
        self.take: dict[int, np.ndarray] = {}
        self._slices: dict[str, tuple[int, Slices]] = {}
        for y in layers:
            take = rows_to_take(stored[y.layer], wanted[y.layer])
            if not np.array_equal(take, np.arange(y.experts)):
                permutable(y)
                if crosses_groups(wanted[y.layer], y.group_size):
                    raise UnsupportedError(
                        f"experts of layer {y.layer} would leave their routing groups",
                        path=model.path,
                    )
            self.take[y.layer] = take
            for slices in (*y.pieces, *y.small, *y.router):
                self._slices[slices.name] = (y.layer, slices)

    def rows(self, name: str) -> tuple[Rows, ...]:
        """What the tensor ``name`` of the result is made of, where it is not interleaved."""
        if name not in self._slices:
            tensor = self.model.tensors[name]
            return (whole(tensor.file, tensor.offset, tensor.nbytes),)
        layer, slices = self._slices[name]
        return (self.piece_rows(layer, slices, 0, slices.nbytes),)

    def piece_rows(self, layer: int, slices: Slices, start: int, stride: int) -> Rows:
        """The rows of one piece of each expert, ``stride`` apart, the first at ``start``."""
        take = self.take[layer]
        unmoved = np.array_equal(take, np.arange(len(take)))
        if unmoved and not start and slices.stride == slices.nbytes == stride:
            return whole(slices.tensor.file, slices.offset(0), slices.nbytes * len(take))
        return Rows(
            start, stride, slices.nbytes, slices.tensor.file, slices.offset(0), slices.stride, take
        )


def rows_to_take(stored: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Position in the result → position in the source, of the expert that ``wanted`` names."""
    where = np.empty(len(stored), np.int64)
    where[stored] = np.arange(len(stored))
    return where[wanted]
