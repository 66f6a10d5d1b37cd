"""The command line around the commands: statuses, one-line errors, Ctrl-C, a closed pipe."""

import logging
import os
import signal
import subprocess
import sys
import time
import types

import pytest

import mbolt_mlx
from mbolt_mlx.cli import arguments, main
from mbolt_mlx.core.errors import UsageError, VerifyError


@pytest.fixture
def command(monkeypatch):
    """Install a command called ``do`` whose run is what the test assigns."""
    module = types.ModuleType("a_command")
    module.HELP = "do something"
    module.configure = lambda parser: parser.add_argument("--n", type=int, default=1)
    module.run = lambda args: args.n
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setitem(main.COMMANDS, "do", "a_command")
    return module


def failing(error):
    def run(args):
        raise error

    return run


def test_status_is_the_commands_own(command):
    assert main.main(["do"]) == 1
    assert main.main(["do", "--n", "0"]) == 0


def test_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mbolt-mlx {mbolt_mlx.__version__}\n"


def test_help_lists_every_command(capsys):
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in main.COMMANDS:
        assert f"\n  {name} " in out


def test_help_of_a_command(capsys, command):
    assert main.main(["do", "--help"]) == 0
    out = capsys.readouterr().out
    assert "mbolt-mlx do" in out and "Do something." in out and "--debug" in out


