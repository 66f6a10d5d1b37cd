"""A GGUF model known from its headers, for the commands of `mbolt_mlx.cli` that only reckon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.permute import parse_layout
from mbolt_gguf.plan import make_plan
from mbolt_gguf.predict import PAGE, ranges_of
from mbolt_mlx.core.budget import LayerShape
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.profile.layout import Range, check_layout
from mbolt_mlx.profile.perms import ORDERS, Perms
from mbolt_mlx.profile.plan import Model as PlannedModel
from mbolt_mlx.profile.traces import LayerInfo


@dataclass(frozen=True)
class GgufHeaders:
    """The headers of a GGUF model, ``layers`` those with experts. It is on this machine, and what
    reads it is the prefetcher of the patched llama.cpp, which merges as `predict` says."""

    source: Model
    layers: tuple[MoeLayer, ...]
    remote: bool = False
    merge_gap: int = PAGE - 1

    @property
    def name(self) -> str:
        """The name of the (first) file."""
        return self.source.path.name

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Layer number → experts, top_k and bytes of an expert."""
        return {y.layer: LayerShape(y.experts, y.top_k, y.expert_bytes) for y in self.layers}

    @property
    def infos(self) -> dict[int, LayerInfo]:
        """Layer number → what a trace would say of it."""
        return {
            y.layer: LayerInfo(y.experts, y.top_k, y.expert_bytes, len(y.weights))
            for y in self.layers
        }

    def model(self) -> PlannedModel:
        """Nothing: a plan reckons with the memory of an engine that does not run GGUF files.

        Raises:
            UnsupportedError: saying what there is instead.
        """
        raise UnsupportedError(
            "plans are for model folders, which mbolt-mlx runs, not for GGUF files",
            path=self.source.path,
            hint="`mbolt-gguf map` shows what a token reads, `mbolt-sim simulate --model` what "
            "memory gains",
        )

    def ranges(self, layout: str, perms: Perms | None = None) -> dict[int, tuple[Range, ...]]:
        """Layer number → where its experts lie by original id: in the model's own files, or in
        those that a rewrite would make, to the byte.

        Args:
            layout: "stock" is the files as they are. "heat", "clique" and "chain" are the
                rewriter's layouts of these names. "coalesced" is its "interleave", with the
                experts as they lie; "coalesced+chain" and "interleave" its "interleave+chain".
            perms: the profile, for layouts in an order of it.

        Raises:
            UsageError: when the order is not given, or the profile is of another model.
            UnsupportedError: naming the tensor that is in the way of the layout.
            GgufError: when an earlier rewrite left metadata that does not fit.
        """
        order, whole = check_layout(layout, ORDERS if perms else ())
        words = ["interleave"] if whole else []
        if order != "ids":
            words.append(order)
        if not words:
            return ranges_of(self.source)
        plan = make_plan(self.source, self.layers, perms, parse_layout("+".join(words)))
        return ranges_of(plan.outcome(self.source))


def open_gguf(path: str | Path) -> GgufHeaders:
    """The headers of the model that ``path`` is, or is a file of.

    Raises:
        GgufError: when a file is absent or malformed.
        UnsupportedError: when the model has no experts that can be told apart.
    """
    model = Model.open(path)
    return GgufHeaders(model, find_experts(model))
