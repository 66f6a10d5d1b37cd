"""mbolt-gguf and its map, as a user types them."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mbolt_gguf.cli import main as commands
from mbolt_gguf.describe import ranges
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.cli import sim
from tests.gguf.conftest import F32, moe_block, moe_values
from tests.gguf.makers import make_gguf

# 26,112 bytes: 96 rows of 256 in Q8_0, or the other way round.
SLICE = 26112


def mapped(capsys, path):
    assert commands.main(["map", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_token_reads(tmp_path, capsys):
    found = mapped(capsys, make_gguf(tmp_path / "m.gguf"))
    assert (found["architecture"], found["layers"]) == ("qwen3moe", 3)
    assert (found["experts"], found["top_k"]) == ([8], [2])
    assert found["expert_layers"] == [0, 1, 2] and found["dense_layers"] == []
    assert found["expert_bytes"] == 3 * 8 * 3 * SLICE
    assert found["token"] == {
        "present": {"reads": 3 * 2 * 3, "bytes": 3 * 2 * 3 * SLICE},
        "interleaved": {"reads": 3 * 2, "bytes": 3 * 2 * 3 * SLICE},
    }
    assert found["rewritten"] is None and found["permutable"] and not found["interleaved"]
    (group,) = found["groups"]
    assert [(s["name"], s["type"], s["shape"], s["bytes"]) for s in group["slices"]] == [
        ("ffn_up_exps.weight", "Q8_0", [256, 96], SLICE),
        ("ffn_gate_exps.weight", "Q8_0", [256, 96], SLICE),
        ("ffn_down_exps.weight", "Q8_0", [96, 256], SLICE),
    ]


def test_dense_layers_mtp_layers_and_shared_experts(tmp_path, capsys):
    found = mapped(capsys, make_gguf(tmp_path / "m.gguf", "glm4moe"))
    assert found["dense_layers"] == [0] and found["expert_layers"] == [1, 2, 3]
    assert found["mtp_layers"] == [3]
    assert found["shared_experts"]["layers"] == [1, 2, 3]
    assert found["token"]["present"]["reads"] == 2 * 2 * 3  # drafting apart
    assert [s["name"] for s in found["groups"][0]["router"]] == [
        "ffn_gate_inp.weight",
        "exp_probs_b.bias",
    ]


def test_groups_and_fused_weights(tmp_path, capsys):
    found = mapped(capsys, make_gguf(tmp_path / "m.gguf", "deepseek2-groups"))
    assert found["expert_groups"] == 4 and found["groups"][0]["group_size"] == 4
    found = mapped(capsys, make_gguf(tmp_path / "m.gguf", "deepseek2-fused"))
    assert found["token"]["present"]["reads"] == 2 * 2 * 2


def test_a_split_model_and_its_words(tmp_path, capsys):
    path = make_gguf(tmp_path / "m.gguf", "gpt-oss", split=7)
    found = mapped(capsys, path)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [f["path"] for f in found["files"]] == [str(p) for p in files]
    assert commands.main(["map", str(files[-1])]) == 0
    out = capsys.readouterr().out
    assert f"in {len(files)} files" in out and "3 of 3 layers have experts: 8 each" in out
    assert "ffn_down_exps.bias" in out and "Not rewritten." in out


@pytest.mark.parametrize("files", [0, 9])
def test_what_a_rewrite_has_interleaved(tmp_path, capsys, files):
    path = make_gguf(tmp_path / "m.gguf", "deepseek2-fused", split=files)
    before = mapped(capsys, path)
    rewrite(path, None, tmp_path / "out.gguf", layout="interleave", progress=False)
    found = mapped(capsys, next(tmp_path.glob("out*.gguf")))
    assert found["interleaved"] and found["rewritten"]["layout"] == "interleave"
    assert found["token"]["present"] == before["token"]["interleaved"]
    assert found["token"]["present"]["reads"] == before["token"]["present"]["reads"] // 2
    for ours, theirs in zip(found["groups"], before["groups"], strict=True):
        for one, other in zip(ours["slices"], theirs["slices"], strict=True):
            assert {**one, "stride": 0} == {**other, "stride": 0}
        assert sorted(s["name"] for s in ours["router"]) == sorted(
            s["name"] for s in theirs["router"]
        )


def test_json_into_a_file(tmp_path, capsys):
    path, target = make_gguf(tmp_path / "m.gguf"), tmp_path / "map.json"
    assert commands.main(["map", str(path), "--json", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(target.read_text())["layers"] == 3


def test_layers_that_differ_and_experts_that_cannot_move(write, capsys):
    tensors = [
        *moe_block(0),
        *moe_block(2, hidden=96),
        ("blk.2.ffn_up_chexps.weight", F32, (32, 8, 2)),
    ]
    path = write(moe_values(layers=3), tensors)
    found = mapped(capsys, path)
    assert [group["layers"] for group in found["groups"]] == [[0], [2]]
    assert found["dense_layers"] == [1] and not found["permutable"]
    assert found["obstacles"][0]["tensor"] == "blk.2.ffn_up_chexps.weight"
    assert commands.main(["map", str(path)]) == 0
    out = capsys.readouterr().out
    assert "cannot be reordered: blk.2.ffn_up_chexps.weight" in out
    assert "layers without experts: 1" in out


@pytest.mark.parametrize("argv", [["map"], ["map", "/absent"], ["nonsense"], ["map", "/", "--x"]])
def test_what_is_wrong_is_one_line(argv, capsys):
    assert commands.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("mbolt-gguf: error: ")


def test_a_folder_of_an_mlx_model(tiny_model, tmp_path, capsys):
    for folder, named in ((tiny_model, True), (tmp_path, False)):
        assert commands.main(["map", str(folder)]) == 2
        err = capsys.readouterr().err
        assert "not a regular file" in err and ("`mbolt-mlx inspect`" in err) == named


def test_more_blocks_than_any_model_has(write, capsys):
    path = write(moe_values(layers=(1 << 32) - 1), moe_block(0))
    assert commands.main(["map", str(path)]) == 2
    assert "test.block_count has no meaning; expected 0 to 65536" in capsys.readouterr().err


def test_a_dense_model_says_so(write, capsys):
    path = write(moe_values()[:2], [("blk.0.ffn_up.weight", F32, (32, 4))])
    assert commands.main(["map", str(path)]) == 2
    assert "a dense model (test): it has no experts" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    assert commands.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mbolt-gguf")
    assert all(f"\n  {name}" in out for name in commands.COMMANDS)
    assert len(commands.COMMANDS) == 9 and "mbolt-gguf COMMAND --help" in out


def test_the_first_implementations_name(tmp_path, capsys):
    path = make_gguf(tmp_path / "m.gguf")
    assert commands.main(["map", str(path)]) == 0
    ours = capsys.readouterr().out
    assert sim.main(["map", str(path)]) == 0
    assert capsys.readouterr().out == ours
    assert sim.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("cluster", "gate", "prefetch-map", "map", "trace-stats", "drive"):
        assert f"\n  {name} " in out


def test_python_m_and_no_mlx():
    code = (
        "import sys\nfrom mbolt_gguf.cli.main import main\nassert main(['map', '/absent']) == 2\n"
        "assert not {'mlx', 'mlx_lm', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-m", "mbolt_gguf", "mab"], capture_output=True)
    assert done.returncode == 2 and b"did you mean map?" in done.stderr


def test_every_installed_program_is_there():
    root = Path(__file__).resolve().parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"mbolt-mlx", "mbolt-gguf", "mbolt-sim", "mbolt"} <= set(scripts)
    for place in scripts.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_ranges():
    assert ranges([]) == "" and ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_map_is_never_written_over_a_model(tmp_path, capsys):
    model = make_gguf(tmp_path / "m.gguf")
    before = model.read_bytes()
    assert commands.main(["map", str(model), "--json", str(model)]) == 2
    assert "another file is there already" in capsys.readouterr().err
    assert model.read_bytes() == before
    for _ in range(2):
        assert commands.main(["map", str(model), "--json", str(tmp_path / "map.json")]) == 0
