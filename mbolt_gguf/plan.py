"""The plan of a rewrite: every byte of the new files, before one is written.

Tensor order. Without ``+pipeline`` the tensors of a file keep their order. With it, and in
interleaved files, each file holds first all that is not an expert's weights, in the order of the
source (norms, attention, routers, expert biases and scales, embeddings: one range to keep in
memory), then the experts' weights in the order of execution: layers by rising number, in each
ffn_up_exps, ffn_gate_exps, ffn_down_exps (or ffn_gate_up_exps, ffn_down_exps; or the blocks). The
first of them begins on a page of 4096 bytes, for which the header is padded (``mbolt.padding``).

A split model keeps its borders: each tensor stays in the file where it was; the blocks of a layer
go to the file that holds the first of its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import mbolt_gguf
from mbolt_gguf import metadata
from mbolt_gguf.experts import MoeLayer
from mbolt_gguf.header import Tensor, parse_header
from mbolt_gguf.interleave import Block, encode_blocks, plan_block
from mbolt_gguf.metadata import Info
from mbolt_gguf.model import Model
from mbolt_gguf.permute import (
    KEY_LAYERS,
    KEY_PERM,
    Source,
    Wish,
    parse_order,
    stored_orders,
    wanted_orders,
)
from mbolt_gguf.profile import KEY_LAYOUT, carried_by, encode_profile, from_perms
from mbolt_gguf.ranges import Layout, Part, Rows
from mbolt_mlx.profile.perms import Perms

_SOURCE_KEYS = tuple(f"mbolt.source.{k}" for k in ("stamp", "files", "sizes", "header_sha256"))


@dataclass(frozen=True)
class Plan:
    """``files`` as the source has them; ``layout`` is its name in the metadata; ``notes`` are
    remarks for the user."""

    files: tuple[Layout, ...]
    layout: str
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def outcome(self, model: Model) -> Model:
        """What the rewritten ``model`` will be, as far as its headers tell it; its files have the
        names of those that they come from."""
        files = tuple(
            parse_header(planned.head, planned.size, source.path, file=number)
            for number, (planned, source) in enumerate(zip(self.files, model.files, strict=True))
        )
        return Model(files[0].path, files, {t.name: t for file in files for t in file.tensors})


@dataclass(frozen=True)
class _Entry:
    """A tensor of a new file; ``rank`` is its place among the experts' weights, None for others."""

    info: Info
    rows: tuple[Rows, ...]
    rank: tuple[int, int] | None


def make_plan(model: Model, layers: Sequence[MoeLayer], perms: Perms | None, wish: Wish) -> Plan:
    """Plan the rewrite of ``model`` into the layout ``wish``.

    Raises:
        UsageError: when the profile is absent or of another model.
        UnsupportedError: naming the tensor that cannot be permuted or interleaved.
        GgufError: when an earlier rewrite left metadata that does not fit.
    """
    stored = stored_orders(model, layers)
    orders, notes = wanted_orders(layers, stored, perms, wish)
    source = Source(model, layers, stored, orders)
    layout = wish.name(wish.order or parse_order(model.get(KEY_LAYOUT)))
    blocks: dict[int, Block] = {}
    if wish.interleave or (wish.identity and any(y.interleaved for y in layers)):
        blocks = {y.layer: plan_block(y.layer, y.experts, y.pieces) for y in layers}
    ours = _ours(model, layers, orders, layout, perms)
    if blocks:
        ours += encode_blocks(list(blocks.values()), model.path)
    entries = [
        _entries(model, number, layers, source, blocks) for number in range(len(model.files))
    ]
    count = sum(map(len, entries))
    files = []
    for number, found in enumerate(entries):
        if wish.pipeline:
            found = [e for e in found if e.rank is None] + sorted(
                (e for e in found if e.rank is not None), key=lambda e: e.rank
            )
        values = metadata.kept(model.files[number], count) + (ours if number == 0 else [])
        files.append(_layout(model.files[number].version, values, found, wish.pipeline))
    return Plan(tuple(files), layout, tuple(notes))


