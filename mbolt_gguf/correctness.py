"""Four gates between a GGUF and a rewritten copy of it: nothing of the model has changed.

1. bytes: every byte of every tensor, through the permutation, and the metadata.
2. identity: a rewrite that moves nothing, and an interleave that moves nothing, both made of the
   original in a scratch folder, give the original's logits bit for bit.
3. routing: the same experts at equal inputs. The original is rewritten with one layer permuted at a
   time; the layers before it then compute the same bits, so that layer gets the same input and must
   choose the same set, or scores must tie to within rounding. Then the rewritten file itself: its
   first layer with experts must choose the same sets; further on, a set may differ where the
   router's gap is under a bound, or where such a change happened before it (in an earlier layer, at
   this token or an earlier one).
4. distribution: a real permutation changes the order of sums, so logits move in their last bits.
   Their mean KL divergence must lie within what the engine differs from itself between two legal
   ways of computing, which is measured on the original and must be above zero.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_gguf.evaluate import Run, Way, evaluate
from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.permute import rows_to_take, stored_orders
from mbolt_gguf.rewrite import rewrite
from mbolt_gguf.verify import verify
from mbolt_mlx.core.errors import UsageError, VerifyError
from mbolt_mlx.profile.perms import Perms, in_file_order

GAP = 1e-3
# Scores nearer than this share of the largest are a tie: a few units in the last place of float32.
TIE = 1e-6


@dataclass(frozen=True)
class Gate:
    """The result of one gate: ``found`` for people, ``numbers`` for JSON."""

    name: str
    passed: bool
    found: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass
class Sets:
    """How many top-k sets were equal, or differ and why; ``gap`` is the largest that was let by."""

    equal: int = 0
    ties: int = 0
    small: int = 0
    after: int = 0
    wrong: int = 0
    gap: float = 0.0

    @property
    def total(self) -> int:
        """All sets that were compared."""
        return self.equal + self.ties + self.small + self.after + self.wrong


class Checker:
    """Runs the gates on one pair of files.

    Args:
        original, rewritten: the models.
        driver: our driver, built from the patched llama.cpp.
        tokens: ids that are evaluated, at least 16.
        scratch: a folder for temporary rewrites of the original.
        layers: how many layers are permuted one at a time (None: all).
        gap: bound of the router's gap.
        threads: of the computation.
        say: told what is being done.
    """

    def __init__(
        self,
        original: Path,
        rewritten: Path,
        *,
        driver: Path,
        tokens: Sequence[int],
        scratch: Path | None = None,
        layers: int | None = None,
        gap: float = GAP,
        threads: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if len(tokens) < 16:
            raise UsageError("the gates need at least 16 tokens", found=len(tokens))
        self.original, self.rewritten = Model.open(original), rewritten
        self.tokens, self.driver, self.scratch = list(tokens), driver, scratch
        self.most_layers, self.gap, self.say = layers, gap, say
        self.way = Way(threads=threads, batch=len(tokens), decode=8)
        self.moe = find_experts(self.original)
        self.stored = stored_orders(self.original, self.moe)

    @cached_property
    def wanted(self) -> dict[int, np.ndarray]:
        """Layer → the original id of the expert at each place of the rewritten file."""
        model = Model.open(self.rewritten)
        return stored_orders(model, find_experts(model))

    @cached_property
    def take(self) -> dict[int, np.ndarray]:
        """Layer → the place in the original of the expert at each place of the rewritten file."""
        return {n: rows_to_take(self.stored[n], self.wanted[n]) for n in self.stored}

    def run(self) -> Iterator[Gate]:
        """The gates, one after the other; the first only where it fails, for the others compare
        nothing then."""
        yield (first := self.bytes())
        if not first.passed:
            return
        base = self._evaluate(self.original.path, self.way, scores=True)
        yield self.identity(base)
        changed = self._evaluate(self.rewritten, self.way, scores=True)
        yield self.routing(base, changed)
        yield self.distribution(base, changed)

    def bytes(self) -> Gate:
        """Gate 1."""
        self.say("comparing every byte")
        try:
            verify(self.original.path, self.rewritten, progress=False)
        except VerifyError as error:
            return Gate("bytes", False, str(error))
        tensors = self.original.tensors.values()
        count, size = len(tensors), sum(t.nbytes for t in tensors)
        return Gate(
            "bytes",
            True,
            f"{count} tensors and the metadata: {size / 1e6:.1f} MB are the original's",
            {"tensors": count, "bytes": size},
        )

    def identity(self, base: Run) -> Gate:
        """Gate 2, against the original's own run."""
        numbers, parts = {}, []
        for layout in ("identity", "interleave"):
            self.say(f"{layout}, without a permutation")
            with self._made(layout, None) as path:
                other = self._evaluate(path, self.way)
            differ = int((base.logits.view(np.uint32) != other.logits.view(np.uint32)).sum())
            routes = all(np.array_equal(base.routes[n], other.routes[n]) for n in base.routes)
            numbers[layout] = {
                "logits": base.logits.size,
                "different": differ,
                "same_routes": routes,
            }
            parts.append(f"{layout}: {differ} of {base.logits.size} logits differ")
        passed = all(not y["different"] and y["same_routes"] for y in numbers.values())
        return Gate("identity", passed, "; ".join(parts), numbers)

    def routing(self, base: Run, changed: Run) -> Gate:
        """Gate 3, of the original's run and the rewritten file's."""
        moved = [
            y for y in self.moe
            if y.layer in base.routes and (self.take[y.layer] != np.arange(y.experts)).any()
        ]  # fmt: skip
        chosen = _spread(moved, self.most_layers)
        one, before = Sets(), True
        for y in chosen:
            self.say(f"layer {y.layer} permuted alone")
            perms = _perms_of({y.layer: self.wanted[y.layer]})
            with self._made("chain", perms) as path:
                run = self._evaluate(path, self.way)
            before &= all(
                np.array_equal(run.routes[n], base.routes[n]) for n in base.routes if n < y.layer
            )
            mine = self.take[y.layer][run.routes[y.layer]]
            self._count_equal_inputs(one, base, y.layer, mine)
        whole = self._count_whole(base, changed)
        passed = before and not one.wrong and not whole.wrong
        numbers = {
            "layers_moved": len(moved),
            "layers_alone": len(chosen),
            "same_before": before,
            "alone": asdict(one),
            "whole": asdict(whole),
            "gap_bound": self.gap,
        }
        found = f"alone, {len(chosen)} of {len(moved)} moved layers: {_describe(one)}"
        found += "" if before else "; a layer before the permuted one changed"
        found += f"; the whole file: {_describe(whole)}; bound of the gap {self.gap:g}"
        return Gate("routing", passed, found, numbers)

    def distribution(self, base: Run, changed: Run) -> Gate:
        """Gate 4."""
        envelope = {}
        for way in self._ways():
            self.say(f"the original with {way.name}")
            other = self._evaluate(self.original.path, way)
            envelope[way.name] = _kl(base.logits, other.logits)
        found = _kl(base.logits, changed.logits)
        name = max(envelope, key=lambda key: envelope[key]["mean"])
        bound = envelope[name]["mean"]
        text = (
            f"mean KL {found['mean']:.2g} nats (most {found['max']:.2g}) inside {bound:.2g}, that "
            f"of {name}; the same first choice at {found['same_top']} of {len(self.tokens)} tokens"
        )
        if bound <= 0:
            text = "no two ways of computing differ, so there is no envelope"
        elif found["mean"] > bound:
            text = text.replace(" inside ", " outside ")
        numbers = {"permutation": found, "envelope": envelope, "bound": bound}
        return Gate("distribution", 0 < bound and found["mean"] <= bound, text, numbers)

    def _count_equal_inputs(self, sets: Sets, base: Run, layer: int, mine: np.ndarray) -> None:
        for token, (a, b) in enumerate(zip(base.routes[layer], mine, strict=True)):
            gap = self._gap(base, layer, token, a, b)
            if gap is None:
                sets.equal += 1
            elif gap <= TIE * float(np.abs(base.scores[layer][token]).max()):
                sets.ties += 1
                sets.gap = max(sets.gap, gap)
            else:
                sets.wrong += 1

    def _count_whole(self, base: Run, changed: Run) -> Sets:
        """Every set of the rewritten file; which changes may come from earlier ones is by order."""
        sets, first = Sets(), min(base.routes)
        reach = len(self.tokens)  # tokens from here on may have been touched by an earlier change
        for layer in sorted(base.routes):
            mine = self.take[layer][changed.routes[layer]]
            touched = reach
            for token, (a, b) in enumerate(zip(base.routes[layer], mine, strict=True)):
                gap = self._gap(base, layer, token, a, b)
                if gap is None:
                    sets.equal += 1
                    continue
                scale = float(np.abs(base.scores[layer][token]).max())
                if token >= reach:
                    sets.after += 1
                elif gap <= (TIE * scale if layer == first else self.gap):
                    sets.small += 1
                    sets.gap = max(sets.gap, gap)
                else:
                    sets.wrong += 1
                touched = min(touched, token)
            reach = touched
        return sets

    def _gap(self, base: Run, layer: int, token: int, a: np.ndarray, b: np.ndarray) -> float | None:
        """How far apart the router saw the experts that only one side chose; None when equal."""
        ours, theirs = set(a.tolist()), set(b.tolist())
        if ours == theirs:
            return None
        scores = base.scores[layer][token]
        gap = max(scores[[*(ours - theirs)]]) - min(scores[[*(theirs - ours)]])
        return float(gap) if np.isfinite(gap) else float("inf")

    @contextmanager
    def _made(self, layout: str, perms: Perms | None) -> Iterator[Path]:
        """A temporary rewrite of the original."""
        with tempfile.TemporaryDirectory(prefix="mbolt-correctness-", dir=self.scratch) as folder:
            target = Path(folder) / "m.gguf"
            made = rewrite(self.original, perms, target, layout=layout, progress=False)
            yield made.paths[0]

    def _ways(self) -> tuple[Way, ...]:
        """Legal ways to compute what ``self.way`` computes."""
        return (
            replace(self.way, name="flash attention", flash=True),
            replace(self.way, name="repacked weights", repack=True),
            replace(self.way, name="one token at a time", decode=len(self.tokens) - 1),
        )

    def _evaluate(self, path: Path, way: Way, *, scores: bool = False) -> Run:
        return evaluate(path, self.tokens, way, driver=self.driver, scores=scores)


