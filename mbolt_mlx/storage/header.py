"""The header of a safetensors file, read strictly.

A file is eight bytes of header length, the header (JSON, space-padded) and the tensors' bytes
without gaps. Every way in which a file can break that has its own error, because a header that is
half right leads to reads of the wrong bytes much later.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_mlx.core import files
from mbolt_mlx.core.errors import CheckpointError, MboltError, ReadError

HEADER_MAX = 100_000_000
_SIZE_MAX = 1 << 63
_RANK_MAX = 64
_LFS_MAGIC = b"version https://git-lfs"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of one file: ``offset`` is absolute, ``nbytes`` is its length in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; ``sha256`` covers the length field and the header as stored."""

    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]
    data_start: int
    sha256: str
    size: int
    mtime_ns: int


def read_header_of(path: Path) -> Header:
    """Read and check the header of the safetensors file ``path``.

    Raises:
        CheckpointError: when the file is absent, unreadable, incomplete or malformed in any way.
    """
    try:
        fd = files.open_read(path)
    except ReadError as error:
        raise CheckpointError(error.message, path=path, hint=_why_absent(path)) from error
    try:
        size, mtime_ns = files.size_and_mtime(fd)
        raw = _read_raw(fd, path, size)
    except ReadError as error:
        raise CheckpointError(error.message, path=path, offset=error.offset) from error
    finally:
        files.close(fd)
    tensors, metadata = parse_header(raw[8:], size - len(raw), path)
    return Header(tensors, metadata, len(raw), hashlib.sha256(raw).hexdigest(), size, mtime_ns)


def _why_absent(path: Path) -> str | None:
    """What to do about a file that cannot be opened, where its surroundings tell."""
    if path.is_dir() or (path.exists() and not path.is_file()):
        return None
    target = path.resolve() if path.is_symlink() else path
    if target.exists():
        return None
    downloads = path.parent / ".cache" / "huggingface" / "download"
    halves = [target.with_name(target.name + ".incomplete"), *downloads.glob(path.name + "*")]
    if any(half.suffix == ".incomplete" and half.exists() for half in halves):
        return "its download was interrupted; download the model again"
    if path.is_symlink():
        return f"a link to {target}, which is absent; download the model again"
    return "download the model again"


def _read_raw(fd: int, path: Path, size: int) -> bytearray:
    """The length field and the header as stored."""
    if size == 0:
        raise CheckpointError("the file is empty", path=path, hint="download it again")
    start = bytearray(min(size, 64))
    files.pread_into(fd, [memoryview(start)], 0, path=str(path))
    if start.startswith(_LFS_MAGIC):
        raise CheckpointError(
            "a Git-LFS pointer, not the file itself", path=path, hint="run git lfs pull"
        )
    if size < 8:
        raise CheckpointError(
            "too short for the header's length", path=path, expected="8 bytes or more", found=size
        )
    length = int.from_bytes(start[:8], "little")
    if length > HEADER_MAX:
        raise CheckpointError(
            "the header claims more than 100 MB: not a safetensors file",
            path=path, offset=0, found=f"{length} bytes",
        )  # fmt: skip
    if length > size - 8:
        raise CheckpointError(
            "the header claims more than the file holds; the file is cut short or not safetensors",
            path=path, offset=0, expected=f"{length} bytes of header", found=f"{size - 8} left",
        )  # fmt: skip
    raw = bytearray(8 + length)
    files.pread_into(fd, [memoryview(raw)], 0, path=str(path))
    return raw


