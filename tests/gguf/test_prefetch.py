"""The prefetcher in a running llama.cpp: what it reads, and when it stays out of the way."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import time

import numpy as np
import pytest

from mbolt_gguf.blocks import BLOCKS, WHOLE
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import make_map, read_map, write_map
from mbolt_gguf.rewrite import rewrite
from tests.gguf.llama import Way, some_tokens
from tests.gguf.makers import make_gguf

TOKENS = some_tokens(40)
WAY = Way(batch=16, decode=16)
PAGE = 4096


def run(llama, path, tokens=TOKENS, *, mode="read", **environment):
    more = {f"MBOLT_PREFETCH{name}": str(value) for name, value in environment.items()}
    env = {**os.environ, **more, "MBOLT_PREFETCH_MODE": mode}
    return llama.run(path, tokens, WAY, environment=env)


def evict(model):
    """Drop the files of ``model`` from the page cache."""
    for file in model.files:
        fd = os.open(file.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def totals(report, name):
    return sum(report[p]["prefetch"][name] for p in ("prefill", "warmup", "decode"))


def expected(prefetch_map, trace):
    """Reads and bytes of the distinct experts of each choice, neighbours merged."""
    reads = nbytes = 0
    for one in trace.passes:
        for layer, ids in one.chosen.items():
            ranges = sorted(
                (r.file, r.base + e * r.stride, r.base + e * r.stride + r.nbytes)
                for r in prefetch_map.records
                if r.layer == layer
                for e in np.unique(ids).tolist()
            )
            last = (-1, 0)
            for file, begin, end in ranges:
                if file == last[0] and begin < last[1] + PAGE:
                    nbytes += max(0, end - last[1])
                    last = (file, max(end, last[1]))
                else:
                    reads += 1
                    nbytes += end - begin
                    last = (file, end)
    return reads, nbytes


@pytest.mark.parametrize("layout", ["as it is", *BLOCKS])
@pytest.mark.parametrize(
    "model, split", [("qwen3moe", 0), ("gpt-oss", 9), ("deepseek2-fused", 0), ("glm4moe", 9)]
)
def test_the_distinct_chosen_experts_are_read_and_no_logit_changes(
    llama, tmp_path, model, split, layout
):
    path = make_gguf(tmp_path / "m.gguf", model, "Q8_0", split=split)
    blocks = WHOLE
    if layout in BLOCKS:
        target, blocks = tmp_path / "i.gguf", layout
        path = rewrite(path, None, target, layout="interleave", progress=False).paths[0]
    opened = Model.open(path)
    place = write_map(opened, tmp_path / "map", blocks=blocks)
    plain = llama.run(path, TOKENS, WAY)
    for mode in ("read", "willneed"):
        evict(opened)
        found = run(llama, path, mode=mode, **{"": place})
        assert np.array_equal(plain.logits.view("u4"), found.logits.view("u4"))
        wanted = totals(found.report, "wanted_reads"), totals(found.report, "wanted_bytes")
        assert wanted == expected(read_map(make_map(opened, blocks=blocks)), found.trace)
        assert totals(found.report, "errors") == 0
        # What the page cache has is not read again.
        assert totals(found.report, "reads") <= wanted[0]
        assert totals(found.report, "bytes") <= wanted[1]


def test_an_evicted_file_is_read_and_a_cached_one_is_not(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0", experts=32, ff_exp=512)
    opened = Model.open(path)
    place = write_map(opened, tmp_path / "map")
    evict(opened)
    cold = run(llama, path, **{"": place})
    assert totals(cold.report, "reads") > 10
    assert cold.report["decode"]["majflt"] < 20
    path.read_bytes()
    warm = run(llama, path, **{"": place})
    assert totals(warm.report, "reads") == 0
    assert totals(warm.report, "wanted_reads") == totals(cold.report, "wanted_reads")


def test_loading_leaves_the_experts_where_they_are(llama, tmp_path):
    """Unless the map does not fit: then the model is loaded as ever."""
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0", experts=32, ff_exp=512)
    opened = Model.open(path)
    place = write_map(opened, tmp_path / "map", version=3)

    def loaded(**environment):
        evict(opened)
        return run(llama, path, **environment).report["load"]["read_bytes"]

    stock = loaded()
    if not stock:
        pytest.skip("this file system does not count reads")
    assert loaded(**{"": place}) < stock / 4
    assert loaded(**{"": place}, _ADVICE="none") > 0.9 * stock
    os.utime(path, ns=(0, 12345))
    assert loaded(**{"": place}) > 0.9 * stock


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_of_the_map_are_read(llama, tmp_path, version):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    place = write_map(Model.open(path), tmp_path / "map", version=version)
    assert totals(run(llama, path, **{"": place}).report, "wanted_reads") > 0


def off(llama, path, place, *options, **environment):
    """Run the driver; the one line that says why prefetch is off."""
    env = {**os.environ, "MBOLT_PREFETCH": str(place), **environment}
    done = subprocess.run(
        [llama.patched, "-m", path, "--prompt", "once upon", "-n", "2", *options],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "expert prefetch is off" in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_map_that_does_not_fit_turns_prefetch_off(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    other = make_gguf(tmp_path / "o.gguf", "qwen3moe", "Q8_0", seed=1)
    bigger = make_gguf(tmp_path / "b.gguf", "qwen3moe", "Q8_0", ff_exp=128)
    opened = Model.open(path)
    place = write_map(opened, tmp_path / "map", version=3)
    assert "the map is of another model" in off(llama, other, place)
    assert "the map is of another model" in off(llama, bigger, place)
    assert "not used in the memory map" in off(llama, path, place, "--no-mmap")
    assert "No such file" in off(llama, path, tmp_path / "none")
    os.utime(path, ns=(0, 12345))
    assert "has changed since the map was made" in off(llama, path, place)


def test_a_damaged_map_turns_prefetch_off(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    data = make_map(Model.open(path), version=2)
    place = tmp_path / "map"
    entries = len(data) - 24 * 9
    for damaged, said in [
        (b"", "cut short"),
        (b"GGUF" + data[4:], "not a prefetch map"),
        (data[:4] + struct.pack("<I", 9) + data[8:], "version 9 is not known"),
        (data[:-1], "cut short"),
        (data + b"\0", "bytes after its end"),
        (data[:24] + struct.pack("<I", 0xFFFFFFFF) + data[28:], "cut short"),
        (data[:entries] + struct.pack("<Q", 1 << 63) + data[entries + 8 :], "end after the end"),
        (data[:-8] + bytes(8), "record without meaning"),
        (data[:12] + struct.pack("<I", 0) + data[16:], "record without meaning"),
    ]:
        place.write_bytes(damaged)
        assert said in off(llama, path, place)


@pytest.mark.parametrize(
    "name, value", [("MODE", "sometimes"), ("THREADS", "0"), ("THREADS", "65"), ("THREADS", "x")]
)
def test_a_setting_without_meaning_turns_prefetch_off(llama, tmp_path, name, value):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    place = write_map(Model.open(path), tmp_path / "map")
    assert value in off(llama, path, place, **{f"MBOLT_PREFETCH_{name}": value})


def test_a_read_error_is_reported_once_and_left_to_the_memory_map(llama, tmp_path):
    """The map names a copy of the model, which is cut to nothing while the model runs."""
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    copy = tmp_path / "c.gguf"
    shutil.copy(path, copy)
    place = write_map(Model.open(copy), tmp_path / "map", version=2)
    tokens, trace = tmp_path / "tokens", tmp_path / "trace"
    tokens.write_bytes(np.asarray(some_tokens(3000), "<u4").tobytes())
    command = [llama.patched, "-m", path, "--tokens", tokens, "--decode", "2900"]
    env = {"MBOLT_PREFETCH": str(place), "MBOLT_TRACE": str(trace), "MBOLT_PREFETCH_STATS": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **env},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not trace.exists() or trace.stat().st_size < 2000:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.truncate(copy, 4096)
    _, said = child.communicate()
    assert child.returncode == 0, said
    assert said.count("the file ends there; what cannot be read ahead is left to") == 1
    assert int(re.search(r"(\d+) errors", said)[1]) > 1
