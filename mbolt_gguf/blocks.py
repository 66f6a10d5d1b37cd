"""How the blocks of an interleaved file are read: whole, or slice by slice.

Whole blocks are the fewest reads, one an expert. But llama.cpp multiplies the ups of all chosen
experts first, and with whole blocks the last of these comes with the last expert's gate and down.
Slice by slice, all ups are read first, then all gates, then all downs: one product is computed
while the slices of the next are on their way. That is so only where nobody waits for the reads, in
the prefetcher's mode ``willneed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbolt_gguf.experts import MoeLayer
from mbolt_mlx.profile.law import Law

WHOLE, SLICES = BLOCKS = ("whole", "slices")
AUTO = "auto"
# Time to compute experts ÷ time to transfer them. In the benchmark one core computes a whole token
# in 24 ms, two in about half of that, and what it misses takes 50 to 110 ms.
OVERLAP = 0.125


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """One range of each expert of a layer: expert e's ``nbytes`` bytes are at ``base + e · stride``
    (e is its place in the file) of the file of that number, as a prefetch map counts them: what
    has another number is not joined to it."""

    file: int
    base: int
    nbytes: int
    stride: int


def ranges_in(layer: MoeLayer, blocks: str, files: int) -> tuple[ExpertRange, ...]:
    """What a prefetcher reads of each expert of ``layer``, in the order of the reads.

    A slice of a block is one range; ``files`` times its number in the block is added to the number
    of the model's file. The first range begins with the block (the prefetcher compares bytes there
    with the tensor that it belongs to).
    """
    if blocks == WHOLE or not layer.interleaved:
        return tuple(
            ExpertRange(s.tensor.file, s.offset(0), s.nbytes, s.stride) for s in layer.weights
        )
    out = []
    for number, piece in enumerate(layer.pieces):
        lead = 0 if number else piece.start
        file = piece.tensor.file + number * files
        out.append(ExpertRange(file, piece.offset(0) - lead, piece.nbytes + lead, piece.stride))
    return tuple(out)


def choose_blocks(layers: Sequence[MoeLayer], law: Law | None) -> str:
    """How the blocks of ``layers`` are to be read on the drive of ``law`` (None: not known).

    Read slice by slice, an expert of p slices and B bytes costs more operations:
    ``law.seconds(p, B) - law.seconds(1, B)``, which is (p - 1) · t_op where operations and bytes
    add up. It gains that computing goes on during the transfer of all slices but the first: of that
    time, as much is saved as computing takes. How much that is does not follow from the law of the
    drive. It is reckoned as `OVERLAP` of the transfer, and slices are chosen where they cost less:
    for equal slices and a law that adds up, where t_op is below `OVERLAP` of the transfer of one
    slice. Whoever errs here loses little: what is weighed is about a tenth of the time.
    """
    if law is None or not any(y.interleaved for y in layers):
        return WHOLE
    cost = gain = 0.0
    for y in layers:
        if y.interleaved:
            cost += law.seconds(len(y.pieces), y.expert_bytes) - law.seconds(1, y.expert_bytes)
            gain += OVERLAP * (y.expert_bytes - y.pieces[0].nbytes) / law.bandwidth
    return SLICES if cost < gain else WHOLE
