import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbolt_mlx.cli import coalesce as command
from mbolt_mlx.cli.coalesce_rewrite import main as script
from mbolt_mlx.cli.main import main
from mbolt_mlx.core import files
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.locate import default_side_file
from mbolt_mlx.storage.manifest import manifest_path
from tests.makers import make_model
from tests.storage.made import model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "some-model", layers=2, experts=4)


def test_size_is_said_first_and_stdout_stays_empty(folder, tmp_path, capsys):
    assert main(["coalesce", "--model", str(folder), "-o", str(tmp_path / "s")]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "to write, 8 experts in 2 layers" in lines[0] and "free" in lines[0]
    assert "drive flushed" in lines[1] and "read back" in lines[2]
    assert main(["coalesce", "--model", str(folder), "-o", str(tmp_path / "s")]) == 0
    assert "already there" in capsys.readouterr().err


def test_without_an_output_it_goes_to_the_cache(folder, capsys):
    assert main(["coalesce", "--model", str(folder), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert default_side_file(Checkpoint.open(folder)).exists()


def test_manifest_names_the_folder_but_not_the_path(folder, tmp_path):
    assert script([str(folder), "-o", str(tmp_path / "s"), "-q"]) == 0
    found = json.loads(manifest_path(tmp_path / "s").read_text())
    assert found["source"]["name"] == "some-model"
    assert str(tmp_path) not in manifest_path(tmp_path / "s").read_text()
    assert found["tool"].startswith("mbolt-mlx ") and found["computed"] is None
    assert found["order"] == {"kind": "file", "profile_sha256": None}


def test_20_gb_without_a_terminal_needs_yes(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "ASK_FROM", 1000)
    monkeypatch.setattr("sys.stdin", open(os.devnull))
    arguments = ["coalesce", "--model", str(folder), "-o", str(tmp_path / "s")]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "--yes" in err and "to write" in err and not (tmp_path / "s").exists()
    assert main([*arguments, "--yes"]) == 0


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 2), ("no\n", 2), ("", 2)])
def test_20_gb_on_a_terminal_are_asked_for(folder, tmp_path, monkeypatch, answer, status):
    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return answer

    monkeypatch.setattr(command, "ASK_FROM", 1000)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert script([str(folder), "-o", str(tmp_path / "s")]) == status
    assert (tmp_path / "s").exists() == (status == 0)


@pytest.mark.parametrize("broken", ["absent", "dense", "shard cut", "onto a shard", "not ours"])
def test_what_is_wrong_is_one_line_and_status_2(folder, tmp_path, capsys, broken):
    output = tmp_path / "s"
    if broken == "absent":
        folder = tmp_path / "nowhere"
    elif broken == "dense":
        folder = model(tmp_path / "dense", {"model.safetensors": {"x": ("F32", [4])}})
    elif broken == "shard cut":
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
    elif broken == "onto a shard":
        output = folder / "model.safetensors"
    else:
        output.write_text("mine")
    for call in (
        lambda: main(["coalesce", "--model", str(folder), "-o", str(output)]),
        lambda: script([str(folder), "-o", str(output)]),
    ):
        assert call() == 2
        err = capsys.readouterr().err.strip()
        assert "\n" not in err and "error: " in err and str(tmp_path) in err


def test_drive_full_is_said_before_anything_is_written(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "free_space", lambda path: 10)
    assert script([str(folder), "-o", str(tmp_path / "s")]) == 2
    assert "too little space" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(folder, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "coalesce", interrupt)
    assert script([str(folder), "-o", str(tmp_path / "s")]) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert main(["coalesce", "--model", str(folder), "-o", str(tmp_path / "s")]) == 130


def test_example_script_runs_from_any_folder(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/coalesce_rewrite.py"), str(folder), "-o", "side"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "side").exists() and (tmp_path / "side.manifest.json").exists()
    assert "mlx" not in done.stdout


def test_neither_rewrite_nor_verify_nor_inspect_needs_mlx(folder, tmp_path):
    code = (
        "import sys\n"
        "from mbolt_mlx.cli.main import main\n"
        "from mbolt_mlx.storage.checkpoint import Checkpoint\n"
        "from mbolt_mlx.storage.coalesce import coalesce\n"
        "from mbolt_mlx.storage.experts import find_experts\n"
        "from mbolt_mlx.storage.verify import verify\n"
        f"checkpoint = Checkpoint.open({str(folder)!r})\n"
        "layers = find_experts(checkpoint)\n"
        f"coalesce(checkpoint, layers, {str(tmp_path / 's')!r})\n"
        f"verify(checkpoint, layers, {str(tmp_path / 's')!r})\n"
        f"assert main(['inspect', {str(folder)!r}]) == 0\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
