"""A bar on stderr for jobs that go through many bytes; nothing where stderr is not a terminal."""

from __future__ import annotations

import sys
import threading


class Progress:
    """Counts bytes towards ``total``; may be advanced by any thread."""

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self._lock = threading.Lock()
        self._bar = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, smoothing=0.1
            )

    def skip(self, done: int) -> None:
        """Count ``done`` more bytes that an earlier run did, without counting them as speed."""
        if self._bar is not None and done:
            self._bar.initial += done
            self._bar.n += done
            self._bar.refresh()

    def advance(self, done: int) -> None:
        """Count ``done`` more bytes."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