def parse_json(raw: bytes | bytearray, path: Path, error: type[MboltError], what: str) -> Any:
    """Decode ``raw`` as one JSON value: UTF-8, no key twice, no NaN, no endless nesting.

    ``what`` names the text in messages ("the header").

    Raises:
        error: when it is anything else.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise error(f"{what} has the key {twice!r} twice", path=path)
        return found

    def constant(name: str) -> Any:
        raise error(f"{what} has the number {name}", path=path)

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise error(f"{what} is not UTF-8 (its byte {e.start})", path=path) from e
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError as e:
        raise error(f"{what} is nested too deeply", path=path) from e
    except ValueError as e:
        raise error(f"{what} is not JSON ({e})", path=path) from e


def parse_header(
    raw: bytes | bytearray, data_bytes: int, path: Path
) -> tuple[dict[str, HeaderTensor], dict[str, str]]:
    """Check the header text ``raw`` of a file that has ``data_bytes`` bytes after it.

    Returns the tensors by name, in the order of their bytes, and the metadata.

    Raises:
        CheckpointError: naming the tensor that is wrong, and how.
    """
    data_start = 8 + len(raw)
    found = parse_json(raw, path, CheckpointError, "the header")
    if not isinstance(found, dict):
        raise CheckpointError("the header is not an object", path=path, found=type(found).__name__)
    metadata = found.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError("__metadata__ is not an object", path=path)
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"__metadata__ {key!r} is not a string", path=path, found=type(value).__name__
            )
    tensors = {name: _tensor(name, entry, data_start, path) for name, entry in found.items()}
    tensors = dict(sorted(tensors.items(), key=lambda i: (i[1].offset, i[1].nbytes)))
    _check_ranges(tensors.items(), data_start, data_bytes, path)
    return tensors, metadata


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> HeaderTensor:
    def wrong(message: str, **more: Any) -> CheckpointError:
        return CheckpointError(message, path=path, tensor=printable(name), **more)

    if printable(name) != name:
        raise wrong("the name holds a character that cannot be written")
    if not isinstance(entry, dict):
        raise wrong("the entry is not an object", found=type(entry).__name__)
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise wrong(f"the entry has no {key}")
    dtype, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise wrong("unknown dtype", found=repr(dtype)[:40])
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise wrong("the shape is not a list of whole numbers", found=repr(shape)[:80])
    if (
        not isinstance(ends, list)
        or len(ends) != 2
        or not all(type(n) is int and n >= 0 for n in ends)
    ):
        raise wrong("data_offsets is not a pair of whole numbers", found=repr(ends)[:80])
    if len(shape) > _RANK_MAX:
        raise wrong("too many dimensions", expected=f"at most {_RANK_MAX}", found=len(shape))
    begin, end = ends
    if any(n >= _SIZE_MAX for n in shape) or math.prod(shape) * DTYPE_BITS[dtype] >= _SIZE_MAX * 8:
        raise wrong("the shape holds more bytes than any file", found=repr(shape)[:80])
    if end >= _SIZE_MAX:
        raise wrong("data_offsets lie beyond any file", found=repr(ends)[:80])
    if end < begin:
        raise wrong("the range ends before it begins", offset=data_start + begin, found=ends)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise wrong(f"{dtype} of this shape is not a whole number of bytes", found=shape)
    if end - begin != bits // 8:
        raise wrong(
            f"the range is not shape {shape} times {dtype}",
            offset=data_start + begin, expected=f"{bits // 8} bytes", found=f"{end - begin}",
        )  # fmt: skip
    return HeaderTensor(dtype, tuple(shape), data_start + begin, bits // 8)


def printable(name: str) -> str:
    """``name`` without what a terminal or UTF-8 cannot carry (lone surrogates, control codes)."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else "?" for c in name)


def _check_ranges(
    tensors: Iterable[tuple[str, HeaderTensor]], data_start: int, data_bytes: int, path: Path
) -> None:
    """Refuse ranges that overlap, leave gaps, or do not end where the file ends."""
    position, last, size = data_start, None, data_start + data_bytes
    for name, tensor in tensors:
        if tensor.offset < position:
            raise CheckpointError(
                f"its range overlaps that of {last}", path=path, tensor=name, offset=tensor.offset
            )
        if tensor.offset > position:
            raise CheckpointError(
                "a gap before its range", path=path, tensor=name, offset=position,
                found=f"{tensor.offset - position} bytes that belong to no tensor",
            )  # fmt: skip
        position, last = tensor.offset + tensor.nbytes, name
        if position > size:
            raise CheckpointError(
                "its range ends after the file: the file is cut short",
                path=path, tensor=name, offset=tensor.offset,
                expected=f"{position} bytes", found=f"{size}", hint="download it again",
            )  # fmt: skip
    if position < size:
        raise CheckpointError(
            "bytes after the last tensor", path=path, offset=position,
            expected=f"{position} bytes", found=f"{size}",
        )  # fmt: skip