def test_no_command_is_wrong_usage(capsys):
    assert main.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "generate" in captured.err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["generat"], "did you mean generate?"),
        (["Bench"], "did you mean bench?"),
        (["zzz"], "one of generate, coalesce"),
        (["--nonsense"], "mbolt-mlx --help"),
        (["do", "--n", "x"], "mbolt-mlx do --help"),
        (["do", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["do", "--n", ""], "argument --n: it is empty"),
        (["inspect", ""], "argument model: it is empty"),
        (["generate", "--model", ""], "argument --model: it is empty"),
        (["inspect", "~no-such-user/m"], "no-such-user/m: no such folder"),
        (["inspect", "x" * 5000], "xxx: File name too long"),
        (["do", "more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_usage_is_one_line(capsys, command, argv, says):
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mbolt-mlx: error: ") and captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize(
    "error, status",
    [
        (UsageError("no", path="/a/b"), 2),
        (VerifyError("differs"), 1),
        (RuntimeError("two\nlines"), 2),
        (KeyError("x"), 2),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_debug_shows_more(capsys, command, error, status):
    command.run = failing(error)
    assert main.main(["do"]) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("mbolt-mlx: ") and "Traceback" not in err
    for argv in (["do", "--debug"], ["--debug", "do"]):
        assert main.main(argv) == status
        assert "Traceback" in capsys.readouterr().err


def test_warnings_of_the_library_look_like_its_errors(capsys, command):
    def run(args):
        log = logging.getLogger("mbolt_mlx.engine.x")
        log.warning("a\nb")
        log.info("c")
        log.debug("d")
        return 0

    command.run = run
    assert main.main(["do"]) == 0
    assert main.main(["do"]) == 0
    assert capsys.readouterr().err == "mbolt-mlx: warning: a b\nmbolt-mlx: c\n" * 2


def test_python_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "mbolt_mlx", "generat"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "did you mean generate" in done.stderr


def test_a_reader_that_goes_away_is_no_error():
    script = (
        "import sys\n"
        "from mbolt_mlx.cli import main\n"
        "class M:\n"
        "    HELP = 'x'\n"
        "    configure = staticmethod(lambda parser: None)\n"
        "    run = staticmethod(lambda args: [print('x' * 100) for _ in range(100_000)] and 0)\n"
        "sys.modules['m'] = M\n"
        "main.COMMANDS['m'] = 'm'\n"
        "sys.exit(main.main(['m']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def _shell(line, **env):
    """What a shell makes of ``line``, in which PROG is mbolt-mlx."""
    prog = f"{sys.executable} -m mbolt_mlx"
    return subprocess.run(
        ["sh", "-c", line.replace("PROG", prog)], capture_output=True, env={**os.environ, **env}
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
@pytest.mark.parametrize("command", ["models", "support --json"])
def test_a_full_drive_behind_stdout_is_one_line(command):
    done = _shell(f"PROG {command} >/dev/full")
    assert done.returncode == 2
    assert done.stderr == b"mbolt-mlx: error: cannot write to stdout: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
def test_a_full_drive_behind_stderr_leaves_the_status():
    assert _shell("PROG nothing 2>/dev/full").returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_nothing_else(closed, tiny_model, tmp_path):
    trace = tmp_path / "trace"
    generate = f"PROG generate --model {tiny_model} --resident 0.5 -m 2 -p hi --trace {trace}"
    done = _shell(f"{generate} {closed}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert trace.read_bytes()
    assert _shell(f"PROG nothing {closed}").returncode == 2


def test_what_the_encoding_lacks_is_a_question_mark(tiny_model):
    done = _shell(f"PROG inspect {tiny_model}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"") and b"32?64" in done.stdout
    assert _shell("PROG --help", PYTHONIOENCODING="ascii").returncode == 0


@pytest.mark.parametrize("phase, prompt", [("decode", "hello"), ("prefill", "hello " * 20_000)])
def test_ctrl_c_in_decode_and_in_prefill(tiny_model, phase, prompt):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mbolt_mlx", "generate", "--model", str(tiny_model)),
            *("--resident", "0.25", "--prompt", "-", "--max-tokens", "1000000"),
            *("--prefill-step-size", "256"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    process.stdin.write(prompt.encode())
    process.stdin.close()
    process.stdin = None
    # mlx-lm prints the line when it begins, the first of the text after the prompt.
    process.stdout.read(len("==========\n") + (phase == "decode"))
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "mbolt-mlx: interrupted"
    assert b"Traceback" not in err
    assert phase == "decode" or out == b""


# Shared options


def parse(*argv):
    parser = main.Parser(prog="x")
    arguments.add_engine_options(parser)
    return arguments.engine_options(parser.parse_args(argv))


def test_options_that_are_not_given_are_the_loaders_defaults():
    assert parse() == {
        "resident": None,
        "memory_limit": None,
        "side_file": "auto",
        "policy": "default",
        "read_threads": None,
        "direct": None,
    }


@pytest.mark.parametrize(
    "argv, key, value",
    [
        (["--resident", "0.2"], "resident", 0.2),
        (["--resident", "1"], "resident", 1.0),
        (["--resident", "1e-3"], "resident", 0.001),
        (["--memory-limit", "24GB"], "memory_limit", 24 * 10**9),
        (["--memory-limit", "4000MiB"], "memory_limit", 4000 * 2**20),
        (["--side-file", "/x"], "side_file", "/x"),
        (["--no-side-file"], "side_file", None),
        (["--policy", "lru"], "policy", "lru"),
        (["--read-threads", "8"], "read_threads", 8),
        (["--direct"], "direct", True),
        (["--no-direct"], "direct", False),
    ],
)
def test_options(argv, key, value):
    assert parse(*argv)[key] == value


@pytest.mark.parametrize(
    "argv",
    [
        *(["--resident", text] for text in ("0", "-1", "1.5", "nan", "inf", "-0.2", "20%", "all")),
        *(["--memory-limit", text] for text in ("0", "-1GB", "20%", "lots", "nan")),
        *(["--read-threads", text] for text in ("0", "-1", "257", "1.5", "many")),
        ["--resident", "0.2", "--memory-limit", "24GB"],
        ["--side-file", "/x", "--no-side-file"],
        ["--policy", "oracle"],
    ],
)
def test_options_that_have_no_meaning(argv):
    with pytest.raises(UsageError) as error:
        parse(*argv)
    text = str(error.value)
    assert argv[0].lstrip("-") in text and "\n" not in text


def test_percentages_are_understood_and_refused_with_the_fraction():
    for text in ("20%", "20 %", "20"):
        with pytest.raises(UsageError, match="write 0.2"):
            parse("--resident", text)


def test_models_lists_every_short_name(capsys):
    from mbolt_mlx.names import short_names

    assert main.main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in short_names())
    assert "demo" in out and "127.7 GB" in out
