"""Proves a rewritten model against its original: every byte of every tensor, and the metadata.

The orders are taken from the two files themselves (``mbolt.perm``), not from the profile or from
the plan of the rewrite, and the blocks of an interleaved file from what its metadata says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mbolt_gguf import metadata, ranges
from mbolt_gguf.experts import MoeLayer, find_experts
from mbolt_gguf.header import GgufFile
from mbolt_gguf.interleave import Block
from mbolt_gguf.metadata import Info
from mbolt_gguf.model import Model
from mbolt_gguf.permute import Source, stored_orders
from mbolt_gguf.plan import block_rows, tensors_of
from mbolt_gguf.ranges import Layout, Part, Rows
from mbolt_mlx.core.errors import GgufError, UnsupportedError, UsageError, VerifyError
from mbolt_mlx.core.files import is_same_file
from mbolt_mlx.core.progress import Progress
from mbolt_mlx.core.scatter import Scatterer, aligned_buffer
from mbolt_mlx.core.workers import work_through

THREADS = 3


@dataclass(frozen=True)
class VerifyReport:
    """What was compared: all ``tensors`` and ``bytes`` of the rewritten files; ``moved`` experts
    are at another place than in the original."""

    path: Path
    tensors: int
    experts: int
    moved: int
    interleaved: bool
    bytes: int
    seconds: float


def verify(original: str | Path, rewritten: str | Path, *, progress: bool = True) -> VerifyReport:
    """Compare ``rewritten`` with ``original``, of which any file of a split model may be named.

    Raises:
        VerifyError: with the first difference: the tensor, expert and byte, or the key.
        UsageError: when the two are one file.
        GgufError: when the original is malformed, or there is no such file.
        ReadError: when either cannot be read.
    """
    source = Model.open(original)
    try:
        result = Model.open(rewritten)
    except GgufError as error:
        if not Path(rewritten).is_file():
            raise
        raise _as_difference(error) from error
    if any(is_same_file(a.path, b.path) for a in source.files for b in result.files):
        raise UsageError(
            "the same file as the original: there is nothing to compare", path=rewritten
        )
    return compare(source, result, progress=progress)


def compare(original: Model, rewritten: Model, *, progress: bool = True) -> VerifyReport:
    """`verify` for models that are open.

    Raises:
        VerifyError: with the first difference.
        ReadError: when either cannot be read.
    """
    started = time.perf_counter()
    layers = find_experts(original)
    before = stored_orders(original, layers)
    try:
        found = find_experts(rewritten)
        if [(y.layer, y.experts) for y in found] != [(y.layer, y.experts) for y in layers]:
            raise GgufError("it has experts in other layers", path=rewritten.path)
        after = stored_orders(rewritten, found)
        source = Source(original, layers, before, after)
        wanted = _wanted(source, layers, found)
        _check_tensors(wanted, rewritten)
    except (GgufError, UnsupportedError) as error:
        raise _as_difference(error) from error
    _check_headers(original, rewritten)
    _Comparison(original, rewritten, found, wanted, after).run(progress)
    return VerifyReport(
        path=rewritten.path,
        tensors=len(rewritten.tensors),
        experts=sum(y.experts for y in layers),
        moved=sum(int((take != np.arange(len(take))).sum()) for take in source.take.values()),
        interleaved=any(y.interleaved for y in found),
        bytes=rewritten.size,
        seconds=time.perf_counter() - started,
    )


def _as_difference(error: GgufError | UnsupportedError) -> VerifyError:
    return VerifyError(
        error.message, path=error.path, tensor=error.tensor, offset=error.offset,
        expected=error.expected, found=error.found, hint=error.hint,
    )  # fmt: skip


Wanted = dict[str, tuple[Info, tuple[Rows, ...]]]


def _wanted(source: Source, layers: Sequence[MoeLayer], found: Sequence[MoeLayer]) -> Wanted:
    """Name → what the tensor must be and be made of, for all tensors of the rewritten model."""
    heavy = {tensor.name for y in layers for tensor in tensors_of(y)}
    out: Wanted = {
        t.name: (Info(t.name, t.type, t.shape, t.nbytes), source.rows(t.name))
        for t in source.model.tensors.values()
        if t.name not in heavy
    }
    for ours, theirs in zip(layers, found, strict=True):
        if not theirs.interleaved:
            for piece in ours.pieces:
                shape = (*piece.shape, ours.experts)
                info = Info(piece.name, piece.type, shape, piece.nbytes * ours.experts)
                out[piece.name] = info, source.rows(piece.name)
            continue
        by_role = {piece.role: piece for piece in ours.pieces}
        blob = theirs.weights[0]
        for piece in theirs.pieces:
            same = by_role.get(piece.role)
            if same is None or (same.type, same.shape) != (piece.type, piece.shape):
                raise GgufError(
                    f"its piece {piece.role} is of another type or shape than the original's",
                    path=source.model.file_of(blob.tensor), tensor=blob.name,
                    expected=same and [same.type, *same.shape], found=[piece.type, *piece.shape],
                )  # fmt: skip
        block = Block(
            ours.layer,
            ours.experts,
            tuple(by_role[piece.role] for piece in theirs.pieces),
            tuple(piece.start for piece in theirs.pieces),
            blob.stride,
        )
        if len(block.pieces) != len(ours.pieces):
            raise GgufError("its blocks lack a piece", tensor=blob.name)
        out[block.info.name] = block.info, block_rows(source, block)
    return out


def _check_tensors(wanted: Mapping[str, tuple[Info, object]], rewritten: Model) -> None:
    for name in wanted:
        if name not in rewritten.tensors:
            raise GgufError("a tensor of the original is absent", path=rewritten.path, tensor=name)
    for name, tensor in rewritten.tensors.items():
        path = rewritten.file_of(tensor)
        if name not in wanted:
            raise GgufError("a tensor that the original does not have", path=path, tensor=name)
        info = wanted[name][0]
        if (tensor.type, tensor.shape) != (info.type, info.shape):
            raise GgufError(
                "of another type or shape", path=path, tensor=name,
                expected=[info.type, *info.shape], found=[tensor.type, *tensor.shape],
            )  # fmt: skip


def _check_headers(original: Model, rewritten: Model) -> None:
    """Compare the metadata byte for byte, and the header's bytes with what they were read as."""
    if len(original.files) != len(rewritten.files):
        raise VerifyError(
            "the model is split into another number of files", path=rewritten.path,
            expected=len(original.files), found=len(rewritten.files),
        )  # fmt: skip
    count = len(rewritten.tensors)
    for ours, theirs in zip(original.files, rewritten.files, strict=True):
        different = metadata.differing_key(metadata.kept(ours, count), theirs.values)
        if different is not None:
            key, expected, found = different
            raise VerifyError(
                f"the metadata differs at {key}",
                path=theirs.path, expected=expected, found=found,
            )  # fmt: skip
        at = _first_difference(_header_of(ours.version, theirs), theirs.raw_header)
        if at is not None:
            raise VerifyError("the header differs", path=theirs.path, offset=at)


