"""How blocks are read: slices cover a block and nothing else, and when they are chosen."""

from dataclasses import replace

import pytest

from mbolt_gguf.blocks import OVERLAP, SLICES, WHOLE, choose_blocks, ranges_in
from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.profile.law import Law
from tests.gguf import made


@pytest.fixture(scope="module", params=[("up", "gate", "down"), ("gate_up", "down")])
def pair(request, tmp_path_factory):
    """A model whose slices are no multiples of 32 bytes, and the same interleaved."""
    folder = tmp_path_factory.mktemp("blocks")
    tensors = [
        tensor
        for number in (0, 1)
        for tensor in made.layer(number, made.TYPES["MXFP4"], ff=33, roles=request.param)
    ]
    path = made.write_model(folder / "m.gguf", tensors)
    done = rewrite(path, None, folder / "i.gguf", layout="interleave", progress=False).paths[0]
    return Model.open(path), Model.open(done)


def test_slices_cover_the_block_but_for_its_padding(pair):
    blocks = pair[1]
    data = blocks.path.read_bytes()
    for y in find_experts(blocks):
        (whole,) = ranges_in(y, WHOLE, 1)
        parts = ranges_in(y, SLICES, 1)
        assert len(parts) == len(y.pieces) > 1 and whole.nbytes > y.expert_bytes
        assert [r.file for r in parts] == [*range(len(parts))]
        assert {r.stride for r in parts} == {whole.stride}
        at, padding = whole.base, 0
        for r in parts:
            assert 0 <= r.base - at < 32
            for e in range(y.experts):
                assert not any(data[at + e * r.stride : r.base + e * r.stride])
            padding += r.base - at
            at = r.base + r.nbytes
        assert at == whole.base + whole.nbytes and padding


def test_other_experts_are_read_as_ever(pair):
    for y in find_experts(pair[0]):
        assert ranges_in(y, SLICES, 1) == ranges_in(y, WHOLE, 1)
        assert [r.nbytes for r in ranges_in(y, WHOLE, 1)] == [s.nbytes for s in y.weights]


def test_the_first_slice_begins_with_the_block(pair):
    """The prefetcher compares the bytes there with those of any of the layer's tensors."""
    y = find_experts(pair[1])[0]
    later = tuple(replace(p, start=p.start + 64) for p in y.pieces)
    moved = replace(y, pieces=later)
    (whole,) = ranges_in(y, WHOLE, 1)
    first, second, *_ = ranges_in(moved, SLICES, 1)
    assert first.base == whole.base and first.nbytes == later[0].nbytes + 64
    assert second.base == later[1].offset(0)


def test_slices_of_a_split_model_keep_apart(pair):
    y = find_experts(pair[1])[0]
    other = replace(y.pieces[0].tensor, file=1)
    moved = replace(y, pieces=tuple(replace(p, tensor=other) for p in y.pieces))
    assert [r.file for r in ranges_in(moved, SLICES, 2)] == [
        1 + 2 * n for n in range(len(y.pieces))
    ]


def test_operations_decide(pair):
    layers = find_experts(pair[1])
    rate = 1e9
    each = sum(y.expert_bytes for y in layers) / len(layers) / rate
    later = sum(y.expert_bytes - y.pieces[0].nbytes for y in layers) / len(layers) / rate
    even = OVERLAP * later / (len(layers[0].pieces) - 1)
    assert choose_blocks(layers, Law(0.99 * even, rate)) == SLICES
    assert choose_blocks(layers, Law(1.01 * even, rate)) == WHOLE
    assert choose_blocks(layers, Law(0.0, float("inf"))) == WHOLE  # nothing to overlap with
    # Where the slower of two limits decides, operations cost nothing until they are the slower.
    free = each / len(layers[0].pieces)
    assert choose_blocks(layers, Law(free, rate, slower=True)) == SLICES
    assert choose_blocks(layers, Law(4 * free, rate, slower=True)) == WHOLE


def test_without_a_drive_or_without_blocks_nothing_changes(pair):
    plain, blocks = (find_experts(model) for model in pair)
    assert choose_blocks(blocks, None) == WHOLE
    assert choose_blocks(plain, Law(0.0, 1e9)) == WHOLE
