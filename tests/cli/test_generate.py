"""``mbolt-mlx generate`` beside ``mlx_lm generate``: the same options, the same stdout."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from mbolt_mlx.cli import generate, main
from mbolt_mlx.cli.stats_table import SpeedLaw, law_line, measure_drive
from mbolt_mlx.profile.law import Law

OURS = {
    *("resident", "memory_limit", "side_file", "no_side_file", "policy", "read_threads"),
    *("direct", "revision", "stats", "trace", "debug"),
}
stock = importlib.import_module("mlx_lm.generate")


def run_stock(monkeypatch, capsys, *argv):
    """Run mlx-lm's command in this process and return its stdout."""
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *map(str, argv)])
    stock.main()
    return capsys.readouterr().out


def run_ours(capsys, *argv):
    """Run our command in this process and return its stdout."""
    status = main.main(["generate", *map(str, argv)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def without_figures(text):
    return re.sub(r"\d+\.\d+", "N", text)


# Options


def parsers():
    ours = main.Parser(prog="x")
    generate.configure(ours)
    return stock.setup_arg_parser(), ours


def test_every_option_of_mlx_lm_is_there_unchanged():
    theirs, ours = parsers()
    mine = {action.dest: action for action in ours._actions}
    for action in theirs._actions:
        same = mine.pop(action.dest)
        for attribute in ("option_strings", "nargs", "const", "default", "type", "choices"):
            assert getattr(same, attribute) == getattr(action, attribute), action.dest
        assert type(same) is type(action)
    assert set(mine) | {"debug"} == OURS


def test_an_abbreviation_still_means_what_it_means_in_mlx_lm():
    theirs, ours = parsers()
    for argv in (["--max-t", "7"], ["--kv-b", "8"], ["--prompt-c", "x"], ["-m", "3", "-p", "y"]):
        expected = vars(theirs.parse_args(argv))
        found = vars(ours.parse_args(argv))
        assert {key: found[key] for key in expected} == expected


def test_help_offers_no_other_model(capsys):
    assert main.main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Llama" not in out and "--resident" in out and "--max-tokens" in out


# The same output


@pytest.mark.ends
@pytest.mark.parametrize("resident", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    "folder", ["tiny_model", "tiny_model_q4", "tiny_model_sharded", "tiny_model_per_expert"]
)
def test_text_is_that_of_mlx_lm(request, monkeypatch, capsys, folder, resident):
    model = request.getfixturevalue(folder)
    capsys.readouterr()  # what making it has printed
    common = ("--model", model, "--prompt", "hello there", "--max-tokens", 40)
    expected = run_stock(monkeypatch, capsys, *common)
    found = run_ours(capsys, *common, "--resident", resident)
    assert without_figures(found) == without_figures(expected)
    assert "==========" in found and "tokens-per-sec" in found


@pytest.mark.ends
@pytest.mark.parametrize(
    "more",
    [
        ("--verbose", "False"),
        ("--temp", "0.8", "--top-p", "0.9", "--seed", "7"),
        ("--ignore-chat-template",),
        ("--system-prompt", "be brief", "--prefill-response", "Well"),
        ("--max-kv-size", "16"),
        ("--prefill-step-size", "3"),
        ("--extra-eos-token", "a", "b"),
        ("--prompt", r"two\nlines"),
        ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"),
    ],
)
def test_options_of_mlx_lm_do_the_same(monkeypatch, capsys, tiny_model, more):
    common = ("--model", tiny_model, "--prompt", "hello there", "--max-tokens", 20, *more)
    expected = run_stock(monkeypatch, capsys, *common)
    found = run_ours(capsys, *common, "--resident", "0.25")
    assert without_figures(found) == without_figures(expected)


def test_a_draft_model(monkeypatch, capsys, tiny_model, tiny_model_q4):
    common = ("--model", tiny_model, "--draft-model", tiny_model_q4, "--max-tokens", 20)
    expected = run_stock(monkeypatch, capsys, *common)
    found = run_ours(capsys, *common, "--resident", "0.25")
    assert without_figures(found) == without_figures(expected)


def test_a_prompt_cache_and_the_model_it_names(monkeypatch, capsys, tmp_path, tiny_model):
    cache = tmp_path / "cache.safetensors"
    maker = importlib.import_module("mlx_lm.cache_prompt")
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--model", str(tiny_model), "--prompt", "hi", "--prompt-cache-file", str(cache)],
    )
    maker.main()
    capsys.readouterr()
    common = ("--prompt-cache-file", cache, "--prompt", "more", "--max-tokens", 20)
    expected = run_stock(monkeypatch, capsys, *common)
    found = run_ours(capsys, *common, "--resident", "0.25")
    assert without_figures(found) == without_figures(expected)


def test_the_prompt_from_stdin_in_a_process_of_its_own(tiny_model):
    outputs = []
    for command, more in (("mlx_lm", ()), ("mbolt_mlx", ("--resident", "0.25", "--stats"))):
        done = subprocess.run(
            [
                *(sys.executable, "-m", command, "generate", "--model", str(tiny_model)),
                *("--prompt", "-", "--max-tokens", "20", "--verbose", "False", *more),
            ],
            input="hello\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] != ""
    assert "hit rate" in done.stderr


def test_ctrl_c_is_said_on_a_line_of_its_own():
    command = [sys.executable, "-m", "mbolt_mlx", "generate", "--model", "demo"]
    options = ["--prompt", "hello", "--max-tokens", "-1"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        begun = iter(process.stdout.readline, "")
        assert any(line.startswith("=====") for line in begun)
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == "mbolt-mlx: interrupted"


def test_our_loader_does_not_stay_in_mlx_lm(capsys, tiny_model):
    before = stock.load, stock.setup_arg_parser
    run_ours(capsys, "--model", tiny_model, "--max-tokens", 2)
    assert (stock.load, stock.setup_arg_parser) == before


def test_fewer_slots_than_top_k_are_raised_to_top_k_and_said(capsys, tiny_model):
    argv = ["--model", str(tiny_model), "--resident", "0.01", "--max-tokens", "2"]
    assert main.main(["generate", *argv]) == 0
    assert "top-k" in capsys.readouterr().err


# Errors


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "no model is given"),
        (["--model", "./nowhere"], "no such folder"),
        (["--model", "some/repo"], "HF_HUB_OFFLINE is set"),
        (["--model", "qwen3-235b"], "mlx-community/Qwen3-235B-A22B-4bit"),
        (["--model", "MODEL", "--prompt-cache-file", "/no/file"], "/no/file"),
        (["--model", "MODEL", "--chat-template-config", "{"], "--chat-template-config"),
        (["--model", "MODEL", "--chat-template-config", "3"], "--chat-template-config"),
        (["--model", "MODEL", "--draft-model", "./nowhere"], "./nowhere: no such folder"),
        (["--model", "MODEL", "--side-file", "/no/file"], "/no/file"),
        (["--model", "MODEL", "--adapter-path", "/no/folder"], "/no/folder"),
        (["--model", "MODEL", "--policy", "oracle"], "--policy"),
        (["--model", "MODEL", "--resident", "20%"], "write 0.2"),
        (["--model", "MODEL", "--image", "x.png"], "does not take images"),
    ],
)
def test_errors_are_one_line(capsys, tiny_model, argv, says):
    if "--image" in argv and not hasattr(stock, "load_processor"):
        pytest.skip("this mlx-lm takes no images")
    argv = [str(tiny_model) if a == "MODEL" else a for a in argv]
    assert main.main(["generate", *argv, "--max-tokens", "2"]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("mbolt-mlx: error: ") and says in last
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "option, value",
    [
        ("--max-tokens", "0"),
        ("--max-tokens", "-2"),
        ("--prefill-step-size", "0"),
        ("--prefill-step-size", "-1"),
        ("--max-kv-size", "0"),
        ("--temp", "nan"),
        ("--temp", "-1"),
        ("--top-p", "1.5"),
        ("--min-p", "-0.1"),
        ("--seed", "-1"),
        ("--seed", "9" * 20),
        ("--kv-bits", "0"),
        ("--kv-group-size", "0"),
        ("--num-draft-tokens", "0"),
    ],
)
def test_numbers_without_meaning_are_refused_before_anything_is_loaded(capsys, option, value):
    assert main.main(["generate", "--model", "./nowhere", f"{option}={value}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mbolt-mlx: error: {option} ") and err.count("\n") == 1


@pytest.mark.parametrize("data", [b"", b"hello, this is no cache", b"\x02" + bytes(7) + b"{}"])
def test_a_file_that_is_no_prompt_cache(capsys, tmp_path, tiny_model, data):
    (tmp_path / "cache").write_bytes(data)
    argv = ["--model", str(tiny_model), "--prompt-cache-file", str(tmp_path / "cache")]
    assert main.main(["generate", *argv]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / "cache") in err and err.count("\n") == 1 and "unexpected" not in err


def test_a_dense_model_is_refused(capsys, tmp_path, tiny_model):
    config = json.loads((tiny_model / "config.json").read_text())
    for file in tiny_model.iterdir():
        os.symlink(file, tmp_path / file.name)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    assert main.main(["generate", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --stats


def test_a_model_without_a_tokenizer(capsys, tmp_path, tiny_model):
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    for path in [*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("*.txt")]:
        path.unlink()
    assert main.main(["generate", "--model", str(folder), "--prompt", "hello", "-m", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"{folder}: the model has no tokenizer" in lines[-1]


def test_stats_are_printed_to_stderr_only(capsys, tiny_model):
    argv = ["--model", str(tiny_model), "--resident", "0.25", "--max-tokens", "20"]
    assert main.main(["generate", *argv, "--stats"]) == 0
    captured = capsys.readouterr()
    rows = ("prefill", "tok/s", "hit rate", "misses", "reads a token", "bytes a token")
    rows += ("waiting for reads", "waiting for readback", "evictions", "peak memory", "speed law")
    for row in rows:
        assert row in captured.err and row not in captured.out.lower().replace("peak memory", "")
    assert re.search(r"s = 0\.\d\d of decode.*g = \d+\.\d\d", captured.err)


def test_a_trace_is_written_and_changes_no_word(capsys, tiny_model, tmp_path):
    from mbolt_mlx.profile.traces import read_trace

    argv = ("--model", tiny_model, "--prompt", "hello", "--max-tokens", 6, "--resident", 0.5)
    plain = run_ours(capsys, *argv)
    path = tmp_path / "t.trace"
    assert without_figures(run_ours(capsys, *argv, "--trace", path)) == without_figures(plain)
    trace = read_trace(path)
    assert list(trace.layers) == [0, 1] and trace.tokens("decode") >= 5
    assert trace.tokens("prefill") > 1 and trace.model == str(tiny_model)
    assert main.main(["generate", *map(str, argv), "--trace", str(tmp_path)]) == 2
    assert "a folder is there" in capsys.readouterr().err


def test_stats_without_a_miss_have_no_speed_law(capsys, tiny_model):
    argv = ["--model", str(tiny_model), "--resident", "1", "--max-tokens", "5", "--stats"]
    assert main.main(["generate", *argv]) == 0
    err = capsys.readouterr().err
    assert "100.0%" in err and "speed law" not in err


@pytest.mark.parametrize(
    "before, after, megabytes, gain", [(9, 1, 0.3, 6.33), (9, 1, 10.6, 1.43), (9, 3, 1.0, 2.29)]
)
def test_the_speed_law(before, after, megabytes, gain):
    drive = Law(t_op=100e-6, bandwidth=6e9)
    law = SpeedLaw(0.5, before, after, int(megabytes * 1e6), drive, has_side_file=True)
    assert law.gain == pytest.approx(gain, abs=0.005)
    assert f"g = {gain:.2f}" in law_line(law)
    with_shards = law_line(SpeedLaw(0.5, before, after, 10**6, drive, has_side_file=False))
    assert "a side-file would" in with_shards


def test_a_drive_that_cannot_be_measured_is_said(tmp_path):
    law = SpeedLaw(0.5, 9, 1, 10**6, None, True)
    assert law.gain is None and "g is not known" in law_line(law)
    small = tmp_path / "small"
    small.write_bytes(b"x")
    with pytest.raises(OSError):
        measure_drive(small, direct=False)


def test_a_drive_is_measured(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    drive = measure_drive(file, direct=False)
    assert drive.t_op > 0 and drive.bandwidth > 0
