"""What a report may replace: an older one of its kind, and nothing else."""

import json
import os

import pytest

from mbolt_mlx.core.errors import OutputError
from mbolt_mlx.core.report import check_report, write_report

DOCUMENT = {"format": "mbolt-x", "version": 1, "name": "ü"}


def test_replaces_an_older_one_and_an_empty_file(tmp_path):
    place = tmp_path / "a.json"
    write_report(place, DOCUMENT)
    write_report(place, DOCUMENT | {"n": 2}, indent=None)
    assert json.loads(place.read_bytes()) == DOCUMENT | {"n": 2}
    place.write_bytes(b"")
    write_report(place, DOCUMENT)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "there",
    [b"weights", b"\xff\xfe", b"{}", b"[1]", b'{"format": "mbolt-y"}', b"[" * 100_000, b" "],
    ids=["text", "bytes", "object", "list", "other", "deep", "blank"],
)
def test_never_replaces_another_file(tmp_path, there):
    place = tmp_path / "a.json"
    place.write_bytes(there)
    for attempt in (
        lambda: check_report(place, "mbolt-x"),
        lambda: write_report(place, DOCUMENT),
    ):
        with pytest.raises(OutputError, match=r"a\.json: another file .*mbolt-x; choose another"):
            attempt()
    assert place.read_bytes() == there and len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_known_before_the_work(tmp_path):
    with pytest.raises(OutputError, match="a folder; name a file in it"):
        check_report(tmp_path, "mbolt-x")
    with pytest.raises(OutputError, match="no such folder"):
        check_report(tmp_path / "no" / "a.json", "mbolt-x")
    check_report(os.devnull, "mbolt-x")
    os.mkfifo(tmp_path / "ff")
    for attempt in (
        lambda: check_report(tmp_path / "ff", "mbolt-x"),
        lambda: write_report(tmp_path / "ff", DOCUMENT),
    ):
        with pytest.raises(OutputError, match="ff: a pipe or a device; name a file"):
            attempt()


def test_a_pipe_that_the_shell_made_is_written_to():
    end, other = os.pipe()
    write_report(f"/dev/fd/{other}", DOCUMENT)
    os.close(other)
    with open(end, encoding="utf-8") as stream:
        assert json.load(stream) == DOCUMENT
