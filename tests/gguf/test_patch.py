"""The patches in a running llama.cpp: the hook, the trace, the loader of interleaved experts."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
import time

import numpy as np
import pytest

from mbolt_gguf.build import Variant, binaries
from mbolt_gguf.compile import flags
from mbolt_gguf.llama_source import Pin, apply_patch, prepare
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.profile.traces import read_trace
from tests.gguf.llama import some_tokens
from tests.gguf.makers import make_gguf

TOKENS = some_tokens(40)
# What each patch needs applied before it.
NEEDS = {1: (), 2: (1,), 3: (1,), 4: ()}


@pytest.fixture(scope="module")
def stock_tree(llama, tmp_path_factory):
    """The unpatched tree, from the sdist that the binaries were built from."""
    folder = tmp_path_factory.mktemp("tree") / "src"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(llama.stock.parents[4]))
        prepare(Pin.read(), folder, source=None, patched=False, quiet=True)
    return folder


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interleaved")
    path = make_gguf(folder / "m.gguf", "qwen3moe", "Q8_0")
    return rewrite(path, None, folder / "i.gguf", layout="interleave", progress=False).paths[0]


def say(driver, model, *options, **environment):
    """What the driver writes to stderr while it evaluates a few tokens, and its status."""
    done = subprocess.run(
        [driver, "-m", model, "--prompt", "once upon", "-n", "2", *options],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stderr


def sources(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("series", [(1, 2, 3, 4), (1, 3), (1, 2), (4,), (1, 3, 4), (4, 1, 2, 3)])
def test_each_patch_applies_without_those_it_does_not_need(stock_tree, tmp_path, series):
    assert all(set(NEEDS[n]) <= set(series[: series.index(n)]) for n in series)
    patches = Pin.read().patches
    results = []
    for tool in ("patch", "git"):
        tree = tmp_path / tool
        shutil.copytree(stock_tree / "src", tree / "src")
        binary = shutil.which(tool)
        if binary is None:
            continue
        only = tmp_path / f"{tool}-only"
        only.mkdir()
        (only / tool).symlink_to(binary)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(only))
            for number in series:
                apply_patch(tree, patches[number - 1])
        results.append(sources(tree))
    assert results and all(result == results[0] for result in results)
    assert results[0] != {k: v for k, v in sources(stock_tree).items() if k.parts[0] == "src"}


def test_the_binaries_are_of_these_patches(llama):
    pin = Pin.read()
    assert llama.patched.parent.parent.name != llama.stock.parent.parent.name
    wanted = flags(pin.commit, metal=False, cuda=False, defines=())
    for patched in (True, False):
        variant = Variant.of(pin, wanted, patched=patched)
        assert len(variant.series) == 64 and variant.folder.parent.name == "llama"


@pytest.mark.parametrize("model", ["qwen3moe", "deepseek2", "gpt-oss", "deepseek2-fused"])
def test_a_trace_is_what_a_users_callback_sees(llama, tmp_path, model):
    path = make_gguf(tmp_path / "m.gguf", model, "Q8_0")
    trace, seen = tmp_path / "trace", tmp_path / "seen"
    tokens = tmp_path / "tokens"
    tokens.write_bytes(np.asarray(TOKENS, "<u4").tobytes())
    command = [llama.patched, "-m", path, "--tokens", tokens, "--decode", "8", "--experts", seen]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "MBOLT_TRACE": str(trace)}
    )
    assert trace.read_bytes() == seen.read_bytes()
    found = read_trace(trace)
    # In most models the prompt's last layer has only the rows that have an output.
    widths = [len(ids) for ids in found.passes[0].chosen.values()]
    assert widths[:-1] == [32] * (len(widths) - 1) and widths[-1] in (1, 32)
    assert len(found.passes) == 9 and all(
        len(ids) == 1 for one in found.passes[1:] for ids in one.chosen.values()
    )


def test_tracing_changes_no_logit(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3next", "Q8_0")
    plain = llama.run(path, TOKENS, routes=False)
    traced = llama.run(
        path, TOKENS, environment={**os.environ, "MBOLT_TRACE": str(tmp_path / "trace")}
    )
    assert np.array_equal(plain.logits.view("u4"), traced.logits.view("u4"))
    stock = llama.stock_run(path, TOKENS)
    assert np.array_equal(plain.logits.view("u4"), stock.logits.view("u4"))


def test_a_killed_process_leaves_a_trace_of_whole_records(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    trace, tokens = tmp_path / "trace", tmp_path / "tokens"
    tokens.write_bytes(np.asarray(some_tokens(60_000), "<u4").tobytes())
    child = subprocess.Popen(
        [llama.patched, "-m", path, "--tokens", tokens, "--decode", "59000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "MBOLT_TRACE": str(trace)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not trace.exists() or trace.stat().st_size < 40_000:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    child.wait()
    found = read_trace(trace)
    assert len(found.passes) > 2 and not [note for note in found.notes if "cut short" in note]


def test_a_trace_that_cannot_be_written_is_one_warning(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    status, said = say(llama.patched, path, MBOLT_TRACE=str(tmp_path / "no" / "where"))
    assert status == 0
    assert said.count("No such file or directory; the trace ends here") == 1


def test_interleaved_experts_are_refused_without_the_patch(llama, interleaved):
    with pytest.raises(UnsupportedError, match="'blk.0.ffn_.*_exps.weight' not found"):
        llama.stock_run(interleaved, TOKENS)


def test_interleaved_experts_are_one_copy_in_memory(llama, interleaved):
    """Neither views on a map nor the memory of --no-mmap hold an expert twice."""
    size = interleaved.stat().st_size / (1 << 20)
    for option in ("--verbose", "--no-mmap"):
        _, said = say(llama.patched, interleaved, "--verbose", option)
        sizes = [
            float(line.split("=")[1].split()[0])
            for line in said.splitlines()
            if "model buffer size" in line
        ]
        assert 0.9 * size < sum(sizes) <= 1.01 * size


def test_interleaved_experts_are_validated(llama, interleaved):
    assert say(llama.patched, interleaved, "--check-tensors")[0] == 0


BAD = {
    "mbolt.ilv.pieces": [(4, "neither 2 nor 3"), (2, "has 3 strings, not")],
    "mbolt.ilv.type": [(200, "type that is not known"), (4, "type that is not known")],
    "mbolt.ilv.ne0": [(33, "shape that its type"), (0, "shape that its type")],
    "mbolt.ilv.ne1": [(0, "shape that its type"), (1 << 31, "does not lie in its block")],
    "mbolt.ilv.offset": [(16, "multiple of 32"), (1 << 62, "does not lie in its block")],
}


@pytest.mark.parametrize(
    "key, number, said", [(key, *case) for key, cases in BAD.items() for case in cases]
)
def test_metadata_without_meaning_is_refused(llama, interleaved, tmp_path, key, number, said):
    value = Model.open(interleaved).values[key]
    data = bytearray(interleaved.read_bytes())
    width = 8 if key.endswith("offset") else 4
    # The first number of an array lies behind its count; a plain number is all that there is.
    size = 4 if key.endswith("pieces") else width * len(value.get())
    at = value.end - size
    data[at : at + width] = struct.pack("<Q" if width == 8 else "<I", number)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    status, text = say(llama.patched, path)
    assert status == 2 and said in text and "interleaved experts" in text


def test_pieces_that_overlap_are_refused(llama, interleaved, tmp_path):
    value = Model.open(interleaved).values["mbolt.ilv.offset"]
    offsets = value.get()
    data = bytearray(interleaved.read_bytes())
    data[value.end - 8 * len(offsets) : value.end] = struct.pack(
        f"<{len(offsets)}Q", *(0 for _ in offsets)
    )
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    status, text = say(llama.patched, path)
    assert status == 2 and "two pieces overlap" in text


@pytest.mark.parametrize("key", [*BAD, "mbolt.ilv.role", "mbolt.interleaved"])
def test_a_missing_key_is_named(llama, interleaved, tmp_path, key):
    data = interleaved.read_bytes()
    renamed = "x" + key[1:]
    assert data.count(key.encode()) == 1
    path = tmp_path / "bad.gguf"
    path.write_bytes(data.replace(key.encode(), renamed.encode()))
    status, text = say(llama.patched, path)
    assert status == 2 and key in text


def test_quantize_refuses_interleaved_experts(interleaved, tmp_path, user_cache):
    quantize = (binaries() or {}).get("llama-quantize")
    if quantize is None:
        pytest.skip("llama-quantize is not built")
    target = tmp_path / "q.gguf"
    done = subprocess.run([quantize, interleaved, target, "Q4_0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "interleaved; quantize the model that it was made of" in done.stdout + done.stderr
    assert not target.exists() or not target.stat().st_size


def test_layers_are_unlike(llama, tmp_path):
    """A dense first layer and an MTP layer that is not loaded, interleaved."""
    for model, split in itertools.product(("deepseek2", "glm4moe"), (0, 9)):
        path = make_gguf(tmp_path / "m.gguf", model, "Q8_0", split=split)
        out = tmp_path / f"i-{model}-{split}.gguf"
        done = rewrite(path, None, out, layout="interleave", progress=False).paths[0]
        a, b = llama.run(path, TOKENS), llama.run(done, TOKENS)
        assert np.array_equal(a.logits.view("u4"), b.logits.view("u4"))
