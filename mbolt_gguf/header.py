"""The header of a GGUF file, read strictly.

Little-endian: "GGUF", u32 version (2 or 3), u64 tensors, u64 keys; for each key its name, u32 type
and value (an array is u32 item type, u64 count, items; a string u64 length, bytes); for each tensor
its name, u32 rank, u64 dimensions (the row first), u32 type, u64 offset into the data; padding; and
the data, each tensor padded to the alignment. llama.cpp refuses offsets that are not the sum of the
padded sizes before them, so this does too.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mbolt_gguf.types import ARRAY, STRING, U32, VALUE_DTYPES, nbytes_of
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import GgufError, MboltError, ReadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
HEADER_MAX = 1 << 30
_FIRST_READ = 1 << 20
_RANK_MAX = 4
_NAME_MAX = 63  # ggml keeps 64 bytes for a name and its zero
_KEY_MAX = 65535
_KEY_LEAST, _TENSOR_LEAST = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8
_SIZE_MAX = 1 << 63
_LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: ``file`` is an index into the model's files, ``shape`` has the row (ne0) first,
    ``offset`` is absolute in its file, ``nbytes`` its length without padding."""

    name: str
    file: int
    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value; ``raw[start:end]`` of the header is its key, type and value.

    ``type`` is a GGUF value type; an array (9) has items of the type ``item``, else ``item`` is
    None. ``count`` is 1 for all others. ``at`` is the byte where the value itself begins.
    """

    key: str
    type: int
    start: int
    end: int
    at: int
    item: int | None
    count: int
    raw: bytes = field(repr=False, compare=False)

    @property
    def encoded(self) -> bytes:
        """Key, type and value as they stand in the file."""
        return self.raw[self.start : self.end]

    def get(self) -> Any:
        """The value: a number, a bool, a string, or a list of them.

        Bytes that are no UTF-8 become lone surrogates ("surrogateescape").
        """
        of = self.type if self.item is None else self.item
        if of == STRING:
            items, position = [], self.at
            for _ in range(self.count):
                (length,) = struct.unpack_from("<Q", self.raw, position)
                position += 8
                items.append(
                    self.raw[position : position + length].decode(errors="surrogateescape")
                )
                position += length
        else:
            dtype = "u1" if VALUE_DTYPES[of] == "?" else VALUE_DTYPES[of]
            found = np.frombuffer(self.raw, dtype, self.count, self.at)
            items = (found != 0 if VALUE_DTYPES[of] == "?" else found).tolist()
        return items[0] if self.item is None else items


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header. ``raw_header`` is the file up to ``data_start``, where the data begins."""

    path: Path
    version: int
    alignment: int
    values: dict[str, Value]
    tensors: tuple[Tensor, ...]
    data_start: int
    size: int
    raw_header: bytes = field(repr=False)
    mtime_ns: int

    @property
    def header_sha256(self) -> str:
        """SHA-256 over ``raw_header``."""
        return hashlib.sha256(self.raw_header).hexdigest()


def read_gguf(path: str | Path, *, file: int = 0) -> GgufFile:
    """Read and check the header of the GGUF file ``path``; its tensors get the number ``file``.

    Raises:
        GgufError: when the file is absent, unreadable, incomplete or malformed in any way.
    """
    path = Path(path)
    try:
        fd = files.open_read(path)
    except ReadError as error:
        mlx = (path / "config.json").is_file()
        hint = "it may be an MLX model, which `mbolt-mlx inspect` shows" if mlx else None
        raise GgufError(error.message, path=path, hint=hint) from error
    try:
        size, mtime_ns = files.size_and_mtime(fd)
        return _Reader(fd, path, size, file).parse(mtime_ns)
    except ReadError as error:
        raise GgufError(error.message, path=path, offset=error.offset) from error
    finally:
        files.close(fd)


def parse_header(head: bytes, size: int, path: str | Path, *, file: int = 0) -> GgufFile:
    """As `read_gguf`, of a file that is not written yet: ``head`` is all of it before its data,
    ``size`` its bytes, ``path`` a name for errors.

    Raises:
        GgufError: when the header is malformed.
    """
    return _Reader(None, Path(path), size, file, head).parse(0)


