"""Where files go that nobody gave a place."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache of mbolt: ``$XDG_CACHE_HOME/mbolt``, or the system's usual place."""
    set_by_user = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(set_by_user):
        return Path(set_by_user) / "mbolt"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mbolt"
    return Path.home() / ".cache" / "mbolt"