def _header_of(version: int, file: GgufFile) -> bytes:
    values = [value.encoded for value in file.values.values()]
    infos = [Info(t.name, t.type, t.shape, t.nbytes) for t in file.tensors]
    return metadata.encode_header(version, values, infos)[0]


def _first_difference(want: bytes, have: bytes) -> int | None:
    if want == have:
        return None
    shorter = min(len(want), len(have))
    a, b = (np.frombuffer(x, np.uint8, shorter) for x in (want, have))
    return int(np.append(np.flatnonzero(a != b), shorter)[0])


class _Stop(Exception):
    """A difference was found; no more work is needed."""


class _Comparison:
    """All bytes of the rewritten files from where their data begins."""

    def __init__(
        self,
        original: Model,
        rewritten: Model,
        layers: Sequence[MoeLayer],
        wanted: Wanted,
        orders: Mapping[int, np.ndarray],
    ) -> None:
        self.sources = [file.path for file in original.files]
        self.results = [file.path for file in rewritten.files]
        self.starts = [file.data_start for file in rewritten.files]
        self.layouts = [
            Layout(
                file.size,
                b"",
                tuple(Part(t.name, t.offset, t.nbytes, wanted[t.name][1]) for t in file.tensors),
            )
            for file in rewritten.files
        ]
        self.orders = orders
        self.of_layer = {
            slices.name: y.layer for y in layers for slices in (*y.weights, *y.small, *y.router)
        }
        self._found: list[tuple[tuple[int, int], VerifyError]] = []
        self._lock = threading.Lock()

    def jobs(self) -> Iterator[tuple[int, int, int]]:
        for number, (layout, start) in enumerate(zip(self.layouts, self.starts, strict=True)):
            for _, lo, hi in layout.windows():
                if hi > start:
                    yield number, max(lo, start), hi

    def run(self, progress: bool) -> None:
        total = sum(hi - lo for _, lo, hi in self.jobs())
        with Progress("comparing", total, shown=progress) as bar:
            try:
                work_through(self.jobs(), lambda: self.worker(bar), THREADS)
            except _Stop:
                # Jobs are handed out in order, so the first difference is among those found.
                raise min(self._found, key=lambda found: found[0])[1] from None

    def worker(self, bar: Progress):
        wanted, stored = (aligned_buffer(ranges.WINDOW_BYTES) for _ in range(2))
        source, result = Scatterer(self.sources), Scatterer(self.results)

        def do(job: tuple[int, int, int]) -> None:
            number, lo, hi = job
            want, have = wanted[: hi - lo], stored[: hi - lo]
            self.layouts[number].fill(source, lo, hi, want)
            result.read([(number, lo, hi - lo, 0)], have)
            if not np.array_equal(want, have):
                self.differ(number, lo, want, have)
            bar.advance(hi - lo)

        return do

    def differ(self, number: int, lo: int, want: np.ndarray, have: np.ndarray) -> None:
        at = int(np.flatnonzero(want != have)[0])
        offset = lo + at
        part = next(iter(self.layouts[number].parts_in(offset, offset + 1)), None)
        error = VerifyError(
            self.describe(part, offset),
            path=self.results[number], tensor=part.name if part else None, offset=offset,
            expected=f"0x{int(want[at]):02x}", found=f"0x{int(have[at]):02x}",
        )  # fmt: skip
        with self._lock:
            self._found.append(((number, offset), error))
        raise _Stop

    def describe(self, part: Part | None, offset: int) -> str:
        if part is None:
            return "the padding after a tensor is not zero"
        layer, inside = self.of_layer.get(part.name), offset - part.offset
        if layer is None:
            return f"its byte {inside} differs from the original"
        order = self.orders[layer]
        position = inside * len(order) // part.nbytes
        return f"expert {order[position]}, at position {position}, differs from the original"