def _ours(
    model: Model,
    layers: Sequence[MoeLayer],
    orders: Mapping[int, np.ndarray],
    layout: str,
    perms: Perms | None,
) -> list[bytes]:
    """The encoded values under ``mbolt.`` that every layout has."""
    carried = carried_by(model, layers) if perms is None else from_perms(perms)
    values = [
        metadata.text("mbolt.version", mbolt_gguf.__version__),
        metadata.text(KEY_LAYOUT, layout),
        metadata.number("mbolt.n_layers", len(layers)),
        metadata.number("mbolt.n_experts", max(y.experts for y in layers)),
        metadata.i32s(KEY_LAYERS, (y.layer for y in layers)),
        metadata.i32s(KEY_PERM, (int(e) for y in layers for e in orders[y.layer])),
    ]
    if carried is not None:
        values += encode_profile(carried, layers, orders)
    return values + _source(model)


def _source(model: Model) -> list[bytes]:
    """The stamp of the files whose expert ids are the original ones."""
    if all(key in model.values for key in _SOURCE_KEYS):
        return [model.values[key].encoded for key in _SOURCE_KEYS]
    return [
        metadata.text(_SOURCE_KEYS[0], model.stamp),
        metadata.texts(_SOURCE_KEYS[1], [f.path.name for f in model.files]),
        metadata.u64s(_SOURCE_KEYS[2], (f.size for f in model.files)),
        metadata.texts(_SOURCE_KEYS[3], [f.header_sha256 for f in model.files]),
    ]


def _entries(
    model: Model,
    number: int,
    layers: Sequence[MoeLayer],
    source: Source,
    blocks: Mapping[int, Block],
) -> list[_Entry]:
    """The tensors that file ``number`` of the result has, in the order of the source."""
    heavy = {tensor.name: y for y in layers for tensor in tensors_of(y)}
    out = []
    for tensor in model.files[number].tensors:
        y = heavy.get(tensor.name)
        if y is None:
            info = Info(tensor.name, tensor.type, tensor.shape, tensor.nbytes)
            out.append(_Entry(info, source.rows(tensor.name), None))
        elif y.layer in blocks:
            if tensor == tensors_of(y)[0]:
                block = blocks[y.layer]
                out.append(_Entry(block.info, block_rows(source, block), (y.layer, 0)))
        else:
            for rank, piece in enumerate(y.pieces):
                if piece.tensor == tensor:
                    shape = (*piece.shape, y.experts)
                    info = Info(piece.name, piece.type, shape, piece.nbytes * y.experts)
                    out.append(_Entry(info, source.rows(piece.name), (y.layer, rank)))
    return out


def tensors_of(layer: MoeLayer) -> list[Tensor]:
    """The tensors that hold the experts' weights of ``layer``, in the order of files and bytes."""
    found = {piece.tensor.name: piece.tensor for piece in layer.pieces}
    return sorted(found.values(), key=lambda tensor: (tensor.file, tensor.offset))


def block_rows(source: Source, block: Block) -> tuple[Rows, ...]:
    """What the tensor of ``block`` is made of."""
    return tuple(
        source.piece_rows(block.layer, piece, start, block.stride)
        for piece, start in zip(block.pieces, block.starts, strict=True)
    )


def _layout(version: int, values: list[bytes], entries: list[_Entry], pipeline: bool) -> Layout:
    infos = [entry.info for entry in entries]
    first = next((e.info.name for e in entries if e.rank is not None), None) if pipeline else None
    head, offsets = metadata.encode_header(version, values, infos, page_align=first)
    parts = tuple(Part(e.info.name, offsets[e.info.name], e.info.nbytes, e.rows) for e in entries)
    end = len(head) + sum(metadata.padded(info.nbytes) for info in infos)
    return Layout(end, head, parts)
