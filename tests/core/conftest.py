"""What the tests of reads share; each module has a ``file`` of its own: (path, bytes)."""

import os

import pytest

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import ReadError


@pytest.fixture
def direct(file):
    """A descriptor whose reads must be aligned, where the file system has them."""
    try:
        fd = files.open_read(file[0], direct=True)
    except ReadError:
        pytest.skip("the file system has no direct reads")
    yield fd
    os.close(fd)
