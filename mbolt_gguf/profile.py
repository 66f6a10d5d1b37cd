"""The routing profile that a rewritten file carries: written into its metadata, and read back.

mbolt.heat (u32, how often each expert was chosen) and mbolt.tier_hint (u32: 0 hot, 1, 2 cold, by
heat whatever the layout) are by position, layers one after the other, as mbolt.perm.
mbolt.coactivation_top_cliques is JSON: for each layer a list of cliques, which are lists of
original expert ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mbolt_gguf import metadata
from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.permute import parse_order, stored_orders
from mbolt_mlx.core.errors import GgufError, TraceError
from mbolt_mlx.profile.perms import Perms, in_file_order, tier_hints

KEY_LAYOUT, KEY_HEAT, KEY_TIERS = "mbolt.layout", "mbolt.heat", "mbolt.tier_hint"
KEY_CLIQUES, KEY_SHA = "mbolt.coactivation_top_cliques", "mbolt.profile.sha256"
_U32_MAX = (1 << 32) - 1
_SCALED_MAX = 1_000_000


@dataclass(frozen=True)
class Carried:
    """What is known of the experts' use: layer → heat by original id, layer → cliques of original
    ids, and the SHA-256 of the perms.json that they came from."""

    heat: Mapping[int, Sequence[float]]
    cliques: Mapping[int, Sequence[Sequence[int]]]
    sha256: str | None


def from_perms(perms: Perms) -> Carried:
    """What ``perms`` knows; cliques that are no lists of ids are left out."""
    cliques: dict[int, list[list[int]]] = {}
    for y in perms.document["layers"]:
        found = y.get("top_cliques")
        if isinstance(found, list):
            cliques[y["layer"]] = [c for c in found if _is_clique(c, len(y["heat"]))]
    return Carried(perms.heat, cliques, perms.sha256)


def carried_by(model: Model, layers: Sequence[MoeLayer]) -> Carried | None:
    """What ``model`` carries; None when it carries no heat.

    Raises:
        GgufError: when what it carries does not fit its experts.
    """
    flat = model.get(KEY_HEAT)
    if flat is None:
        return None
    total = sum(y.experts for y in layers)
    if not isinstance(flat, list) or len(flat) != total:
        found = len(flat) if isinstance(flat, list) else flat
        raise GgufError(
            f"{KEY_HEAT} has another length", path=model.path, expected=total, found=found
        )
    if not all(type(n) is int and 0 <= n <= _U32_MAX for n in flat):
        raise GgufError(f"{KEY_HEAT} holds what is no count", path=model.path)
    sha = model.get(KEY_SHA)
    orders, heat, at = stored_orders(model, layers), {}, 0
    for y in layers:
        by_id = np.empty(y.experts, np.int64)
        by_id[orders[y.layer]] = flat[at : at + y.experts]
        heat[y.layer] = by_id.tolist()
        at += y.experts
    return Carried(heat, _cliques(model, layers), sha if isinstance(sha, str) else None)


def _cliques(model: Model, layers: Sequence[MoeLayer]) -> dict[int, list[list[int]]]:
    text = model.get(KEY_CLIQUES)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        fits = len(found) == len(layers) and all(
            _is_clique(clique, y.experts)
            for y, cliques in zip(layers, found, strict=True)
            for clique in cliques
        )
    except (ValueError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise GgufError(f"{KEY_CLIQUES} does not fit the experts", path=model.path)
    return {y.layer: cliques for y, cliques in zip(layers, found, strict=True) if cliques}


def _is_clique(item: object, experts: int) -> bool:
    return isinstance(item, list) and all(type(e) is int and 0 <= e < experts for e in item)


def encode_profile(
    carried: Carried, layers: Sequence[MoeLayer], orders: Mapping[int, np.ndarray]
) -> list[bytes]:
    """The encoded values of ``carried``, for experts that lie in ``orders``.

    Heat that is no whole number (a share) is scaled so that the largest becomes 1,000,000.
    """
    heat = {y.layer: np.array(carried.heat.get(y.layer, [0] * y.experts), float) for y in layers}
    most = max(float(h.max()) for h in heat.values())
    whole = all((h == np.floor(h)).all() for h in heat.values())
    scale = 1.0 if whole and most <= _U32_MAX else _SCALED_MAX / most
    counts, tiers = [], []
    for y in layers:
        order = orders[y.layer]
        counts += np.rint(heat[y.layer] * scale).astype(np.int64)[order].tolist()
        tiers += np.array(tier_hints(heat[y.layer].tolist()))[order].tolist()
    cliques = [[list(c) for c in carried.cliques.get(y.layer, ())] for y in layers]
    values = [
        metadata.numbers(KEY_HEAT, counts),
        metadata.numbers(KEY_TIERS, tiers),
        metadata.text(KEY_CLIQUES, json.dumps(cliques, separators=(",", ":"))),
    ]
    if carried.sha256:
        values.append(metadata.text(KEY_SHA, carried.sha256))
    return values


def read_profile(path: str | Path) -> Perms:
    """The profile of the rewritten file ``path``, as perms.json has it.

    Only the order that the file's experts have is known; the others follow from heat.

    Raises:
        GgufError: when the file is malformed, or what it carries does not fit its experts.
        TraceError: when it carries no order and no heat.
    """
    model = Model.open(path)
    layers = find_experts(model)
    if model.get("mbolt.perm") is None:
        raise TraceError(
            "it carries no profile: no rewrite has made it",
            path=path, hint="`mbolt-gguf rewrite` makes such files",
        )  # fmt: skip
    orders = stored_orders(model, layers)
    carried = carried_by(model, layers) or Carried({}, {}, None)
    return in_file_order(
        {layer: order.tolist() for layer, order in orders.items()},
        carried.heat,
        model=str(model.get("general.name", "")),
        kind=parse_order(model.get(KEY_LAYOUT)) or "ids",
        cliques=carried.cliques,
    )
