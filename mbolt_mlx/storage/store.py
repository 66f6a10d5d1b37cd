"""What the engine reads from: a side-file or the plain shards, seen alike.

An expert is read as one or more *runs*. A run is a range of one file that holds one or more of
the expert's pieces. A side-file has one run an expert, plain shards one a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mbolt_mlx.core.schedule import by_place
from mbolt_mlx.storage.experts import ExpertLayer, Piece

if TYPE_CHECKING:
    from mbolt_mlx.storage.checkpoint import Checkpoint
    from mbolt_mlx.storage.locate import SideFile


@dataclass(frozen=True)
class Run:
    """One range an expert.

    Args:
        pieces: numbers of the pieces in it, in file order.
        starts: where each begins, in bytes from the start of the run.
        nbytes: length of the run.
        files: by expert, the number of the file.
        offsets: by expert, the first byte.
    """

    pieces: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int
    files: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class LayerStore:
    """Where one layer's experts lie.

    Args:
        layer: number of the layer.
        module: path of its expert container in the model.
        experts: how many.
        pieces: what each is made of.
        runs: how each is read.
        heat: by expert, how often a profile saw it used, where the side-file says.
    """

    layer: int
    module: str
    experts: int
    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    heat: tuple[float, ...] | None = None

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return sum(piece.nbytes for piece in self.pieces)

    def file_order(self, experts: Sequence[int]) -> list[int]:
        """``experts`` in the order of their first byte."""
        run = self.runs[0]
        return by_place(run.files, run.offsets)(list(experts))


@dataclass(frozen=True)
class Store:
    """Files and the layers in them; ``side_file`` is None for the plain shards."""

    files: tuple[Path, ...]
    layers: tuple[LayerStore, ...]
    side_file: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(layer.experts * layer.expert_bytes for layer in self.layers)


def from_shards(checkpoint: Checkpoint, layers: Sequence[ExpertLayer]) -> Store:
    """Read from the model's own files, a run a piece."""
    used = sorted({int(n) for layer in layers for n in layer.files.ravel()})
    number = {shard: i for i, shard in enumerate(used)}
    return Store(
        files=tuple(checkpoint.shards[n].path for n in used),
        layers=tuple(_shard_layer(layer, number) for layer in layers),
    )


def _shard_layer(layer: ExpertLayer, number: dict[int, int]) -> LayerStore:
    runs = tuple(
        Run(
            pieces=(p,),
            starts=(0,),
            nbytes=piece.nbytes,
            files=tuple(number[n] for n in layer.files[p].tolist()),
            offsets=tuple(layer.offsets[p].tolist()),
        )
        for p, piece in enumerate(layer.pieces)
    )
    return LayerStore(layer.layer, layer.module, layer.experts, layer.pieces, runs)


def from_side_file(side_file: SideFile, layers: Sequence[ExpertLayer]) -> Store:
    """Read from a side-file, one run an expert; its geometry has been checked by opening it."""
    entries = {entry.module: entry for entry in side_file.manifest.layers}
    stores = []
    for layer in layers:
        entry = entries[layer.module]
        order = sorted(range(len(entry.pieces)), key=lambda i: entry.pieces[i].offset)
        names = {piece.name: p for p, piece in enumerate(layer.pieces)}
        last = entry.pieces[order[-1]]
        run = Run(
            pieces=tuple(names[entry.pieces[i].name] for i in order),
            starts=tuple(entry.pieces[i].offset for i in order),
            nbytes=last.offset + last.nbytes,
            files=(0,) * layer.experts,
            offsets=tuple(int(o) for o in entry.offsets),
        )
        stores.append(
            LayerStore(layer.layer, layer.module, layer.experts, layer.pieces, (run,), entry.heat)
        )
    return Store((Path(side_file.path),), tuple(stores), Path(side_file.path))
