"""Scratch files go when the work is done, and when the process was killed with the next run."""

import os

import pytest

from mbolt_mlx.core import files
from mbolt_mlx.core.scratch import remove_left, scratch


def test_there_for_a_while(tmp_path):
    with pytest.raises(KeyboardInterrupt), scratch(tmp_path, ".x-") as (fd, path):
        assert path == tmp_path / f".x-{os.getpid()}" and files.is_same_file(fd, path)
        remove_left(tmp_path, ".x-")
        assert path.exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / ".x-123").write_bytes(b"left")
    others = {".x-", ".x-12a", ".x-1.json", ".y-123", "x-1", ".x-77"}
    for name in others - {".x-77"}:
        (tmp_path / name).write_bytes(b"other")
    (tmp_path / ".x-77").symlink_to("x-1")
    remove_left(tmp_path, ".x-")
    assert {p.name for p in tmp_path.iterdir()} == others
