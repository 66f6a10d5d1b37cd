"""Open files, reading threads and counters that all layers of a model share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx
import numpy as np

from mbolt_mlx.core import files, reads
from mbolt_mlx.engine.slots import LayerSlots
from mbolt_mlx.engine.stats import PhaseStats
from mbolt_mlx.storage.store import Store


class Fetcher:
    """Reads experts into slots.

    Args:
        store: the files.
        threads: reads in flight at a time.
        direct: bypass the page cache.
    """

    def __init__(self, store: Store, *, threads: int, direct: bool) -> None:
        self.store = store
        self.direct = direct
        self.counts = PhaseStats()
        #: called with each layer's number and choices ``[..., top_k]``, while they are recorded; of
        #: numpy where the engine has read them back
        self.note: Callable[[int, mx.array | np.ndarray], None] | None = None
        self._align = 0
        self._fds: list[int] = []
        self._paths: dict[int, str] = {}
        self._reader = reads.Reader(threads, self._paths, direct=direct)
        # The model has no end of its own: its files are closed when it is no longer used.
        self.close = weakref.finalize(self, _close, self._reader, self._fds)

    def open(self) -> None:
        """Open the files. MLX holds its own until the dense weights are in memory, so after that.

        Raises:
            ReadError: naming the file that cannot be opened.
        """
        for path in self.store.files:
            self._fds.append(files.open_read(path, direct=self.direct))
            self._paths[self._fds[-1]] = str(path)
            if self.direct:
                self._align = max(self._align, files.direct_alignment(self._fds[-1]))
            else:
                files.advise_random(self._fds[-1])

    @property
    def threads(self) -> int:
        """Reads in flight at a time."""
        return self._reader.threads

    @property
    def asynchronous(self) -> bool:
        """Whether reads go to the kernel's own queue, as far as it was tried (see `core.aio`)."""
        return self._reader.asynchronous

    def start(
        self,
        slots: LayerSlots,
        experts: Sequence[int],
        into: Sequence[int],
        batch: reads.Batch,
    ) -> None:
        """Begin to read ``experts`` of the layer into the slots ``into``, as part of ``batch``."""
        requests = slots.requests(self._fds, experts, into, align=self._align)
        runs = len(slots.store.runs)
        if len(requests) > 1:
            requests = reads.merge(requests)
        if runs > 1:
            # Expert by expert, so that the first is complete early.
            rank = {expert: n for n, expert in enumerate(experts)}
            requests.sort(key=lambda request: rank[request.tags[0]])
        counts = self.counts
        counts.reads += len(requests)
        counts.bytes += sum(request.nbytes for request in requests)
        batch.tags_left += len(experts)
        if runs > 1:
            batch.parts.update(dict.fromkeys(experts, runs))
        self._reader.start(requests, batch)

    def wait(self, batch: reads.Batch, count: int) -> list[int]:
        """Wait until at least ``count`` experts of ``batch`` are complete; return all that are.

        Raises:
            ReadError: when the drive failed; the batch has ended by then.
        """
        complete: list[int] = []
        start = perf_counter()
        step = 1
        try:
            if count >= batch.tags_left:
                self._reader.help(batch)
                step = batch.left
            while len(complete) < count and batch.left:
                for request in batch.take(step):
                    if not batch.parts:
                        complete += request.tags
                        continue
                    for expert in request.tags:
                        batch.parts[expert] -= 1
                        if not batch.parts[expert]:
                            complete.append(expert)
        finally:
            self.counts.read_wait_s += perf_counter() - start
        batch.tags_left -= len(complete)
        return complete


def _close(reader: reads.Reader, fds: list[int]) -> None:
    """End the threads and close the files."""
    reader.close()
    while fds:
        files.close(fds.pop())
