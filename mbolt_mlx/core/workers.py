"""A few threads that work through a list, and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Job = TypeVar("Job")


def work_through(
    jobs: Iterable[Job], make_worker: Callable[[], Callable[[Job], None]], threads: int
) -> None:
    """Give every job to one of ``threads`` threads, in order; 0 is the calling thread.

    ``make_worker`` is called once in each thread and returns what does a job, so that a worker
    can own buffers. The first exception, an interrupt included, stops all threads after the job
    that each has in hand and is raised here.
    """
    source: Iterator[Job] = iter(jobs)
    if threads == 0:
        do_here = make_worker()
        for job in source:
            do_here(job)
        return
    lock = threading.Lock()
    stop = threading.Event()
    failed: list[BaseException] = []

    def loop() -> None:
        try:
            do = make_worker()
            while not stop.is_set():
                with lock:
                    job = next(source, stop)
                if job is stop:
                    return
                do(job)  # type: ignore[arg-type]
        except BaseException as error:
            failed.append(error)
            stop.set()

    running = [threading.Thread(target=loop, name=f"mbolt-{i}") for i in range(threads)]
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    except BaseException:
        stop.set()
        for thread in running:
            if thread.ident is not None:
                thread.join()
        raise
    if failed:
        raise failed[0]
