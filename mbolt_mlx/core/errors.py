"""Every error a user can meet, as one hierarchy.

An error is one line: the path it is about, the tensor or byte, what was found and expected, and
what to do. Commands print that line and exit with the error's ``exit_code``.
"""

from __future__ import annotations

import os
from typing import Any


class MboltError(Exception):
    """Base of all errors raised for a reason the user can act on.

    Args:
        message: what is wrong, in words.
        path: the file or folder it is about.
        tensor: the tensor it is about.
        offset: the byte it is about, counted from the start of the file.
        expected, found: the two values that disagree.
        hint: what to do.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: Any = None,
        found: Any = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.path = os.fspath(path) if path is not None else None
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(self.path)
        if self.tensor is not None:
            where.append(f"tensor {self.tensor}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        tail = []
        if self.expected is not None:
            tail.append(f"expected {self.expected}")
        if self.found is not None:
            tail.append(f"found {self.found}")
        text = ": ".join([*where, self.message])
        if tail:
            text += "; " + ", ".join(tail)
        if self.hint:
            text += f"; {self.hint}"
        return text.replace("\n", " ")


class UsageError(MboltError):
    """An option or argument has no meaning."""


class NamesError(MboltError):
    """A model name leads to no model that can be reached."""


class CheckpointError(MboltError):
    """A model folder or one of its files is malformed."""


class GgufError(MboltError):
    """A GGUF file, or one of a split model's files, is malformed or absent."""


class UnsupportedError(MboltError):
    """The input is well-formed, but this cannot be done with it."""


class SideFileError(MboltError):
    """A side-file or its manifest is damaged, or belongs to another source."""


class TraceError(MboltError):
    """A routing trace or profile is damaged, empty, or of another model."""


class ReadError(MboltError):
    """The drive did not deliver the bytes."""


class OutputError(MboltError):
    """A file cannot be written."""


class BuildError(MboltError):
    """llama.cpp cannot be fetched, patched or compiled, or its binaries are missing."""


class MemoryLimitError(MboltError):
    """The model cannot run within the memory that was allowed."""


class VerifyError(MboltError):
    """A check ran and found a difference."""

    exit_code = 1
