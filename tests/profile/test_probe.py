"""The drive probe: what it reads, what it leaves, and what it makes of odd inputs."""

import json
import os
import re

import pytest

from mbolt_mlx.cli.main import main
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError, TraceError, UsageError
from mbolt_mlx.profile import probe as probing
from mbolt_mlx.profile.law import Law
from mbolt_mlx.profile.probe import probe, read_laws, read_probe

SMALL = {"seconds": 0.3, "sizes": (4096, 65536, 1 << 20), "depths": (1, 4)}


def test_a_folder_without_a_large_file_gets_one_for_a_while(tmp_path):
    steps = []
    found = probe(tmp_path, file_bytes=64 << 20, step=lambda *n: steps.append(n), **SMALL)
    assert list(tmp_path.iterdir()) == []
    assert found.path == str(tmp_path.resolve())
    assert steps == [(n, 6) for n in range(1, 7)]
    assert {(p.nbytes, p.depth) for p in found.points} == {
        (n, d) for n in SMALL["sizes"] for d in SMALL["depths"]
    }
    assert all(p.seconds > 0 and p.reads >= 2 * p.depth for p in found.points)
    document = json.loads(json.dumps(found.document()))
    assert read_probe(document) == found.law(4)
    assert document["depth"] == 4 and [y["depth"] for y in document["laws"]] == [1, 4]


def test_a_large_file_that_is_there_is_read_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "LEAST_BYTES", 8 << 20)
    data = bytes(range(256)) * (32 << 10)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "small").write_bytes(b"x")
    found = probe(tmp_path, **SMALL)
    assert found.path.endswith("model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == data
    assert probe(tmp_path / "model.safetensors", **SMALL).path == found.path


def test_depths_between_those_measured_take_the_nearest():
    laws = {1: Law(1e-4, 1e9), 4: Law(2e-4, 1e9), 16: Law(3e-4, 1e9)}
    found = probing.Probe("x", True, (), laws, dict.fromkeys(laws, 0.0))
    assert [found.law(d).t_op for d in (1, 3, 4, 7, 100)] == [1e-4, 2e-4, 2e-4, 2e-4, 3e-4]


def test_places_that_cannot_be_probed(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        probe(tmp_path / "absent")
    (tmp_path / "tiny").write_bytes(b"x" * 8192)
    with pytest.raises(UsageError, match="too small"):
        probe(tmp_path / "tiny")


def test_a_full_drive_is_not_filled_further(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_space", lambda path: 1 << 20)
    with pytest.raises(UsageError, match="too little space"):
        probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_fails_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise ReadError("read failed")

    monkeypatch.setattr(files, "pread_into", fails)
    with pytest.raises(ReadError):
        probe(tmp_path, file_bytes=64 << 20, **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"t_op_s": 1},
        {"t_op_s": "1", "bytes_per_s": 1e9},
        {"t_op_s": -1, "bytes_per_s": 1e9},
        {"t_op_s": float("nan"), "bytes_per_s": 1e9},
        {"t_op_s": 1, "bytes_per_s": float("inf")},
        {"t_op_s": 1, "bytes_per_s": 10**400},
        {"t_op_s": 1, "bytes_per_s": 1e9, "slower": 1},
    ],
)
def test_probes_without_meaning(document, tmp_path, capsys):
    with pytest.raises(TraceError):
        read_probe(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert main(["plan", "--model", "demo", "--drive", str(tmp_path / "p.json")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "p.json: " in err and "unexpected" not in err


@pytest.mark.parametrize(
    "laws",
    [
        None,
        3,
        [3],
        [{}],
        [{"depth": 0, "t_op_s": 1, "bytes_per_s": 1e9}],
        [{"depth": 4, "t_op_s": 1}],
        [{"depth": "4", "t_op_s": 1, "bytes_per_s": 1e9}],
    ],
)
def test_laws_without_meaning(laws):
    with pytest.raises(TraceError):
        read_laws({"laws": laws})


def test_the_form_of_the_law_is_kept():
    document = {"t_op_s": 1e-3, "bytes_per_s": 1e9, "slower": True}
    assert read_probe(document) == Law(1e-3, 1e9, slower=True)
    assert probing.law_document(read_probe(document)) == document
    assert not read_probe({"t_op_s": 1e-3, "bytes_per_s": 1e9}).slower


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"format": "mbolt-gate"}, "not the result of a probe; expected mbolt-probe, found"),
        ({"format": None}, "not the result of a probe"),
        (
            {"format": "mbolt-probe", "version": 2},
            "unknown version of a probe; expected 1, found 2",
        ),
        ({"version": "x" * 999}, "unknown version"),
        ({"version": True}, "unknown version"),
        ({"bytes_per_s": 999}, "no meaning; expected 0 to 10 s a read, 1000 to 1e+15 bytes/s"),
        ({"bytes_per_s": 1e16}, "no meaning"),
        ({"t_op_s": 10.1}, "no meaning"),
        ({"t_op_s": 10**400}, "no meaning"),
        ({"bytes_per_s": 10**400}, "no meaning"),
        ({"slower": "x" * 999}, "no meaning"),
        ({"laws": [{"depth": 10**400, "t_op_s": 1, "bytes_per_s": 1e9}]}, "no meaning"),
        ({"laws": [{"depth": 4, "t_op_s": 1, "bytes_per_s": 1}]}, "no meaning"),
    ],
)
def test_files_that_tell_nothing_of_a_drive(tmp_path, more, says):
    path = tmp_path / "p.json"
    good = {"format": "mbolt-probe", "version": 1, "t_op_s": 1e-4, "bytes_per_s": 1e9}
    path.write_text(json.dumps(good))
    assert probing.open_probe(path) == good
    path.write_text(json.dumps({"t_op_s": 1e-4, "bytes_per_s": 1e9}))
    assert read_probe(probing.open_probe(path)) == Law(1e-4, 1e9)
    path.write_text(json.dumps(good | more))
    with pytest.raises(TraceError, match=re.escape(says)) as error:
        probing.open_probe(path)
    assert str(error.value).startswith(f"{path}: ")
    assert len(str(error.value)) < len(str(path)) + 200


def test_a_probe_from_a_pipe_or_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ReadError, match="not a regular file"):
            probing.open_probe(path)
