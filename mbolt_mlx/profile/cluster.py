"""Which experts fire together: the co-activation graph, its communities, and orders on disk.

Everything here works on one layer's symmetric matrix of weights, with zeros on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SWEEPS_MAX = 50


def coactivation(rows: np.ndarray, experts: int) -> np.ndarray:
    """How many tokens chose both of two experts.

    Args:
        rows: expert ids ``[tokens, top_k]``.
        experts: of the layer.

    Returns:
        ``[experts, experts]`` counts, zero on the diagonal.
    """
    counts = np.zeros((experts, experts))
    for start in range(0, len(rows), 4096):
        part = rows[start : start + 4096].astype(np.intp)
        chosen = np.zeros((len(part), experts), np.float32)
        np.put_along_axis(chosen, part, 1.0, axis=1)
        counts += chosen.T @ chosen
    np.fill_diagonal(counts, 0.0)
    return counts


def heat_of(rows: np.ndarray, experts: int) -> np.ndarray:
    """How many tokens chose each expert."""
    return np.bincount(rows.reshape(-1), minlength=experts)


def lift(pairs: np.ndarray, heat: np.ndarray, tokens: int) -> np.ndarray:
    """P(both) ÷ (P(one) · P(other)) of each pair; 0 where one of them never fires."""
    expected = np.outer(heat, heat) / max(1, tokens)
    return np.divide(pairs, expected, out=np.zeros_like(pairs, dtype=float), where=expected > 0)


def modularity(weights: np.ndarray, communities: Sequence[Sequence[int]]) -> float:
    """Newman's modularity Q of a partition into ``communities``; 0 for a graph without edges."""
    total = weights.sum()
    if total <= 0:
        return 0.0
    degree = weights.sum(axis=1)
    inside = sum(weights[np.ix_(c, c)].sum() for c in communities)
    expected = sum(degree[list(c)].sum() ** 2 for c in communities)
    return float(inside / total - expected / total**2)


def communities(weights: np.ndarray) -> list[list[int]]:
    """A partition of high modularity; experts without edges are communities of their own.

    The greedy merging of Clauset, Newman and Moore on a dense matrix, and the local moving of
    Louvain, each refined until no single move helps; the better of the two. So the result is at
    least as good as the greedy one.

    Returns:
        Lists of experts, the largest first.
    """
    found = [_refine(weights, label) for label in (_greedy(weights), _louvain(weights))]
    best = max(found, key=lambda label: _quality(weights, label))
    return _lists(best)


def _lists(label: np.ndarray) -> list[list[int]]:
    groups = [np.flatnonzero(label == value).tolist() for value in np.unique(label)]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def _quality(weights: np.ndarray, label: np.ndarray) -> float:
    return modularity(weights, _lists(label))


def _greedy(weights: np.ndarray) -> np.ndarray:
    """Merge the two communities that gain most, until none gains (Clauset, Newman, Moore 2004)."""
    count, total = len(weights), weights.sum()
    label = np.arange(count)
    if total <= 0:
        return label
    share = weights.sum(axis=1) / total
    # gain[i, j] = 2 (e_ij − a_i a_j), −inf where i = j or one of them is gone.
    gain = 2.0 * (weights / total - np.outer(share, share))
    np.fill_diagonal(gain, -np.inf)
    best_of = gain.argmax(axis=1)
    best = gain[np.arange(count), best_of]
    for _ in range(count - 1):
        i = int(best.argmax())
        if best[i] <= 0:
            break
        j = int(best_of[i])
        row = gain[i] + gain[j]
        row[[i, j]] = -np.inf
        gain[i], gain[:, i] = row, row
        gain[j], gain[:, j] = -np.inf, -np.inf
        label[label == j] = i
        # Rows whose best was one of the two look again; the others may only prefer the new one.
        stale = np.flatnonzero(((best_of == i) | (best_of == j)) & (best > -np.inf))
        best_of[stale] = gain[stale].argmax(axis=1)
        best[stale] = gain[stale, best_of[stale]]
        better = row > best
        best_of[better], best[better] = i, row[better]
        best_of[i] = int(row.argmax())
        best[i] = row[best_of[i]]
        best[j] = -np.inf
    return label


def _louvain(weights: np.ndarray) -> np.ndarray:
    """Move experts, then communities as if they were experts, while that gains."""
    label = np.arange(len(weights))
    graph = weights
    while True:
        part = _refine(graph, np.arange(len(graph)))
        values, part = np.unique(part, return_inverse=True)
        if len(values) == len(graph):
            return label
        label = part[label]
        member = np.zeros((len(graph), len(values)))
        member[np.arange(len(graph)), part] = 1.0
        graph = member.T @ graph @ member


def _refine(weights: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Move single nodes to the community that gains most until no move gains."""
    total = weights.sum()
    if total <= 0:
        return label
    _, label = np.unique(label, return_inverse=True)
    count = len(weights)
    degree = weights.sum(axis=1)
    member = np.zeros((count, count))
    member[np.arange(count), label] = 1.0
    to = weights @ member  # weight of node → community, the node's own loop included
    mass = degree @ member
    for _ in range(_SWEEPS_MAX):
        moved = 0
        for node in np.flatnonzero(degree > 0).tolist():
            own = int(label[node])
            loop = weights[node, node]
            gain = to[node] - degree[node] * mass / total
            gain[own] = to[node, own] - loop - degree[node] * (mass[own] - degree[node]) / total
            best = int(gain.argmax())
            if gain[best] > gain[own] + 1e-12 * total:
                to[:, own] -= weights[:, node]
                to[:, best] += weights[:, node]
                mass[own] -= degree[node]
                mass[best] += degree[node]
                label[node] = best
                moved += 1
        if not moved:
            break
    return label


def heat_order(heat: np.ndarray) -> list[int]:
    """Experts from the hottest to the coldest; equal ones by their number."""
    return np.argsort(-np.asarray(heat), kind="stable").tolist()


def clique_order(groups: Sequence[Sequence[int]], heat: np.ndarray) -> list[int]:
    """Community after community, the one with the hottest members first, hot members first."""
    heat = np.asarray(heat, dtype=float)
    ordered = sorted(groups, key=lambda group: (-heat[list(group)].mean(), min(group)))
    return [e for group in ordered for e in sorted(group, key=lambda e: (-heat[e], e))]


def chain_order(
    weights: np.ndarray, groups: Sequence[Sequence[int]], heat: np.ndarray
) -> list[int]:
    """Communities as `clique_order`, and within each a path along the heaviest edges.

    A path begins at the hottest expert and goes on to whichever is chosen most often together with
    the last one.
    """
    heat = np.asarray(heat, dtype=float)
    out: list[int] = []
    for group in sorted(groups, key=lambda group: (-heat[list(group)].mean(), min(group))):
        left = sorted(group, key=lambda e: (-heat[e], e))
        here = left.pop(0)
        out.append(here)
        while left:
            pull = weights[here, left]
            here = left.pop(int(pull.argmax()))
            out.append(here)
    return out