def default_tokens(model: Model, count: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens of the model's vocabulary, drawn at random.

    Raises:
        UsageError: when the model has no vocabulary.
    """
    names = model.get("tokenizer.ggml.tokens")
    if not isinstance(names, list) or not names:
        raise UsageError("the model has no vocabulary", path=model.path, hint="give --tokens FILE")
    kinds = model.get("tokenizer.ggml.token_type") or [1] * len(names)
    usual = np.flatnonzero(np.asarray(kinds) == 1)
    return np.random.default_rng(seed).choice(usual, count).tolist()


def _perms_of(orders: Mapping[int, np.ndarray]) -> Perms:
    return in_file_order({n: order.tolist() for n, order in orders.items()}, {})


def _spread(layers: Sequence[MoeLayer], most: int | None) -> list[MoeLayer]:
    """At most ``most`` of ``layers``, evenly spread, the first and last among them."""
    if most is None or most >= len(layers):
        return list(layers)
    places = np.unique(np.linspace(0, len(layers) - 1, most).round().astype(int))
    return [layers[n] for n in places]


def _kl(base: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """KL divergence of ``other``'s distributions from ``base``'s, in nats, over the positions."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (base, other))
    each = np.maximum(0.0, (np.exp(p) * (p - q)).sum(axis=1))
    same = int((base.argmax(axis=1) == other.argmax(axis=1)).sum())
    return {"mean": float(each.mean()), "max": float(each.max()), "same_top": same}


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def _describe(sets: Sets) -> str:
    parts = [f"{sets.equal} of {sets.total} sets equal"]
    if sets.ties:
        parts.append(f"{sets.ties} ties")
    if sets.small:
        parts.append(f"{sets.small} with a gap of at most {sets.gap:.2g}")
    if sets.after:
        parts.append(f"{sets.after} after those")
    if sets.wrong:
        parts.append(f"{sets.wrong} WRONG")
    return ", ".join(parts)
