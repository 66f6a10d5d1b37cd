"""Linux's two lists, on a few pages."""

import numpy as np

from mbolt_gguf.page_cache import BATCH, PageCache

NONE = np.arange(0)


def block(number):
    return number * BATCH, (number + 1) * BATCH


def read(cache, *numbers):
    """Use blocks of `BATCH` pages, and say which had to be read."""
    out = []
    for number in numbers:
        missing = cache.missing(*block(number))
        if len(missing):
            out.append(number)
        cache.read(missing)
    return out


def test_use_does_not_keep_an_expert():
    """First in, first out: the experts' part of the memory map is advised random."""
    cache = PageCache(8 * BATCH, 3 * BATCH, NONE)
    assert read(cache, 0, 1, 2) == [0, 1, 2]
    assert read(cache, 0, 0, 3) == [3]
    assert [len(cache.missing(*block(n))) for n in range(4)] == [BATCH, 0, 0, 0]


def test_what_comes_back_soon_stays_longer():
    """After fewer pages left than are active: here the steady ones are."""

    def reads_of_the_first(steady):
        pages = np.arange(201 * BATCH, (201 + steady) * BATCH)
        cache = PageCache((201 + steady) * BATCH, (4 + steady) * BATCH, pages)
        found = 0
        for number in range(1, 201):
            cache.use_steady()
            found += len(read(cache, 0))
            read(cache, number)
        return found

    assert reads_of_the_first(0) == 50  # in 4 places it goes with every fourth that comes
    assert reads_of_the_first(2) < 10


def test_steady_pages_stay():
    steady = np.arange(BATCH)
    cache = PageCache(40 * BATCH, 4 * BATCH, steady)
    for number in range(1, 40):
        cache.use_steady()
        read(cache, number)
    assert not len(cache.missing(0, BATCH))
    unused = PageCache(40 * BATCH, 4 * BATCH, NONE)
    read(unused, *range(40))
    assert len(unused.missing(0, BATCH)) == BATCH


def test_memory_is_never_more_than_there_is_room():
    rng = np.random.default_rng(0)
    cache = PageCache(50 * BATCH, 7 * BATCH, np.arange(BATCH), kept=0.01)
    for number in rng.integers(1, 50, 500):
        cache.use_steady()
        read(cache, number)
        assert 50 * BATCH - len(cache.missing(0, 50 * BATCH)) <= 7 * BATCH


def test_pages_that_are_spared_leave_holes():
    def parts(kept):
        cache = PageCache(60 * BATCH, 20 * BATCH, NONE, kept=kept)
        read(cache, *range(60))
        missing = [len(cache.missing(*block(n))) for n in range(60)]
        return sum(0 < n < BATCH for n in missing)

    assert parts(0.0) == 0 < parts(0.05)


def test_nothing_is_read_twice_where_all_fits():
    cache = PageCache(6 * BATCH, 6 * BATCH, NONE)
    assert read(cache, *range(6), *range(6)) == [*range(6)]
    assert cache.read_in == 6 * BATCH
