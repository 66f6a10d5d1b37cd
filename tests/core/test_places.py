"""Where files go by default, for users with and without a home."""

from pathlib import Path

import pytest

from mbolt_mlx.core import places
from mbolt_mlx.core.errors import UsageError


def test_a_cache_of_the_users_choice_only_where_it_is_absolute(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setattr(places.sys, "platform", "linux")
    for value, expected in (("/c", "/c/mbolt"), ("c", "/home/x/.cache/mbolt")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert places.cache_folder() == Path(expected)


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(places.os.path, "expanduser", lambda text: text)
    with pytest.raises(UsageError, match="no home folder .*set HOME or XDG_CACHE_HOME"):
        places.cache_folder()


def test_a_tilde_of_a_user_who_is_not_there():
    assert places.user_path("~no-such-user/model") == Path("~no-such-user/model")
