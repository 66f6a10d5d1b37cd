"""What `run` and `serve` start, and with what."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mbolt_gguf import launch
from mbolt_gguf.blocks import SLICES, WHOLE
from mbolt_gguf.build import binaries
from mbolt_gguf.cli.main import main
from mbolt_gguf.launch import SPIN, Prefetch, prepare
from mbolt_gguf.model import Model
from mbolt_gguf.prefetch_map import is_stale, make_map, map_path, read_map
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import OutputError
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.traces import read_trace
from tests.gguf.makers import make_gguf

OURS = ("--no-repack", "--cpu-moe", "--load-mode", "mmap", "--no-warmup")
# A cache of the tests' own has no binaries.
NO_BINARY = "llama-cli is not built; run `mbolt-gguf build-llama`"


@pytest.fixture
def model(tmp_path):
    return make_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")


@pytest.fixture
def any_binary(monkeypatch, tmp_path):
    """A program that says how it was started."""
    place = tmp_path / "bin" / "llama-cli"
    place.parent.mkdir()
    place.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    place.chmod(0o755)
    monkeypatch.setattr(launch, "binary", lambda name: place)
    return place


def test_streaming_flags_and_the_map(model, any_binary):
    found = prepare("llama-cli", model, ["-p", "hi"])
    assert found.arguments == (str(any_binary), "-m", str(model), *OURS, "-p", "hi")
    place = map_path(Model.open(model))
    assert found.environment["MBOLT_PREFETCH"] == str(place)
    assert found.environment["MBOLT_PREFETCH_MODE"] == "read"
    assert "MBOLT_TRACE" not in found.environment
    assert read_map(place.read_bytes()).records


@pytest.mark.parametrize(
    "flags, ours",
    [
        (["--repack"], OURS[1:]),
        (["-nr"], OURS[1:]),
        (["-ot", "exps=CPU"], (OURS[0], *OURS[2:])),
        (["--n-cpu-moe", "3"], (OURS[0], *OURS[2:])),
        (["-lm", "none", "--warmup"], OURS[:2]),
        (["--load-mode=none"], (*OURS[:2], OURS[4])),
    ],
)
def test_a_flag_of_the_user_takes_the_place_of_ours(model, any_binary, flags, ours):
    assert prepare("llama-cli", model, flags).arguments[3:] == (*ours, *flags)


def test_interleaved_experts_are_not_copied_to_a_gpu(model, any_binary, tmp_path):
    done = rewrite(model, None, tmp_path / "i.gguf", layout="interleave", progress=False).paths[0]
    assert prepare("llama-cli", done).arguments[3:] == (*OURS, "--no-op-offload")
    given = prepare("llama-cli", done, ["--op-offload"]).arguments[3:]
    assert given == (*OURS, "--op-offload")


def test_a_stale_map_is_made_again(model, any_binary):
    place = map_path(Model.open(model))
    prepare("llama-cli", model)
    before = place.read_bytes()
    place.write_bytes(b"damaged")
    prepare("llama-cli", model)
    assert place.read_bytes() == before and not is_stale(Model.open(model))


def test_how_blocks_are_read(model, any_binary, tmp_path):
    done = rewrite(model, None, tmp_path / "i.gguf", layout="interleave", progress=False).paths[0]
    opened = Model.open(done)
    whole, slices = make_map(opened), make_map(opened, blocks=SLICES)
    cheap, costly = Law(1e-9, 1e9), Law(1.0, 1e9)
    for prefetch, expected in [
        (Prefetch(), whole),
        (Prefetch(blocks=SLICES), slices),
        (Prefetch(), slices),  # a map that is there stays
        (Prefetch("willneed"), slices),
        (Prefetch("willneed", law=costly), whole),
        (Prefetch("willneed", law=cheap), slices),
        (Prefetch("read", law=cheap), whole),  # who waits for all reads computes nothing meanwhile
        (Prefetch("willneed", blocks=SLICES, law=costly), slices),
        (Prefetch(blocks=WHOLE), whole),
    ]:
        prepare("llama-cli", done, prefetch=prefetch)
        assert map_path(opened).read_bytes() == expected


def test_without_prefetch_no_map_is_made(model, any_binary):
    found = prepare("llama-cli", model, prefetch=None)
    assert "MBOLT_PREFETCH" not in found.environment
    assert not map_path(Model.open(model)).exists()


def test_a_trace_is_never_written_over_another_file(model, any_binary, tmp_path):
    before = model.read_bytes()
    with pytest.raises(OutputError, match="it is not a trace"):
        prepare("llama-cli", model, trace=model)
    with pytest.raises(OutputError, match="no such folder"):
        prepare("llama-cli", model, trace=tmp_path / "absent" / "t")
    (tmp_path / "t").write_bytes(b"MBLT\x01")
    prepare("llama-cli", model, trace=tmp_path / "t")
    assert model.read_bytes() == before


def test_a_damaged_map_of_ours_is_written_anew(model, any_binary):
    place = map_path(Model.open(model))
    prepare("llama-cli", model)
    whole = place.read_bytes()
    place.write_bytes(bytes(len(whole)))
    prepare("llama-cli", model)
    assert place.read_bytes() == whole


def test_settings_reach_the_environment(model, any_binary, tmp_path):
    chosen = Prefetch("willneed", 7, "none", stats=True)
    found = prepare("llama-cli", model, prefetch=chosen, trace=tmp_path / "t").environment
    assert [found[f"MBOLT_PREFETCH_{n}"] for n in ("MODE", "THREADS", "ADVICE", "STATS")] == [
        "willneed", "7", "none", "1",
    ]  # fmt: skip
    assert found["MBOLT_TRACE"] == str(tmp_path / "t")


def test_waiting_threads_leave_the_core_unless_the_user_says_how(model, any_binary, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert prepare("llama-cli", model).environment.items() >= SPIN.items()
    assert "GOMP_SPINCOUNT" not in prepare("llama-cli", model, prefetch=None).environment
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in prepare("llama-cli", model).environment
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert prepare("llama-cli", model).environment["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize("separator", [["--"], []])
def test_the_command_becomes_the_program(model, any_binary, capfd, tmp_path, separator):
    child = os.fork()
    if child == 0:
        options = ["--prefetch-mode", "willneed", "--trace", str(tmp_path / "t")]
        os._exit(main(["run", *options, str(model), *separator, "-p", "a b", "-n", "3"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arguments, environment = json.loads(capfd.readouterr().out)
    assert arguments == ["-m", str(model), *OURS, "-p", "a b", "-n", "3"]
    assert environment["MBOLT_PREFETCH_MODE"] == "willneed"
    assert environment["MBOLT_TRACE"] == str(tmp_path / "t")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "MODEL"], NO_BINARY),
        (["run", "MODEL", "-p", "x"], NO_BINARY),
        (["run", "/nope.gguf"], "/nope.gguf: cannot open"),
        (["run", "/nope.gguf", "--", "-p", "x"], "/nope.gguf: cannot open"),
        (["run", "--trace", "MODEL", "MODEL"], "it is not a trace"),
        (["run", "MODEL", "--stats"], "--stats is not a flag of llama-cli; it comes before"),
        (["serve", "--prefetch-threads", "0", "MODEL"], "a number from 1 to 64; found 0"),
        (["serve", "--prefetch-mode", "x", "MODEL"], "invalid choice"),
        (["run", "--prefetch-blocks", "x", "MODEL"], "invalid choice"),
        (["run", "--drive", "/no/such/probe", "MODEL"], "/no/such/probe: cannot open"),
        (["run"], "MODEL"),
    ],
)
def test_nonsense_is_one_line(model, capsys, arguments, said):
    assert main([str(model) if word == "MODEL" else word for word in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_a_file_that_is_no_model_is_named(any_binary, tmp_path, capsys):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"nothing of the kind")
    assert main(["run", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="programs of Linux")
def test_a_program_that_is_not_of_llama_cpp(model, capsys):
    assert main(["run", "--llama-cli", "/bin/true", str(model)]) == 2
    err = capsys.readouterr().err
    assert "/bin/true: it is not linked to llama.cpp's shared libraries" in err


def test_llama_cli_runs(model, user_cache, tmp_path):
    """The real program, when it is built: it writes text, and a trace of what it chose."""
    if "llama-cli" not in (binaries() or {}):
        pytest.skip("llama-cli is not built")
    trace = tmp_path / "trace"
    command = [sys.executable, "-m", "mbolt_gguf.cli.main", "run", "--stats", "--trace", trace]
    flags = ["-p", "once upon", "-n", "8", "-st", "--seed", "1", "-t", "2"]
    done = subprocess.run(
        [*command, model, "--", *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "expert prefetch: " in done.stderr and "is off" not in done.stderr
    assert len(read_trace(trace).passes) >= 8
