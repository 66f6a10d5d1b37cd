"""Files that ship with the package: manifests, patches and the demo model.

A wheel carries them inside the package; a checkout (and ``pip install -e``) has them beside it.
"""

from __future__ import annotations

from pathlib import Path

from mbolt_mlx.core.errors import NamesError

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Return the path of a shipped file or folder, such as ``manifests/models`` or ``demo``.

    Raises:
        NamesError: it is in neither place; the installation is incomplete.
    """
    for root in (PACKAGE, PACKAGE.parent):
        path = root / name
        if path.exists():
            return path
    raise NamesError(
        f"{name} is missing from this installation",
        path=PACKAGE,
        hint="install the package again",
    )
