"""Where the files of a rewrite may go, and what an earlier run left there."""

from __future__ import annotations

from pathlib import Path

from mbolt_gguf.model import Model, split_name, split_prefix
from mbolt_gguf.plan import Plan
from mbolt_gguf.ranges import Layout
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import OutputError, ReadError
from mbolt_mlx.core.output import partial_paths
from mbolt_mlx.core.sizes import format_size

SUFFIX = ".gguf"


def default_output(model: Model, layout: str) -> Path:
    """``NAME-mbolt-LAYOUT.gguf`` beside the model; of a split model without its numbers."""
    name = split_prefix(model.path, 0, len(model.files)) if model.split else None
    stem = name or model.path.name.removesuffix(SUFFIX)
    return model.path.with_name(f"{stem}-mbolt-{layout.replace('+', '-')}{SUFFIX}")


def targets_of(model: Model, output: Path) -> list[Path]:
    """The files that a rewrite of ``model`` to ``output`` makes.

    Of a split model ``output`` may be named as one of the new files, or without numbers.
    """
    count = len(model.files)
    if count == 1:
        return [output]
    prefix = next((p for n in range(count) if (p := split_prefix(output, n, count))), None)
    prefix = prefix or output.name.removesuffix(SUFFIX)
    return [output.with_name(split_name(prefix, n, count)) for n in range(count)]


def check_targets(model: Model, targets: list[Path], output: Path) -> None:
    """Refuse places where a rewrite would harm the model, or cannot be written.

    Raises:
        OutputError: with the reason.
    """
    for target in [output, *targets]:
        for file in model.files:
            if files.is_same_file(target, file.path):
                raise OutputError(
                    "the output is the model itself", path=target, hint="choose another name"
                )
        if target.is_symlink():
            raise OutputError("a link; name the file itself", path=target)
        if target.is_dir():
            raise OutputError("a folder; name a file in it", path=target)
    for target in targets:
        if target.name.startswith("."):
            raise OutputError("not a name for a model", path=target)
        if not target.parent.is_dir():
            raise OutputError("no such folder", path=target.parent)


def named_already(targets: list[Path], plan: Plan, stamp: str | None, *, force: bool) -> set[int]:
    """The numbers of the files that an interrupted run has given their names.

    Files get their names once all are whole, the first one last. So while the first is hidden,
    under the same ``stamp``, others that begin as planned are ours; and so are all together when
    only its journal is left. None are for a ``stamp`` of None.

    Raises:
        OutputError: when another file has one of the names, unless ``force``.
    """
    done: set[int] = set()
    partial, journal = partial_paths(targets[0])
    if stamp and _is_journal_of(journal, stamp) and partial.exists() != targets[0].exists():
        begun = zip(targets, plan.files, strict=True)
        done = {number for number, (target, file) in enumerate(begun) if _begins_as(target, file)}
        if targets[0].exists() and len(done) < len(targets):
            done = set()
    for number, target in enumerate(targets):
        if target.exists() and number not in done and not force:
            raise OutputError("exists", path=target, hint="choose another name, or --force")
    return done


def _is_journal_of(path: Path, stamp: str) -> bool:
    try:
        return stamp.encode() in files.read_whole(path, limit=1 << 30).partition(b"\n")[0]
    except ReadError:
        return False


def _begins_as(path: Path, file: Layout) -> bool:
    """Whether ``path`` has the size and the header of ``file``."""
    try:
        fd = files.open_read(path)
    except ReadError:
        return False
    try:
        if files.size_and_mtime(fd)[0] != file.size:
            return False
        head = bytearray(len(file.head))
        files.pread_into(fd, [memoryview(head)], 0, path=str(path))
        return head == file.head
    finally:
        files.close(fd)


def check_space(targets: list[Path], plan: Plan, done: set[int]) -> None:
    """Refuse when the files that are not there yet do not fit on the drive.

    Raises:
        OutputError: with the bytes that are needed and free.
    """
    needed = sum(
        file.size - min(file.size, files.allocated_bytes(partial_paths(target)[0]))
        for number, (target, file) in enumerate(zip(targets, plan.files, strict=True))
        if number not in done
    )
    free = files.free_space(targets[0].parent)
    if needed > free:
        raise OutputError(
            "the drive has too little space", path=targets[0],
            expected=f"{format_size(needed)} ({needed} bytes) more",
            found=f"{format_size(free)} ({free} bytes) free",
        )  # fmt: skip
