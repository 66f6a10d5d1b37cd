"""Fixtures of the storage tests."""

import pytest

from mbolt_mlx.core import files


@pytest.fixture(autouse=True)
def no_waiting_for_the_drive(monkeypatch):
    """Flushing matters when power fails, which no test here can bring about; it takes long."""
    monkeypatch.setattr(files, "sync", lambda fd, *, path=None: None)
    monkeypatch.setattr(files, "sync_data", lambda fd, *, path=None: None)
