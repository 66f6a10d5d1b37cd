import pytest

from mbolt_mlx.cli.main import main
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from tests.makers import make_model


@pytest.fixture
def pair(tmp_path):
    folder, target = make_model(tmp_path / "m", layers=2, experts=4), tmp_path / "s"
    assert main(["coalesce", "--model", str(folder), "-o", str(target), "-q"]) == 0
    return folder, target


def arguments(pair, *more):
    return ["verify", "--model", str(pair[0]), "--side-file", str(pair[1]), *more]


def test_good_pair(pair, capsys):
    assert main(arguments(pair)) == 0
    out, err = capsys.readouterr()
    assert out == "" and "8 of 8 blocks" in err and "--full compares every byte" in err
    assert main(arguments(pair, "--full")) == 0
    assert "all 8 blocks" in capsys.readouterr().err


def test_first_difference_and_status_1(pair, capsys):
    entry = Manifest.read(manifest_path(pair[1])).layers[1]
    at = int(entry.offsets[2]) + entry.pieces[2].offset + 5
    raw = bytearray(pair[1].read_bytes())
    raw[at] ^= 1
    pair[1].write_bytes(raw)
    assert main(arguments(pair, "--full")) == 1
    err = capsys.readouterr().err.strip()
    assert "\n" not in err and f"byte {at}" in err
    assert "layer 1, expert 2, down_proj.weight (its byte 5)" in err


def test_stale_pair_has_status_1_and_absent_file_2(pair, capsys):
    manifest_path(pair[1]).write_text("{}")
    assert main(arguments(pair)) == 1
    assert "not the manifest" in capsys.readouterr().err
    pair[1].unlink()
    assert main(arguments(pair)) == 2
    assert "no such file" in capsys.readouterr().err
    pair[1].mkdir()
    assert main(arguments(pair)) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_default_is_the_side_file_in_the_cache(tmp_path, capsys):
    folder = make_model(tmp_path / "m", layers=2, experts=4)
    main(["coalesce", "--model", str(folder), "-q"])
    assert main(["verify", "--model", str(folder), "--full"]) == 0


def said(capsys, argv, status):
    assert main(argv) == status
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    return err


@pytest.mark.parametrize("command", ["verify", "profile"])
def test_a_model_without_a_side_file(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_model(tmp_path / "m odel", layers=2, experts=4)
    argv = {
        "verify": ["verify", "--model", str(folder)],
        "profile": ["profile", str(folder), "-o", str(tmp_path / "p.json")],
    }[command]
    err = said(capsys, argv, 2)
    assert f"{folder}: there is no side-file of this model yet" in err
    assert f"mbolt-mlx coalesce --model '{folder}'" in err
    main(["coalesce", "--model", str(folder), "-q"])
    assert main(argv) == 0
    capsys.readouterr()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    err = said(capsys, argv, 1)
    assert "the source changed since it was written" in err
    assert "write it again with mbolt-mlx coalesce" in err


@pytest.mark.parametrize("data", [b"", b"# mbolt\n", b"\x08\0\0\0\0\0\0\0{}      ", bytes(9000)])
def test_a_file_that_is_no_side_file_is_wrong_input(pair, tmp_path, capsys, data):
    other = tmp_path / "README.md"
    other.write_bytes(data)
    err = said(capsys, arguments((pair[0], other)), 2)
    assert err.endswith("README.md: not a side-file; mbolt-mlx coalesce writes one")
    err = said(capsys, ["profile", str(other), "-o", str(tmp_path / "p.json")], 2)
    assert err.endswith("README.md: not a side-file; mbolt-mlx coalesce writes one")
    generate = ["generate", "--model", str(pair[0]), "--prompt", "x", "--side-file"]
    assert said(capsys, [*generate, str(other)], 2).endswith(
        "README.md: not a side-file; mbolt-mlx coalesce writes one"
    )
    assert said(capsys, [*generate, str(tmp_path / "nope")], 2).endswith("nope: no such file")
    nope = ["profile", str(tmp_path / "n.safetensors"), "-o", str(tmp_path / "p.json")]
    assert said(capsys, nope, 2).endswith("n.safetensors: no such file")


def test_help_says_what_only_full_finds(capsys):
    assert main(["verify", "--help"]) == 0
    assert "changed in place" in capsys.readouterr().out
