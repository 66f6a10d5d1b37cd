"""perms.json: the profile of a model's routing, and the orders that it suggests.

Keys of the first implementation, which is read and written alike: n_layers, n_expert, n_tokens,
train_frac, train_tokens, layers: [{layer, clique_perm, chain_perm, heat_perm (perm[p] = original
id at position p), heat (by original id), heat_entropy_bits, max_entropy_bits, n_clusters,
cluster_sizes, top_cliques, lift}]. We add format, version and model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import MboltError, TraceError
from mbolt_mlx.core.report import write_report
from mbolt_mlx.profile import cluster
from mbolt_mlx.profile.traces import LayerInfo, Trace, read_trace

FORMAT, VERSION = "mbolt-perms", 1
ORDERS = ("clique", "chain", "heat")
_SIZE_MAX = 1 << 30
_TOP_CLIQUES, _CLIQUE_MIN_LIFT = 8, 1.5


@dataclass(frozen=True, eq=False)
class Perms:
    """A profile: ``document`` is the JSON, ``sha256`` of the file that it came from or goes to."""

    document: dict[str, Any]
    sha256: str

    @property
    def experts(self) -> dict[int, int]:
        """Layer → experts."""
        return {y["layer"]: len(y["heat"]) for y in self.document["layers"]}

    def order(self, kind: str) -> dict[int, list[int]]:
        """Layer → expert ids in the order of their place, for ``kind`` of `ORDERS`."""
        return {y["layer"]: list(y[f"{kind}_perm"]) for y in self.document["layers"]}

    @property
    def orders(self) -> dict[str, dict[int, list[int]]]:
        """All orders by their kind."""
        return {kind: self.order(kind) for kind in ORDERS}

    @property
    def heat(self) -> dict[int, list[float]]:
        """Layer → heat by original expert id."""
        return {y["layer"]: list(y["heat"]) for y in self.document["layers"]}


def make_perms(trace: Trace, *, train: float = 1.0, phase: str | None = "decode") -> Perms:
    """Profile the first ``train`` of ``trace``'s tokens of ``phase`` (None: of both phases).

    Raises:
        TraceError: when the trace has no such token.
    """
    layers, used = [], 0
    for layer, info in trace.layers.items():
        rows = trace.rows(layer, phase)
        rows = rows[: math.ceil(train * len(rows))]
        if not len(rows):
            raise TraceError(f"layer {layer} has no token of this phase to profile", found=phase)
        used = max(used, len(rows))
        layers.append(_layer(layer, info, rows))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": trace.model,
        "n_layers": len(layers),
        "n_expert": max(info.experts for info in trace.layers.values()),
        "n_tokens": trace.tokens(phase),
        "train_frac": train,
        "train_tokens": used,
        "layers": layers,
    }
    return Perms(document, hashlib.sha256(_encode(document)).hexdigest())


def _layer(layer: int, info: LayerInfo, rows: np.ndarray) -> dict[str, Any]:
    heat = cluster.heat_of(rows, info.experts)
    pairs = cluster.coactivation(rows, info.experts)
    groups = cluster.communities(pairs)
    lifts = cluster.lift(pairs, heat, len(rows))
    together = [g for g in groups if len(g) > 1]
    by_heat = sorted(together, key=lambda g: -float(heat[g].mean()))
    seen = lifts[np.triu(pairs > 0, 1)]
    return {
        "layer": layer,
        "clique_perm": cluster.clique_order(groups, heat),
        "chain_perm": cluster.chain_order(pairs, groups, heat),
        "heat_perm": cluster.heat_order(heat),
        "heat": heat.tolist(),
        "heat_entropy_bits": entropy_bits(heat),
        "max_entropy_bits": math.log2(info.experts),
        "n_clusters": len(groups),
        "cluster_sizes": [len(g) for g in groups],
        "modularity": round(cluster.modularity(pairs, groups), 6),
        "top_cliques": [[int(e) for e in g] for g in by_heat[:_TOP_CLIQUES]],
        "lift": {
            "mean": round(float(seen.mean()), 6) if len(seen) else 0.0,
            "max": round(float(seen.max()), 6) if len(seen) else 0.0,
            "pairs": int(len(seen)),
            "pairs_over_1_5": int((seen >= _CLIQUE_MIN_LIFT).sum()),
        },
    }


def tier_hints(heat: Sequence[float]) -> list[int]:
    """0, 1 or 2 for each expert, by heat: the fewest that make half of the uses are 0 (hot), those
    up to nine tenths 1, the rest 2 (cold). Without any use, all are 2."""
    total, so_far = sum(heat), 0.0
    tiers = [2] * len(heat)
    for expert in cluster.heat_order(np.asarray(heat)):
        if not heat[expert]:
            break
        tiers[expert] = 0 if so_far < 0.5 * total else 1 if so_far < 0.9 * total else 2
        so_far += heat[expert]
    return tiers


def in_file_order(
    order: Mapping[int, Sequence[int]],
    heat: Mapping[int, Sequence[float]],
    *,
    model: str = "",
    kind: str = "chain",
    cliques: Mapping[int, Sequence[Sequence[int]]] | None = None,
) -> Perms:
    """The profile that a rewritten file carries: the order of its experts, and their heat and
    cliques if known.

    Every order that the file does not have is left to heat, and to the order of ids without it.
    """
    layers = []
    for layer, blocks in order.items():
        known = list(heat.get(layer, [0.0] * len(blocks)))
        entry = {f"{name}_perm": list(blocks) for name in ("clique", "chain")}
        entry["heat_perm"] = list(blocks) if kind == "heat" else cluster.heat_order(np.array(known))
        layers.append(
            {
                "layer": layer,
                **entry,
                "heat": known,
                "heat_entropy_bits": entropy_bits(np.array(known)),
                "max_entropy_bits": round(math.log2(len(blocks)), 6),
            }
        )
        if cliques is not None:
            layers[-1]["top_cliques"] = [list(c) for c in cliques.get(layer, ())]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "order": kind,
        "n_layers": len(layers),
        "n_expert": max(len(blocks) for blocks in order.values()),
        "n_tokens": 0,
        "train_frac": 1.0,
        "train_tokens": 0,
        "layers": layers,
    }
    return Perms(document, hashlib.sha256(_encode(document)).hexdigest())


def entropy_bits(heat: np.ndarray) -> float:
    """Entropy in bits of how often each expert is chosen; log2(experts) when all are alike."""
    share = np.asarray(heat, dtype=float)
    share = share[share > 0] / share.sum() if share.sum() else share[:0]
    return round(float(-(share * np.log2(share)).sum()), 6) + 0.0


def write_perms(path: str | Path, perms: Perms) -> None:
    """Write ``perms`` whole or not at all.

    Raises:
        OutputError: when it cannot be written, or another file is there already.
    """
    write_report(path, perms.document, indent=None)


def read_perms(path: str | Path) -> Perms:
    """Read a perms.json of ours or of the first implementation.

    Raises:
        TraceError: when it is malformed, or an order does not name each expert once.
        ReadError: when it cannot be read.
    """
    data = files.read_whole(path, limit=_SIZE_MAX)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        if _is_trace(path):
            raise TraceError(
                "a trace, not a profile",
                path=path,
                hint="`mbolt-mlx cluster TRACE -o perms.json` makes one of it",
            ) from error
        raise TraceError(f"not JSON: {error}", path=path) from error
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not layers:
        raise TraceError("not a profile: it has no layers", path=path)
    seen: set[int] = set()
    for number, layer in enumerate(layers):
        if not isinstance(layer, dict) or type(layer.get("layer", number)) is not int:
            raise TraceError(f"layer entry {number} has no meaning", path=path)
        layer.setdefault("layer", number)
        if layer["layer"] in seen:
            raise TraceError(f"layer {layer['layer']} is there twice", path=path)
        seen.add(layer["layer"])
        _check(layer, path)
    return Perms(document, hashlib.sha256(data).hexdigest())


def _is_trace(path: str | Path) -> bool:
    try:
        read_trace(path)
    except MboltError:
        return False
    return True


def _check(layer: dict[str, Any], path: str | Path) -> None:
    name, heat = layer["layer"], layer.get("heat")
    if not isinstance(heat, list) or not all(
        isinstance(h, int | float) and not isinstance(h, bool) and 0 <= h < 1e300 for h in heat
    ):
        raise TraceError(f"layer {name} has no heat by expert", path=path)
    for kind in ORDERS:
        order = layer.get(f"{kind}_perm")
        if order is None and kind == "heat":
            layer["heat_perm"] = cluster.heat_order(np.array(heat))
            continue
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(
            map(str, range(len(heat)))
        ):
            raise TraceError(
                f"the {kind}_perm of layer {name} does not name each of its {len(heat)} experts "
                "once",
                path=path,
            )
        layer[f"{kind}_perm"] = [int(e) for e in order]


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
