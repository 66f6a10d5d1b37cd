"""A GGUF model: one file, or all the files of a split one.

llama-gguf-split names the files ``<prefix>-00001-of-00003.gguf`` and so on, and gives each the keys
split.no (u16, from 0), split.count (u16) and split.tensors.count (i32, of the whole model). All
other metadata stands in the first file, which may hold no tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbolt_gguf.header import GgufFile, Tensor, Value, read_gguf
from mbolt_mlx.core.errors import GgufError

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
ARCHITECTURE = "general.architecture"
_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True)
class Model:
    """All files of a model; ``path`` is its first file, ``values`` the metadata that stands there,
    ``tensors`` are by name and in the order of files and bytes."""

    path: Path
    files: tuple[GgufFile, ...]
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, path: str | Path) -> Model:
        """Open the model that ``path`` is, or is a file of.

        Raises:
            GgufError: when a file is absent or malformed, or the files do not belong together.
        """
        path = Path(path)
        given = read_gguf(path)
        count = _number(given, SPLIT_COUNT, 1)
        if count > 1:
            files = _open_split(path, given, count)
        elif _number(given, SPLIT_NO, 0):
            raise GgufError(f"one file of a split model, without {SPLIT_COUNT}", path=path)
        else:
            files = (given,)
        names = Counter(tensor.name for file in files for tensor in file.tensors)
        for file in files:
            for tensor in file.tensors:
                if names[tensor.name] > 1:
                    raise GgufError("in two files of the model", path=file.path, tensor=tensor.name)
        _check_count(files, sum(names.values()))
        model = cls(files[0].path, files, {t.name: t for file in files for t in file.tensors})
        arch = model.values.get(ARCHITECTURE)
        if arch is None or not isinstance(arch.get(), str) or not arch.get().isprintable():
            raise GgufError(f"it has no {ARCHITECTURE}", path=model.path)
        return model

    @property
    def values(self) -> dict[str, Value]:
        """The metadata of the first file, by key, in the order of the file."""
        return self.files[0].values

    @property
    def arch(self) -> str:
        """The architecture, such as "qwen3moe"."""
        return self.values[ARCHITECTURE].get()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def split(self) -> bool:
        """Whether there is more than one file."""
        return len(self.files) > 1

    @property
    def stamp(self) -> str:
        """SHA-256 over the files' names, sizes and header hashes, as in side-file manifests."""
        known = sorted([f.path.name, f.size, f.header_sha256] for f in self.files)
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value ``key``, or the one with the architecture's name before it."""
        found = self.values.get(key) or self.values.get(f"{self.arch}.{key}")
        return default if found is None else found.get()

    def file_of(self, tensor: Tensor) -> Path:
        """The path of the file that holds ``tensor``."""
        return self.files[tensor.file].path


def split_name(prefix: str, number: int, count: int) -> str:
    """The name of file ``number`` (from 0) of a split model, as llama-gguf-split writes it."""
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


def split_prefix(path: str | Path, number: int, count: int) -> str | None:
    """The part before the numbers in the name of file ``number`` (from 0) of a split model; None
    when ``path`` is not named as such a file."""
    found = _SPLIT_NAME.match(Path(path).name)
    if found is None or (int(found["number"]), int(found["count"])) != (number + 1, count):
        return None
    return found["prefix"]


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.values.get(key)
    if value is None:
        return default
    found = value.get()
    if type(found) is not int or found < 0:
        raise GgufError(f"{key} has no meaning", path=file.path, offset=value.start, found=found)
    return found


def _open_split(path: Path, given: GgufFile, count: int) -> tuple[GgufFile, ...]:
    own = _number(given, SPLIT_NO, 0)
    prefix = split_prefix(path, own, count)
    if prefix is None:
        raise GgufError(
            "the name of a split model's file does not say which it is",
            path=path, expected=split_name("NAME", own, count),
            hint="give the file the name that it had",
        )  # fmt: skip
    files = []
    for number in range(count):
        place = path.with_name(split_name(prefix, number, count))
        if not place.exists():
            raise GgufError(
                f"file {number + 1} of the {count} of this model is absent",
                path=place, hint="download it into the same folder",
            )  # fmt: skip
        file = read_gguf(place, file=number)
        for key, expected in ((SPLIT_NO, number), (SPLIT_COUNT, count)):
            found = _number(file, key, -1 if key == SPLIT_COUNT else 0)
            if found != expected:
                raise GgufError(
                    f"{key} does not match its name", path=place, expected=expected, found=found
                )
        files.append(file)
    return tuple(files)


def _check_count(files: tuple[GgufFile, ...], found: int) -> None:
    """Compare the number of tensors with what the files say of it."""
    for file in files:
        expected = _number(file, SPLIT_TENSORS, found)
        if len(files) > 1 and expected != found:
            raise GgufError(
                "the files of the model do not hold as many tensors as this one says",
                path=file.path, expected=expected, found=found,
            )  # fmt: skip
