"""Where files go that nobody gave a place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mbolt_mlx.core.errors import UsageError


def cache_folder() -> Path:
    """The user's cache of mbolt: ``$XDG_CACHE_HOME/mbolt``, or the system's usual place.

    Raises:
        UsageError: when the user has none.
    """
    set_by_user = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(set_by_user):
        return Path(set_by_user) / "mbolt"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "mbolt"
    return _home() / ".cache" / "mbolt"


def user_path(text: str | os.PathLike[str]) -> Path:
    """``text`` with a leading ``~`` as the shell takes it; of a user who is not there as it is."""
    return Path(os.path.expanduser(text))


def _home() -> Path:
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise UsageError(
            "this user has no home folder to keep files in", hint="set HOME or XDG_CACHE_HOME"
        )
    return Path(home)
