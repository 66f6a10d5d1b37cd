"""Models known from their headers, for the commands that only reckon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mbolt_mlx.cli.inspect import _top_k
from mbolt_mlx.core.budget import LayerShape, geometry_of
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.core.places import user_path
from mbolt_mlx.profile.layout import LAYOUTS, Range, Readable, check_layout
from mbolt_mlx.profile.perms import ORDERS, Perms
from mbolt_mlx.profile.plan import Model
from mbolt_mlx.profile.traces import LayerInfo
from mbolt_mlx.storage import store as stores
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.coalesce import estimate
from mbolt_mlx.storage.experts import ExpertLayer, find_experts
from mbolt_mlx.storage.plan import make_plan

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}


class Sizes(Protocol):
    """What the commands ask of a model: `Headers` of a folder, `GgufHeaders` of a GGUF file."""

    @property
    def name(self) -> str:
        """What to call it."""

    @property
    def remote(self) -> bool:
        """Whether no weights are on this machine."""

    @property
    def merge_gap(self) -> int | None:
        """Bytes up to which its engine reads the gap between two ranges too; None is ours."""

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Layer number → experts, top_k and bytes of an expert."""

    @property
    def infos(self) -> dict[int, LayerInfo]:
        """Layer number → what a trace would say of it."""

    def model(self) -> Model:
        """What the planner needs to know."""

    def ranges(self, layout: str, perms: Perms | None = None) -> dict[int, tuple[Readable, ...]]:
        """Layer number → where its experts lie in ``layout``, one of `LAYOUTS`."""


@dataclass(frozen=True)
class Headers:
    """A model folder's headers; ``remote`` where no weights are on this machine."""

    name: str
    checkpoint: Checkpoint
    layers: tuple[ExpertLayer, ...]
    remote: bool
    merge_gap: int | None = None

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Layer number → experts, top_k and bytes of an expert.

        Raises:
            UnsupportedError: when the config does not say how many experts a token uses.
        """
        top_k = _top_k(self.checkpoint.config, self.layers)
        if top_k is None:
            raise UnsupportedError(
                "the config does not say how many experts a token uses", path=self.checkpoint.path
            )
        return {y.layer: LayerShape(y.experts, top_k, y.block_bytes) for y in self.layers}

    @property
    def infos(self) -> dict[int, LayerInfo]:
        """Layer number → what a trace would say of it."""
        pieces = {y.layer: len(y.pieces) for y in self.layers}
        return {
            layer: LayerInfo(s.experts, s.top_k, s.expert_bytes, pieces[layer])
            for layer, s in self.shapes.items()
        }

    def model(self) -> Model:
        """What the planner needs to know."""
        tensors = self.checkpoint.tensors.values()
        experts = sum(y.experts * y.block_bytes for y in self.layers)
        widest = max((_FLOATS.get(t.dtype, 2) for t in tensors), default=2)
        return Model(
            name=self.name,
            layers=self.shapes,
            pieces=sum(len(y.pieces) for y in self.layers) / len(self.layers),
            dense_bytes=sum(t.nbytes for t in tensors) - experts,
            side_file_bytes=estimate(self.layers),
            geometry=geometry_of(self.checkpoint.config, widest),
        )

    def ranges(self, layout: str, perms: Perms | None = None) -> dict[int, tuple[Readable, ...]]:
        """Layer number → where its experts lie, exactly: the model's files, or a side-file's plan.

        Raises:
            UnsupportedError: for a layout that this model's files cannot have.
            UsageError: for one whose order is not given.
        """
        order, whole = LAYOUTS[layout]
        if not whole:
            if order != "ids":
                raise UnsupportedError(
                    f"the layout {layout} reorders pieces in place, as is done to GGUF files",
                    hint=f"coalesced+{order} is the side-file in that order",
                )
            return {
                y.layer: y.runs for y in stores.from_shards(self.checkpoint, self.layers).layers
            }
        check_layout(layout, ORDERS if perms else ())
        given = perms.order(order) if perms and order != "ids" else None
        out: dict[int, tuple[Readable, ...]] = {}
        for layer in make_plan(self.layers, "", given).layers:
            size = layer.piece_offsets[-1] + layer.source.pieces[-1].nbytes
            count = layer.source.experts
            pieces = tuple(range(len(layer.piece_offsets)))
            offsets = tuple(layer.starts.tolist())
            out[layer.source.layer] = (Range(pieces, size, (0,) * count, offsets),)
        return out


def open_headers(name: str, *, revision: str | None = None) -> Sizes:
    """The headers of a GGUF file, of a folder or of a model in the hub's cache; else by range
    requests to the hub.

    Raises:
        NamesError, CheckpointError, UnsupportedError: as `names.resolve` and `find_experts`.
        GgufError: for a GGUF file, as `mbolt_gguf.model.Model.open`.
    """
    if _is_gguf(user_path(name)):
        from mbolt_gguf.headers import open_gguf

        return open_gguf(user_path(name))

    from mbolt_mlx import hub, names

    repository = _repository(name)
    cached = hub.cached(repository, revision) if repository else None
    if repository and not (cached and hub.is_complete(cached)):
        from mbolt_mlx.storage.remote import open_remote

        checkpoint = open_remote(repository, revision=revision)
        return Headers(name, checkpoint, find_experts(checkpoint), True)
    folder = names.resolve(name, revision=revision)
    checkpoint = Checkpoint.open(folder)
    label = name if repository else Path(folder).name
    return Headers(label, checkpoint, _experts(checkpoint), False)


def _is_gguf(path: Path) -> bool:
    """Whether ``path`` is a GGUF file by its name, or by how it begins."""
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _experts(checkpoint: Checkpoint) -> tuple[ExpertLayer, ...]:
    """By their names where those say it; else as mlx-lm would build the model."""
    try:
        return find_experts(checkpoint)
    except UnsupportedError:
        from mbolt_mlx.engine.locate import experts_of

        return experts_of(checkpoint)


def _repository(name: str) -> str | None:
    """The hub repository that ``name`` means; None for a folder and for the model that ships."""
    from mbolt_mlx import names

    if name == names.DEMO or user_path(name).exists():
        return None
    short = names.match_short_name(name) if "/" not in name else None
    if short is not None:
        return names.short_names()[short].repositories[short]
    return name if names._REPOSITORY.fullmatch(name) else None
