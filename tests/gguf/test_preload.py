"""Trace and prefetch over an unmodified libllama: the same as the patches give."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mbolt_gguf.build import PRELOAD
from mbolt_gguf.cli.main import main
from mbolt_gguf.elf import needed_libraries
from mbolt_gguf.evaluate import evaluate
from mbolt_gguf.launch import Prefetch, prepare
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import write_map
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import MboltError, ReadError, UnsupportedError
from tests.gguf.llama import Way, some_tokens
from tests.gguf.makers import make_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is of Linux")

TOKENS = some_tokens(40)
SHELL = Path(shutil.which("sh")).resolve()
WAY = Way(batch=16, decode=16)
TOTALS = re.compile(
    r"expert prefetch: (\d+) layers, wanted (\d+) reads of (\d+) bytes, "
    r"issued (\d+) of (\d+), (\d+) errors"
)


def environment(llama, **more):
    """What makes the unmodified library trace or prefetch."""
    return {**os.environ, "LD_PRELOAD": str(llama.preload), **more}


def drive(driver, model, *options, tokens=TOKENS, folder, env):
    """What the driver wrote to stderr."""
    place = folder / "tokens"
    place.write_bytes(np.asarray(tokens, "<u4").tobytes())
    command = [driver, "-m", model, "--tokens", place, *WAY.options(), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "model, split",
    [("qwen3moe", 0), ("gpt-oss", 9), ("deepseek2", 0), ("deepseek2-fused", 0), ("glm4moe", 9),
     ("qwen3next", 0)],
)  # fmt: skip
def test_trace_and_totals_are_those_of_the_patches(llama, tmp_path, model, split):
    path = make_gguf(tmp_path / "m.gguf", model, "Q8_0", split=split)
    variables = {
        "MBOLT_PREFETCH": str(write_map(Model.open(path), tmp_path / "map")),
        "MBOLT_PREFETCH_STATS": "1",
    }
    traces, totals = [], []
    for driver, env in [
        (llama.patched, {**os.environ, **variables}),
        (llama.stock, environment(llama, **variables)),
    ]:
        trace = tmp_path / f"{driver.name}.trace"
        said = drive(driver, path, folder=tmp_path, env={**env, "MBOLT_TRACE": str(trace)})
        traces.append(trace.read_bytes())
        totals.append(TOTALS.search(said).groups())
    assert traces[0] == traces[1]
    # Layers, reads and bytes that were wanted, and errors; what was read depends on the page cache.
    assert totals[0][:3] == totals[1][:3] and int(totals[0][1]) > 0
    assert totals[0][5] == totals[1][5] == "0"


def test_a_users_callback_goes_on_as_if_it_were_alone(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    place = write_map(Model.open(path), tmp_path / "map")
    files = {}
    for name, env in [
        ("alone", os.environ),
        ("ours", environment(llama, MBOLT_TRACE=str(tmp_path / "t"), MBOLT_PREFETCH=str(place))),
    ]:
        seen, scores = tmp_path / f"{name}.seen", tmp_path / f"{name}.scores"
        drive(llama.stock, path, "--experts", seen, "--scores", scores, folder=tmp_path, env=env)
        files[name] = seen.read_bytes(), scores.read_bytes()
    assert files["alone"] == files["ours"]
    assert files["ours"][0] == (tmp_path / "t").read_bytes()


@pytest.mark.parametrize("mode", ["read", "willneed"])
def test_no_logit_changes(llama, tmp_path, mode):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    place = write_map(Model.open(path), tmp_path / "map")
    more = {"MBOLT_PREFETCH": str(place), "MBOLT_PREFETCH_MODE": mode}
    alone, ours = (
        evaluate(path, TOKENS, WAY, driver=llama.stock, routes=False, environment=env).logits
        for env in (os.environ, environment(llama, **more, MBOLT_TRACE=str(tmp_path / "t")))
    )
    assert np.array_equal(alone.view("u4"), ours.view("u4"))
    assert (tmp_path / "t").stat().st_size > 100


def test_what_is_not_in_memory_is_read(llama, tmp_path):
    """Loading has read the model, so the map names a copy of it, which is not in memory."""
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0", experts=32, ff_exp=512)
    copy = tmp_path / "c.gguf"
    shutil.copy(path, copy)
    place = write_map(Model.open(copy), tmp_path / "map")
    env = environment(llama, MBOLT_PREFETCH=str(place), MBOLT_PREFETCH_STATS="1")
    fd = os.open(copy, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    cold = TOTALS.search(drive(llama.stock, path, folder=tmp_path, env=env)).groups()
    copy.read_bytes()
    warm = TOTALS.search(drive(llama.stock, path, folder=tmp_path, env=env)).groups()
    assert int(cold[3]) > 10 and int(cold[4]) > 0
    assert warm[3:5] == ("0", "0") and warm[:3] == cold[:3]


def test_without_variables_or_in_another_program_nothing_is_done(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    alone = drive(llama.stock, path, folder=tmp_path, env=os.environ)
    assert drive(llama.stock, path, folder=tmp_path, env=environment(llama)) == alone
    done = subprocess.run(
        ["sh", "-c", "echo fine"], capture_output=True, text=True,
        env=environment(llama, MBOLT_TRACE=str(tmp_path / "t")),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("fine\n", "") and not (tmp_path / "t").exists()


def test_a_map_that_does_not_fit_turns_prefetch_off(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    other = make_gguf(tmp_path / "o.gguf", "qwen3moe", "Q8_0", seed=1)
    place, trace = write_map(Model.open(path), tmp_path / "map"), tmp_path / "t"
    env = environment(llama, MBOLT_PREFETCH=str(place), MBOLT_TRACE=str(trace))
    for model, options, why in [
        (other, [], "the map is of another model"),
        (path, ["--no-mmap"], "not used in the memory map"),
    ]:
        said = drive(llama.stock, model, *options, folder=tmp_path, env=env)
        assert said.count("expert prefetch is off") == 1 and why in said
        assert trace.stat().st_size > 100


def random_parts(llama, path, folder, **more):
    """Bytes of the model's memory map without readahead, while it is used."""
    trace, place = folder / "t", folder / "tokens"
    trace.unlink(missing_ok=True)
    place.write_bytes(np.asarray(some_tokens(60_000), "<u4").tobytes())
    child = subprocess.Popen(
        [llama.stock, "-m", path, "--tokens", place, "--decode", "59000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment(llama, MBOLT_TRACE=str(trace), **more),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not trace.exists() or trace.stat().st_size < 2000:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        with open(f"/proc/{child.pid}/smaps") as file:
            parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
    finally:
        child.kill()
        child.wait()
    found = 0
    for part in parts:
        # The library's own map of the file, by which it asks what is in memory, has no such flag.
        if str(path) in part and " rr " in part:
            begin, end = part.split(None, 1)[0].split("-")
            found += int(end, 16) - int(begin, 16)
    return found


def test_readahead_ends_in_the_experts_where_they_are_prefetched(llama, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0", experts=32, ff_exp=512)
    opened = Model.open(path)
    map_file = str(write_map(opened, tmp_path / "map", version=3))
    experts = [t for t in opened.tensors.values() if "_exps." in t.name]
    whole = sum(t.nbytes for t in experts)
    found = random_parts(llama, path, tmp_path, MBOLT_PREFETCH=map_file)
    assert whole - 2 * 4096 * len(experts) < found <= whole
    none = {"MBOLT_PREFETCH_ADVICE": "none"}
    assert random_parts(llama, path, tmp_path, MBOLT_PREFETCH=map_file, **none) == 0
    os.utime(path, ns=(0, 12345))
    assert random_parts(llama, path, tmp_path, MBOLT_PREFETCH=map_file) == 0


OTHER_GGML = """
#include <stdbool.h>
#include <stddef.h>
struct tensor { char name[64]; long more[90]; } node = { "node", { 1 } };
void ggml_backend_sched_set_eval_callback(void) {}
bool ggml_backend_sched_alloc_graph(void * s, void * g) { (void) s; (void) g; return true; }
void ggml_backend_sched_free(void * s) { (void) s; }
int ggml_graph_n_nodes(void * g) { (void) g; return 1; }
void * ggml_graph_node(void * g, int i) { (void) g; (void) i; return &node; }
size_t ggml_tensor_overhead(void) { return 32 + sizeof(struct tensor); }
const char * ggml_get_name(void * t) { return ((struct tensor *) t)->name; }
void * ggml_get_data(void * t) { return ((struct tensor *) t)->more; }
"""
ITS_PROGRAM = """
#include <stdbool.h>
#include <stdio.h>
bool ggml_backend_sched_alloc_graph(void * s, void * g);
void ggml_backend_sched_free(void * s);
int main(void) {
    int s, g;
    bool fine = ggml_backend_sched_alloc_graph(&s, &g) && ggml_backend_sched_alloc_graph(&s, &g);
    ggml_backend_sched_free(&s);
    return puts(fine ? "computed" : "failed") < 0;
}
"""


def test_with_another_ggml_it_says_so_once_and_stays_out_of_the_way(llama, tmp_path):
    """A ggml of another layout: compiled here, for there is none."""
    (tmp_path / "ggml.c").write_text(OTHER_GGML)
    (tmp_path / "main.c").write_text(ITS_PROGRAM)
    library, program = tmp_path / "libggml-base.so", tmp_path / "main"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "ggml.c", "-o", library], cwd=tmp_path, check=True
    )
    link = [f"-L{tmp_path}", "-lggml-base", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([compiler, "main.c", "-o", program, *link], cwd=tmp_path, check=True)
    for variables, times in [({"MBOLT_TRACE": str(tmp_path / "t")}, 1), ({}, 0)]:
        done = subprocess.run(
            [program], capture_output=True, text=True, env=environment(llama, **variables)
        )
        assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr
        assert done.stderr.count("mbolt-preload is off: the program's ggml") == times
        assert len(done.stderr.splitlines()) == times
    assert not (tmp_path / "t").exists()


def test_the_unmodified_driver_finds_its_libraries_beside_it(llama, tmp_path):
    folder = tmp_path / "bin"
    shutil.copytree(llama.stock.parent, folder)
    names = {"libllama.so.0", "libggml-base.so.0"}
    assert names <= set(needed_libraries(folder / llama.stock.name)) | {
        name for lib in folder.glob("lib*.so*") for name in needed_libraries(lib)
    }
    done = subprocess.run(
        [folder / llama.stock.name], capture_output=True, text=True, check=True,
        env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"},
    )  # fmt: skip
    places = [x.split()[2] for x in done.stdout.splitlines() if re.match(r"\s*lib(llama|ggml)", x)]
    assert len(places) >= 3 and all(place.startswith(str(folder)) for place in places)


def test_ones_own_program_is_started_with_it(llama, user_cache, tmp_path, monkeypatch):
    path, trace = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0"), tmp_path / "t"
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    chosen = Prefetch("willneed", stats=True)
    found = prepare("llama-cli", path, ["-n", "2"], prefetch=chosen, trace=trace, own=llama.stock)
    ours = ("--no-repack", "--cpu-moe", "--no-warmup")
    assert found.arguments == (str(llama.stock), "-m", str(path), *ours, "-n", "2")
    assert found.environment["LD_PRELOAD"].split(":")[1:] == ["libm.so.6"]
    said = drive(found.program, path, folder=tmp_path, env=found.environment)
    assert int(TOTALS.search(said)[2]) > 0 and trace.stat().st_size > 100


def test_what_cannot_be_helped_is_refused_in_one_line(llama, user_cache, tmp_path, capsys):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    block = rewrite(path, None, tmp_path / "i.gguf", layout="interleave", progress=False).paths[0]
    script = tmp_path / "llama-cli"
    script.write_text("#!/bin/sh\n")
    for command, model, own, said in [
        ("run", path, llama.patched, "it is not linked to llama.cpp's shared libraries"),
        ("run", path, "/bin/true", "it is not linked to llama.cpp's shared libraries"),
        ("serve", block, llama.stock, "cannot load interleaved experts"),
        ("run", path, script, "not a program"),
        ("serve", path, tmp_path / "none", "none: "),
    ]:
        option = {"run": "--llama-cli", "serve": "--llama-server"}[command]
        assert main([command, option, str(own), str(model)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and said in lines[0]


def test_other_systems_are_refused(llama, tmp_path, monkeypatch):
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="on Linux only"):
        prepare("llama-cli", path, own=llama.stock)


def test_it_must_have_been_built(llama, tmp_path):
    """The cache of this test is empty."""
    path = make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    with pytest.raises(MboltError, match=f"{PRELOAD} is not built"):
        prepare("llama-cli", path, own=llama.stock)


def test_a_damaged_program_is_named(tmp_path):
    assert any(name.startswith("libc.") for name in needed_libraries(SHELL))
    data = SHELL.read_bytes()
    path = tmp_path / "p"
    for size in (6, 40, 100, len(data) // 2):
        path.write_bytes(data[:size])
        with pytest.raises(UnsupportedError, match="a damaged program") as error:
            needed_libraries(path)
        assert error.value.path == str(path)
    path.write_bytes(b"")
    with pytest.raises(UnsupportedError, match="not a program"):
        needed_libraries(path)
    with pytest.raises(ReadError):
        needed_libraries(tmp_path / "none")
