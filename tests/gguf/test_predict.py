"""What the prefetcher wants is what the prediction says, read for read and byte for byte."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mbolt_gguf.blocks import BLOCKS, WHOLE
from mbolt_gguf.evaluate import Way
from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.predict import predict, predict_pages, ranges_of
from mbolt_gguf.prefetch_map import write_map
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace
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
        here, logits = path, None
        if layout:
            target = tmp_path / f"{layout.replace('+', '-')}.gguf"
            here = rewrite(path, perms, target, layout=layout, progress=False).paths[0]
        opened = Model.open(here)
        for blocks in BLOCKS if "interleave" in (layout or "") else (WHOLE,):
            place = write_map(opened, tmp_path / "map", blocks=blocks)
            switches = {"MBOLT_PREFETCH": str(place), "MBOLT_PREFETCH_THREADS": "2"}
            run = llama.run(here, TOKENS, WAY, routes=False, environment={**os.environ, **switches})
            counted = run.report["decode"]["prefetch"]
            tokens = run.report["decode"]["tokens"]
            assert counted["errors"] == 0 and tokens == WAY.decode
            logits = run.logits if logits is None else logits
            assert np.array_equal(logits.view("u4"), run.logits.view("u4"))
            by_expert = predict(trace, opened, 1 << 40, blocks=blocks)
            for said in (by_expert, predict_pages(trace, opened, 1 << 30, blocks=blocks)):
                assert counted["wanted_reads"] == pytest.approx(said.wanted_reads * tokens)
                assert counted["wanted_bytes"] == pytest.approx(said.wanted_bytes * tokens)
                assert said.issued_reads <= said.wanted_reads
            wanted[layout, blocks] = counted["wanted_reads"]
    assert wanted["interleave", WHOLE] < wanted["interleave", BLOCKS[-1]] <= wanted[None, WHOLE] * 3


@pytest.mark.parametrize("split", [0, 4])
def test_pages_that_are_in_memory_are_not_read(tmp_path, split):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "F16", experts=16, top_k=4, split=split)
    model = Model.open(path)
    infos = {y.layer: LayerInfo(y.experts, y.top_k) for y in find_experts(model)}
    rng = np.random.default_rng(0)
    passes = [
        Pass("decode", {n: rng.choice(16, (1, 4), replace=False) for n in infos}) for _ in range(60)
    ]
    trace = make_trace(passes, infos)
    everything = predict_pages(trace, model, 1 << 30, skip=40)
    assert (everything.issued_reads, everything.hit_rate) == (0.0, 1.0)
    half, more = (predict_pages(trace, model, n, skip=10) for n in (4 << 20, 6 << 20))
    assert 0 < more.issued_bytes < half.issued_bytes < half.wanted_bytes
    assert 0 < half.hit_rate < more.hit_rate < 1
    # Nothing of an expert's last page is read past the expert.
    first = predict_pages(trace.part(passes[:1]), model, 1 << 30)
    assert (first.issued_reads, first.issued_bytes) == (first.wanted_reads, first.wanted_bytes)


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
