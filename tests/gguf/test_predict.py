"""What the prefetcher wants is what the prediction says, read for read and byte for byte."""

from __future__ import annotations

import os

import pytest

from mbolt_gguf.evaluate import Way
from mbolt_gguf.model import Model
from mbolt_gguf.predict import predict, ranges_of
from mbolt_gguf.prefetch_map import write_map
from mbolt_gguf.rewrite import rewrite
from tests.gguf.llama import random_perms, some_tokens
from tests.gguf.makers import make_gguf

TOKENS = some_tokens(24)
WAY = Way(decode=16)


@pytest.mark.parametrize(
    "model, quant, split",
    [("qwen3moe", "Q8_0", 0), ("deepseek2-fused", "MXFP4", 9), ("qwen3next", "Q4_K_M", 0)],
)
def test_wanted_reads(llama, tmp_path, model, quant, split):
    path = make_gguf(tmp_path / "m.gguf", model, quant, split=split, experts=16, top_k=4)
    perms = random_perms(path)
    trace = llama.run(path, TOKENS, WAY, logits=False).trace
    wanted = {}
    for layout in (None, "chain+pipeline", "interleave", "interleave+chain"):
        here = path
        if layout:
            target = tmp_path / f"{layout.replace('+', '-')}.gguf"
            here = rewrite(path, perms, target, layout=layout, progress=False).paths[0]
        opened = Model.open(here)
        place = write_map(opened, tmp_path / "map")
        switches = {"MBOLT_PREFETCH": str(place), "MBOLT_PREFETCH_THREADS": "2"}
        run = llama.run(here, TOKENS, WAY, routes=False, environment={**os.environ, **switches})
        counted, said = run.report["decode"]["prefetch"], predict(trace, opened, 1 << 40)
        tokens = run.report["decode"]["tokens"]
        assert counted["errors"] == 0 and tokens == WAY.decode
        assert counted["wanted_reads"] == pytest.approx(said.wanted_reads * tokens)
        assert counted["wanted_bytes"] == pytest.approx(said.wanted_bytes * tokens)
        assert said.issued_reads <= said.wanted_reads
        wanted[layout] = counted["wanted_reads"]
    assert wanted["interleave"] < wanted[None]


def test_ranges_are_by_original_expert(tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "F16")
    perms = random_perms(path)
    target = tmp_path / "out.gguf"
    written = rewrite(path, perms, target, layout="heat", progress=False).paths[0]
    before, after = (ranges_of(Model.open(p)) for p in (path, written))
    order = perms.order("heat")[1]
    assert [len(y) for y in after.values()] == [3, 3, 3]
    for a, b in zip(before[1], after[1], strict=True):
        base = min(b.offsets)
        assert [b.offsets[e] - base for e in order] == [n * b.nbytes for n in range(8)]
        assert a.nbytes == b.nbytes
        with open(path, "rb") as f, open(written, "rb") as g:
            f.seek(a.offsets[5])
            g.seek(b.offsets[5])
            assert f.read(a.nbytes) == g.read(b.nbytes)
