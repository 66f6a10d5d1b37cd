import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbolt_mlx.cli.inspect import _ranges
from mbolt_mlx.cli.main import main
from tests.makers import make_model
from tests.storage.made import expert_tensors, model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    tensors = expert_tensors(layers=[1, 2], quantised=True) | {"model.norm.weight": ("F32", [64])}
    return model(tmp_path / "m", {"model.safetensors": tensors})


def test_table_is_plain_when_piped(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "expert layers    2" in out and "4, top-2" in out and "layers 1-2: 4 experts" in out
    assert "gate_proj.scales" in out and "\x1b" not in out and "│" not in out


def test_json_counts_every_byte(folder, capsys):
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    block = sum(p["bytes"] for p in found["groups"][0]["pieces"])
    assert len(found["groups"][0]["pieces"]) == 9
    assert found["expert_bytes"] == 2 * 4 * block and found["dense_bytes"] == 256
    assert found["bytes_per_token"] == 2 * 2 * block
    assert 0 <= found["fits_at_resident"] <= 1


def test_layers_that_differ_are_shown_apart(tmp_path, capsys):
    tensors = expert_tensors(layers=[0, 2]) | expert_tensors(layers=[1], quantised=True)
    assert main(["inspect", str(model(tmp_path / "m", {"model.safetensors": tensors}))]) == 0
    out = capsys.readouterr().out
    assert "layers 0, 2:" in out and "layers 1:" in out


def test_it_loads_no_mlx(folder):
    code = (
        "import sys\n"
        "from mbolt_mlx.cli.main import main\n"
        f"assert main(['inspect', {str(folder)!r}]) == 0\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_side_file_shows_its_manifest(tmp_path, capsys):
    folder = make_model(tmp_path / "m", layers=2, experts=4)
    main(["coalesce", "--model", str(folder), "-o", str(tmp_path / "s"), "-q"])
    assert main(["inspect", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "blocks           8 in 2 layers" in out and "source           m, 1 file," in out
    assert main(["inspect", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 8
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    assert main(["inspect", str(tmp_path / "m.gguf")]) == 2
    assert "for GGUF models there is mbolt-gguf" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["inspect"], ["profile", "-o", "never.json"]])
def test_weights_are_no_side_file(tmp_path, capsys, argv):
    folder = model(tmp_path / "m", {"model.safetensors": {"x": ("F32", [4])}})
    assert main([*argv, str(folder / "model.safetensors")]) == 2
    assert "a safetensors file, but not a side-file" in capsys.readouterr().err


def test_only_headers_are_read(tmp_path, capsys):
    """A model of 100 GB, sparse: reading its data would take minutes."""
    import struct

    experts = 100
    header, position = {}, 0
    for q in ("gate_proj", "up_proj", "down_proj"):
        size = experts * 8192 * 10240 * 4
        name = f"model.layers.0.mlp.switch_mlp.{q}.weight"
        shape = [experts, 8192, 10240]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 8}')
    with open(tmp_path / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        os.truncate(f.fileno(), 8 + len(text) + position)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "top-8" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["dense", "absent", "file"])
def test_what_is_wrong_is_one_line(tmp_path, capsys, what):
    path = tmp_path / "x"
    if what == "dense":
        model(path, {"model.safetensors": {"x": ("F32", [4])}})
    elif what == "file":
        path.write_text("hello")
    assert main(["inspect", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "error" in err


def test_ranges():
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
