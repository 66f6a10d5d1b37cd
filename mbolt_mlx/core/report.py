"""JSON documents that a command was asked to write: profiles, measurements, maps.

Such a file replaces an older one of its kind and nothing else: a slip of the keyboard, or of the
shell's completion, must not cost anyone a model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import OutputError, ReadError
from mbolt_mlx.core.output import check_not_pipe, write_whole

_SIZE_MAX = 1 << 30


def write_report(
    path: str | os.PathLike[str], document: dict[str, Any], *, indent: int | None = 2
) -> None:
    """Write ``document``, which names its ``format``, as the JSON file ``path``, whole or not at
    all.

    Raises:
        OutputError: when it cannot be written, or as `check_report`.
    """
    check_report(path, document["format"])
    separators = None if indent else (",", ":")
    text = json.dumps(document, indent=indent, separators=separators)
    write_whole(path, text.encode() + b"\n")


def check_report(path: str | os.PathLike[str], kind: str) -> None:
    """Refuse a place where no report of the format ``kind`` can go, before it costs any work.

    Raises:
        OutputError: when the folder is absent, or a pipe or another file is there already.
    """
    path = Path(path)
    if path.is_dir():
        raise OutputError("a folder; name a file in it", path=path)
    check_not_pipe(path)
    if not path.parent.is_dir():
        raise OutputError("no such folder", path=path.parent)
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        found = json.loads(files.read_whole(path, limit=_SIZE_MAX))
    except (ReadError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise OutputError(
            f"another file is there already, and it is not of the format {kind}",
            path=path,
            hint="choose another name or remove it",
        )