class _Reader:
    """The header's bytes, read as far as they are needed, and a place in them."""

    def __init__(self, fd: int | None, path: Path, size: int, file: int, raw: bytes = b"") -> None:
        self.fd, self.path, self.size, self.file = fd, path, size, file
        self.raw = bytearray(raw)
        self.at = 0

    def wrong(self, message: str, **more: Any) -> MboltError:
        return GgufError(message, path=self.path, **more)

    def need(self, count: int, what: str) -> int:
        """Have ``count`` bytes from here on in memory, go past them, return where they begin."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.wrong(
                f"the file is cut short in {what}",
                offset=start, expected=f"{end} bytes or more", found=self.size,
                hint="download it again",
            )  # fmt: skip
        if end > HEADER_MAX:
            raise self.wrong("the header is longer than 1 GiB", offset=start)
        if end > len(self.raw):
            if self.fd is None:
                raise self.wrong(f"the header is cut short in {what}", offset=start)
            had = len(self.raw)
            self.raw.extend(bytes(min(self.size, max(end, _FIRST_READ, 2 * had)) - had))
            with memoryview(self.raw) as view:
                files.pread_into(self.fd, [view[had:]], had, path=str(self.path))
        self.at = end
        return start

    def number(self, fmt: str, what: str) -> int:
        return struct.unpack_from(fmt, self.raw, self.need(struct.calcsize(fmt), what))[0]

    def name(self, what: str, most: int) -> str:
        """A string that names something: UTF-8, printable, neither empty nor long."""
        at = self.at
        length = self.number("<Q", what)
        if not 0 < length <= most:
            message = "is empty" if not length else "is too long"
            raise self.wrong(f"{what} {message}", offset=at, expected=f"1 to {most}", found=length)
        start = self.need(length, what)
        try:
            text = self.raw[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is not UTF-8", offset=start + error.start) from error
        if not text.isprintable():
            raise self.wrong(f"{what} holds a character that cannot be written", offset=start)
        return text

    def parse(self, mtime_ns: int) -> GgufFile:
        version = self._version()
        tensor_count = self._count("tensors", _TENSOR_LEAST)
        key_count = self._count("keys", _KEY_LEAST)
        places: dict[str, tuple[int, ...]] = {}
        for number in range(key_count):
            self._value(number, places)
        infos: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        for number in range(tensor_count):
            self._info(number, infos)
        alignment = self._alignment(places)
        data_start = -(-self.at // alignment) * alignment
        if data_start > self.size:
            if infos:
                self.at = self.size
                self.need(data_start - self.size, "the padding before its data")
            data_start = self.size  # a file without tensors may end without padding
        self.at = min(self.at, data_start)
        self.need(data_start - self.at, "the padding before its data")
        raw = bytes(memoryview(self.raw)[:data_start])
        values = {key: Value(key, *place, raw) for key, place in places.items()}
        tensors = self._tensors(infos, data_start, alignment)
        return GgufFile(
            self.path, version, alignment, values, tensors, data_start, self.size, raw, mtime_ns
        )

    def _version(self) -> int:
        if not self.size:
            raise self.wrong("the file is empty", hint="download it again")
        self.need(min(self.size, 32), "its first bytes")
        start = bytes(self.raw[:32])
        if start.startswith(_LFS_MAGIC):
            raise self.wrong("a Git-LFS pointer, not the file itself", hint="run git lfs pull")
        if start[:4] != MAGIC[: self.size]:
            raise self.wrong("not a GGUF file", offset=0, expected=MAGIC, found=start[:4])
        self.at = 4
        version = self.number("<I", "its version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise self.wrong("a big-endian GGUF file", offset=4, expected="little-endian")
            hint = "convert the model again" if version < 2 else None
            raise self.wrong(
                "this version of GGUF is not read",
                offset=4, expected="2 or 3", found=version, hint=hint,
            )  # fmt: skip
        return version

    def _count(self, what: str, least: int) -> int:
        """How many ``what`` follow, each of at least ``least`` bytes."""
        at = self.at
        count = self.number("<Q", f"its number of {what}")
        if count > self.size // least:
            raise self.wrong(f"it claims more {what} than it has room for", offset=at, found=count)
        return count

    def _value(self, number: int, places: dict[str, tuple[int, ...]]) -> None:
        start = self.at
        key = self.name(f"the name of key {number}", _KEY_MAX)
        if key in places:
            raise self.wrong(f"the key {key} is there twice", offset=start)
        what = f"the value of {key}"
        kind, item, count = self.number("<I", what), None, 1
        if kind == ARRAY:
            item, count = self.number("<I", what), self.number("<Q", what)
        of, at = kind if item is None else item, self.at
        if of == STRING:
            self._strings(count, what)
        elif of in VALUE_DTYPES:
            self.need(count * np.dtype(VALUE_DTYPES[of]).itemsize, what)
        else:
            nested = item == ARRAY
            message = f"{what} is an array of arrays" if nested else f"{what} has an unknown type"
            raise self.wrong(message, offset=start, found=None if nested else of)
        places[key] = (kind, start, self.at, at, item, count)

    def _strings(self, count: int, what: str) -> None:
        """Go past ``count`` strings."""
        if count > (self.size - self.at) // 8:
            raise self.wrong(f"{what} claims more than the file holds", offset=self.at, found=count)
        unpack, at, had = struct.Struct("<Q").unpack_from, self.at, len(self.raw)
        for _ in range(count):
            if at + 8 > had:
                self.at = at
                self.need(8, what)
                had = len(self.raw)
            (length,) = unpack(self.raw, at)
            at += 8 + length
            if at > had:
                self.at = at - length
                self.need(length, what)
                had = len(self.raw)
        self.at = at

    def _info(self, number: int, infos: dict[str, tuple[int, tuple[int, ...], int, int]]) -> None:
        start = self.at
        name = self.name(f"the name of tensor {number}", _NAME_MAX)
        if name in infos:
            raise self.wrong("a tensor of this name is there twice", tensor=name, offset=start)
        what = f"the entry of tensor {name}"
        rank = self.number("<I", what)
        if rank > _RANK_MAX:
            raise self.wrong(
                "too many dimensions",
                tensor=name, offset=start, expected=f"at most {_RANK_MAX}", found=rank,
            )  # fmt: skip
        shape = tuple(self.number("<Q", what) for _ in range(rank))
        kind, offset = self.number("<I", what), self.number("<Q", what)
        nbytes = nbytes_of(kind, shape, path=self.path, tensor=name, offset=start)
        infos[name] = (kind, shape, offset, nbytes)

    def _alignment(self, places: dict[str, tuple[int, ...]]) -> int:
        if ALIGNMENT_KEY not in places:
            return ALIGNMENT
        kind, start, _, at, _, _ = places[ALIGNMENT_KEY]
        if kind != U32:
            raise self.wrong(f"{ALIGNMENT_KEY} is no u32", offset=start, found=f"type {kind}")
        (found,) = struct.unpack_from("<I", self.raw, at)
        if not found or found & (found - 1):
            raise self.wrong(f"{ALIGNMENT_KEY} is no power of two", offset=start, found=found)
        return found

    def _tensors(
        self,
        infos: dict[str, tuple[int, tuple[int, ...], int, int]],
        data_start: int,
        alignment: int,
    ) -> tuple[Tensor, ...]:
        """The tensors, each of which must begin where the padded ones before it end."""
        tensors, position, end = [], 0, 0
        for name, (kind, shape, offset, nbytes) in infos.items():
            if offset != position:
                raise self.wrong(
                    "its bytes do not begin where the tensor before it ends",
                    tensor=name, offset=min(data_start + offset, _SIZE_MAX),
                    expected=f"byte {position} of the data", found=f"byte {offset}",
                )  # fmt: skip
            end = position + nbytes
            if data_start + end > self.size:
                raise self.wrong(
                    "its bytes end after the file: the file is cut short",
                    tensor=name, offset=data_start + offset,
                    expected=f"{data_start + end} bytes", found=self.size,
                    hint="download it again",
                )  # fmt: skip
            tensors.append(Tensor(name, self.file, kind, shape, data_start + offset, nbytes))
            position = -(-end // alignment) * alignment
        if data_start + position < self.size:
            raise self.wrong(
                "bytes after the last tensor that belong to none",
                offset=data_start + position,
                expected=f"{data_start + position} bytes", found=self.size,
            )  # fmt: skip
        return tuple(tensors)
