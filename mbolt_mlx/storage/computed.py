"""Whether experts that mlx-lm computed for a side-file are what it would compute now.

Such bytes are not in the source, so its stamp does not vouch for them: another version of mlx-lm
may convert the same files otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mbolt_mlx.core.errors import SideFileError
from mbolt_mlx.storage.experts import ExpertLayer
from mbolt_mlx.storage.manifest import Manifest

# Key in the manifest's `computed` → name of the distribution.
MAKERS = {"mlx_lm": "mlx-lm", "mlx": "mlx"}
_REWRITE = "write it again with mbolt-mlx coalesce"


def versions() -> dict[str, str]:
    """What computes experts here, for a manifest."""
    found = {}
    for key, name in MAKERS.items():
        try:
            found[key] = version(name)
        except PackageNotFoundError:
            pass
    return found


def check_computed(
    path: Path, manifest: Manifest, layers: Sequence[ExpertLayer]
) -> tuple[str, ...]:
    """Check what ``manifest``, of the side-file ``path``, says of computed experts.

    Returns:
        Sentences for the user: where only the last part of a version differs.

    Raises:
        SideFileError: when another minor version of mlx-lm or MLX made them, or they are not those
            that have to be computed for ``layers``.
    """
    held = (manifest.computed or {}).get("layers")
    held = held if isinstance(held, dict) else {}
    for layer in layers:
        if layer.computed != (layer.module in held):
            has, wants = "the source's own bytes", "what mlx-lm computes of them"
            if not layer.computed:
                has, wants = wants, has
            raise SideFileError(
                f"it holds other bytes of {layer.module} than the model runs", path=path,
                expected=wants, found=has, hint=_REWRITE,
            )  # fmt: skip
    warnings = []
    for key, now in versions().items() if manifest.computed else ():
        then = manifest.computed.get(key)
        if then == now:
            continue
        if not isinstance(then, str) or then.split(".")[:2] != now.split(".")[:2]:
            raise SideFileError(
                f"its experts were computed by another {MAKERS[key]}, which may convert the files "
                "otherwise",
                path=path, expected=now, found=then if isinstance(then, str) else "no version",
                hint=_REWRITE,
            )  # fmt: skip
        warnings.append(
            f"{path}: its experts were computed by {MAKERS[key]} {then}, and this is {now}; "
            "mbolt-mlx verify --full tells whether they are still the same"
        )
    return tuple(warnings)
