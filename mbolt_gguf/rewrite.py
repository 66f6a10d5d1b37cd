"""The rewriter: a GGUF model with its experts in another order, or each in one block.

Streamed in windows of 16 MiB by a few threads, each of which reads what a window is made of and
writes it at once, past the page cache where the drive lets it. Memory does not depend on the model.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mbolt_gguf import ranges
from mbolt_gguf.experts import find_experts
from mbolt_gguf.header import read_gguf
from mbolt_gguf.model import Model
from mbolt_gguf.permute import DEFAULT_LAYOUT, parse_layout
from mbolt_gguf.plan import Plan, make_plan
from mbolt_gguf.ranges import Layout
from mbolt_gguf.target import (
    check_space,
    check_targets,
    default_output,
    named_already,
    targets_of,
)
from mbolt_gguf.verify import compare
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import MboltError, OutputError
from mbolt_mlx.core.output import Output, open_output, partial_paths
from mbolt_mlx.core.progress import Progress
from mbolt_mlx.core.scatter import Scatterer, aligned_buffer
from mbolt_mlx.core.workers import work_through
from mbolt_mlx.profile.perms import Perms

THREADS = 3
CHECKPOINT_BYTES = 256 << 20


@dataclass(frozen=True)
class Report:
    """What a rewrite did: the ``paths`` of its files and their ``bytes``, of which an earlier run
    had written ``resumed``. ``write_seconds`` includes bringing every byte to the drive."""

    paths: tuple[Path, ...]
    bytes: int
    resumed: int
    layout: str
    notes: tuple[str, ...]
    write_seconds: float
    verify_seconds: float


def rewrite(
    model: Model | str | Path,
    perms: Perms | None = None,
    output: str | Path | None = None,
    *,
    layout: str = DEFAULT_LAYOUT,
    force: bool = False,
    verify: bool = True,
    progress: bool = True,
    resume: bool = True,
    before: Callable[[Plan, Path], None] | None = None,
) -> Report:
    """Write ``model`` in the layout ``layout`` to ``output``, as many files as it has itself.

    An interrupted run leaves hidden partial files that the next run continues; no file has its
    final name before all are whole, and with ``verify`` not before every byte was read back from
    the drive and compared with the model.

    Args:
        perms: the profile; may be left out for layouts that move no expert.
        output: the new file (default: beside the model); a split model's names get numbers.
        layout: see `permute.LAYOUT_HELP`.
        force: replace files that exist.
        before: called with the plan and the first file's name when all else has been checked and
            nothing has been written; it may raise to stop.

    Raises:
        GgufError, UnsupportedError, UsageError: when the model cannot be rewritten so.
        OutputError: when it cannot be written here, or the model changes meanwhile.
        VerifyError: when it does not read back as it should; nothing is kept then.
        ReadError: when the model cannot be read.
    """
    wish = parse_layout(layout)
    if not isinstance(model, Model):
        model = Model.open(model)
    plan = make_plan(model, find_experts(model), perms, wish)
    output = Path(output) if output is not None else default_output(model, plan.layout)
    targets = targets_of(model, output)
    check_targets(model, targets, output)
    stamps = [_stamp(model, file) for file in plan.files]
    done = named_already(targets, plan, stamps[0] if resume else None, force=force)
    if len(done) == len(targets):  # only the end of tidying up is missing
        for target in targets:
            files.unlink(partial_paths(target)[1])
        return Report(tuple(targets), plan.size, plan.size, plan.layout, plan.notes, 0.0, 0.0)
    check_space(targets, plan, done)
    if before is not None:
        before(plan, targets[0])
    run = _Rewrite(model, plan, targets, stamps, done, resume)
    with ExitStack() as stack:
        # Held to the end: no second process writes these files meanwhile.
        first = stack.enter_context(run.open(0, resume=resume))
        started = time.perf_counter()
        resumed = run.write(first, progress)
        written = time.perf_counter()
        run.check_unchanged(first)
        if verify:
            run.read_back(first, progress)
        verified = time.perf_counter()
        run.commit(first)
    write_seconds = written - started + time.perf_counter() - verified
    return Report(
        tuple(targets), plan.size, resumed, plan.layout, plan.notes, write_seconds,
        verified - written,
    )  # fmt: skip


class _Rewrite:
    """One run over the windows of a plan's files. A window's unit is its number in its file."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        targets: Sequence[Path],
        stamps: Sequence[str],
        done: set[int],
        resume: bool,
    ) -> None:
        self.model = model
        self.plan = plan
        self.targets = targets
        self.done = done
        self.resume = resume
        self.stamps = stamps
        self._since = 0
        self._lock = threading.Lock()

    def open(self, number: int, *, resume: bool) -> Output:
        """The partial file ``number``, begun or gone on with."""
        target, size = self.targets[number], self.plan.files[number].size
        return open_output(target, size, self.stamps[number], resume=resume, direct=True)

    def write(self, first: Output, progress: bool) -> int:
        """Write all windows that are not done; returns how many bytes were."""
        resumed = 0
        with Progress("writing", self.plan.size, shown=progress) as bar:
            for number, file in enumerate(self.plan.files):
                if number in self.done:
                    before = file.size
                    bar.skip(before)
                elif number == 0:
                    before = self._write_file(first, file, bar)
                else:
                    with self.open(number, resume=self.resume) as out:
                        before = self._write_file(out, file, bar)
                resumed += before
        return resumed

    def _write_file(self, out: Output, file: Layout, bar: Progress) -> int:
        jobs = [window for window in file.windows() if window[0] not in out.done]
        before = file.size - sum(hi - lo for _, lo, hi in jobs)
        bar.skip(before)
        try:
            work_through(jobs, lambda: self._writer(out, file, bar), THREADS)
        except BaseException:
            _keep(out)
            raise
        out.checkpoint()
        return before

    def _writer(self, out: Output, file: Layout, bar: Progress):
        scatterer = Scatterer([f.path for f in self.model.files])
        buffer = aligned_buffer(ranges.WINDOW_BYTES)

        def do(job: tuple[int, int, int]) -> None:
            number, lo, hi = job
            part = buffer[: hi - lo]
            file.fill(scatterer, lo, hi, part)
            out.write(memoryview(part), lo)
            bar.advance(hi - lo)
            out.record(number, "")
            self._maybe_checkpoint(out, hi - lo)

        return do

    def _maybe_checkpoint(self, out: Output, written: int) -> None:
        with self._lock:
            self._since += written
            if self._since < CHECKPOINT_BYTES:
                return
            self._since = 0
        out.checkpoint()

    def read_back(self, first: Output, progress: bool) -> None:
        """Compare the files with the model, from the drive, while they are still hidden."""
        paths = [
            target if number in self.done else partial_paths(target)[0]
            for number, target in enumerate(self.targets)
        ]
        try:
            found = tuple(read_gguf(path, file=number) for number, path in enumerate(paths))
            tensors = {t.name: t for file in found for t in file.tensors}
            compare(self.model, Model(paths[0], found, tensors), progress=progress)
        except MboltError:
            self.discard(first)
            raise

    def check_unchanged(self, first: Output) -> None:
        """The rewrite is worth nothing when the model changed under it."""
        for file in self.model.files:
            fd = files.open_read(file.path)
            try:
                same = files.size_and_mtime(fd) == (file.size, file.mtime_ns)
            finally:
                files.close(fd)
            if not same:
                self.discard(first)
                raise OutputError("the model changed while it was read", path=file.path)

    def commit(self, first: Output) -> None:
        """Give all files their names, the first one last.

        Old files go before the first new name appears, so that files of two rewrites are never
        taken for one model.
        """
        if len(self.targets) > 1:
            for number, target in enumerate(self.targets):
                if number not in self.done:
                    files.unlink(target)
        for number in range(1, len(self.targets)):
            if number in self.done:
                files.unlink(partial_paths(self.targets[number])[1])
            else:
                with self.open(number, resume=True) as out:
                    out.commit()
        first.commit()

    def discard(self, first: Output) -> None:
        """Remove all that was written."""
        for number in range(1, len(self.targets)):
            if number not in self.done:
                for path in partial_paths(self.targets[number]):
                    files.unlink(path)
        first.discard()


def _keep(out: Output) -> None:
    """Save what is done for a later run, whatever stopped this one."""
    try:
        out.checkpoint()
    except OutputError:
        pass  # the reason that stopped the run is already on its way


def _stamp(model: Model, file: Layout) -> str:
    """SHA-256 over all that decides the bytes of a new file, the model's times included."""
    digest = hashlib.sha256(file.head)
    for part in file.parts:
        digest.update(repr((part.name, part.offset, part.nbytes)).encode())
        for rows in part.rows:
            digest.update(repr((rows.file, rows.base, rows.from_stride, rows.nbytes)).encode())
            digest.update(repr([int(e) for e in rows.order]).encode())
    for source in model.files:
        known = (source.path.name, source.size, source.mtime_ns, source.header_sha256)
        digest.update(repr(known).encode())
    digest.update(str(ranges.WINDOW_BYTES).encode())
    return digest.hexdigest()
