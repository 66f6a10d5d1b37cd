"""Every architecture, type and layout: rewritten, verified, and run in llama.cpp.

Layouts that only reorder run in the unmodified library. Interleaved files run in the patched one
and give the logits of the same order without interleaving, bit for bit.
"""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

from mbolt_gguf.evaluate import Way
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_gguf.verify import verify
from mbolt_mlx.core.errors import UnsupportedError
from tests.gguf.llama import random_perms, some_tokens
from tests.gguf.makers import MODELS, make_gguf

QUANTS = ("F16", "Q8_0", "Q4_K_M", "IQ4_XS", "MXFP4")
ARCHITECTURES = ("qwen3moe", "gpt-oss", "deepseek2", "glm4moe", "qwen3next")
VARIANTS = tuple(name for name in MODELS if name not in ARCHITECTURES)
SPLIT = 25  # tensors a file
MATRIX = [
    *itertools.product(ARCHITECTURES, QUANTS, (0, SPLIT)),
    *itertools.product(VARIANTS, ("Q8_0", "Q4_K_M"), (SPLIT,)),
]
TOKENS = some_tokens(24)
WAY = Way(batch=16, decode=4)
MTP_LAYER = {"glm4moe": (3,)}


def name_of(case):
    return f"{case[0]}-{case[1]}-{'split' if case[2] else 'single'}"


def write(path, folder, perms, layout):
    target = folder / f"out-{layout.replace('+', '-')}.gguf"
    return rewrite(path, perms, target, layout=layout, progress=False).paths[0]


def same(a, b):
    return np.array_equal(a.logits.view(np.uint32), b.logits.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("model, quant, split", MATRIX, ids=map(name_of, MATRIX))
def test_every_layout_is_verified_and_runs(llama, quick_path, model, quant, split):
    path = make_gguf(quick_path / "m.gguf", model, quant, split=split, empty_first=bool(split))
    assert Model.open(path).split == bool(split)
    perms = random_perms(path)
    original = llama.stock_run(path, TOKENS, WAY)
    assert np.isfinite(original.logits).all() and np.ptp(original.logits) > 1
    assert same(original, llama.run(path, TOKENS, WAY))

    def run_of(layout, run=llama.stock_run):
        """Write the layout, verify it, run it, remove it."""
        folder = quick_path / "out"
        folder.mkdir()
        written = write(path, folder, perms, layout)
        verify(path, written, progress=False)
        found = run(written, TOKENS, WAY)
        shutil.rmtree(folder)
        return found

    assert same(original, run_of("identity"))
    for order in ("heat", "clique", "chain"):
        run = run_of(order)
        assert same(run, run_of(f"{order}+pipeline"))
        assert (run.logits.argmax(axis=1) == original.logits.argmax(axis=1)).mean() > 0.9
        assert np.abs(run.logits - original.logits).mean() < 0.1
    assert same(original, run_of("interleave", llama.run))
    assert same(run, run_of("interleave+chain", llama.run))


@pytest.mark.parametrize("model, quant", [("gpt-oss", "MXFP4"), ("qwen3next-fused", "Q4_K_M")])
def test_interleaved_files_are_refused_by_the_unmodified_library(llama, tmp_path, model, quant):
    path = make_gguf(tmp_path / "m.gguf", model, quant)
    written = write(path, tmp_path, None, "interleave")
    with pytest.raises(UnsupportedError, match="mbolt-driver-stock failed"):
        llama.stock_run(written, TOKENS)


def test_layers_that_no_program_runs_stay_as_they_are(llama, tmp_path):
    """GLM's MTP layer is in no trace of llama.cpp."""
    path = make_gguf(tmp_path / "m.gguf", "glm4moe", "Q8_0")
    trace = llama.run(path, TOKENS, WAY, logits=False).trace
    assert set(trace.layers) == {1, 2}
    perms = random_perms(path, skip=MTP_LAYER["glm4moe"])
    written = write(path, tmp_path, perms, "chain+pipeline")
    verify(path, written, progress=False)
    assert np.isfinite(llama.stock_run(written, TOKENS, WAY).logits).all()


def test_experts_of_routing_groups_stay_in_their_group(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "deepseek2-groups", "Q8_0")
    written = write(path, tmp_path, random_perms(path), "chain")
    order = np.array(Model.open(written).get("mbolt.perm"))
    assert not np.array_equal(order[:16], np.arange(16))
    assert (order % 16 // 4 == np.arange(len(order)) % 16 // 4).all()
    before, after = (llama.stock_run(p, TOKENS, WAY).logits for p in (path, written))
    assert np.abs(before - after).max() < 0.05
