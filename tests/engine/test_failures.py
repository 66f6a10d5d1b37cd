"""Drives that fail, files that vanish, Ctrl-C at any moment: an error in a line, then right again.

Faults come through one seam, ``os.preadv`` as `mbolt_mlx.core.files` sees it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest

from mbolt_mlx.core import aio, files
from mbolt_mlx.core.errors import ReadError
from tests.engine.kit import Faults, eio, ids, layers_of, load, run_python

SHAPE = dict(experts=16, top_k=4)
WAYS = [(1, 1), (1, 40), (3, 1), (2, 30)]


@pytest.fixture(scope="module")
def wanted(make, stock):
    """Stock's logits for each of ``WAYS``."""
    model = stock(make(**SHAPE))[0]
    return {way: np.array(model(ids(*way))).tobytes() for way in WAYS}


def assert_right(model, wanted) -> None:
    for way in [*WAYS, *reversed(WAYS)]:
        assert np.array(model(ids(*way))).tobytes() == wanted[way], way


@pytest.mark.parametrize("resident", [0.25, 0.6])
@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN])
def test_a_drive_that_fails_now_and_then(make, wanted, monkeypatch, resident, number):
    model = load(make(**SHAPE), resident=resident)
    Faults(monkeypatch, lambda n, *_: OSError(number, os.strerror(number)) if n % 5 == 0 else None)
    assert_right(model, wanted)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("resident", [0.25, 0.6])
@pytest.mark.parametrize("way", WAYS)
def test_a_drive_that_fails_for_good_and_is_mended(
    make, wanted, monkeypatch, resident, way, direct
):
    path = make(**SHAPE)
    model = load(path, resident=resident, direct=direct)
    for start in (1, 6):
        mx.eval(model(ids(1, 3, seed=start)))
        faults = Faults(monkeypatch, lambda n, *_, start=start: eio() if n >= start else None)
        with pytest.raises(ReadError) as caught:
            for seed in range(50):
                mx.eval(model(ids(*way, seed=seed)))
        text = str(caught.value)
        assert text.startswith(f"{path}/model.safetensors: byte ") and "\n" not in text
        assert text.endswith("read failed: Input/output error")
        with pytest.raises(ReadError):  # and stays so
            for seed in range(50, 100):
                mx.eval(model(ids(*way, seed=seed)))
        faults.clear()
        assert_right(model, wanted)
        monkeypatch.undo()


@pytest.mark.parametrize("way", WAYS)
def test_the_kernels_own_reads_fail_now_and_then_and_for_good(
    make, wanted, monkeypatch, reading, way
):
    model = load(make(**SHAPE), resident=0.25, **reading)
    real, count = aio.Queue.wait, [0]

    def wait(queue, at_least):
        count[0] += 1
        ended = real(queue, at_least)
        return [(r, n if (count[0] + k) % 3 else -errno.EIO) for k, (r, n) in enumerate(ended)]

    monkeypatch.setattr(aio.Queue, "wait", wait)
    assert_right(model, wanted)
    assert bool(count[0]) == bool(reading)
    faults = Faults(monkeypatch, lambda *_: eio())
    with pytest.raises(ReadError, match="read failed: Input/output error"):
        for seed in range(50):
            mx.eval(model(ids(*way, seed=seed)))
    faults.clear()
    assert_right(model, wanted)
    assert still_reads_so(model, reading)


def test_one_bad_place_spoils_only_what_needs_it(make, wanted, monkeypatch):
    model = load(make(**SHAPE), resident=0.25)
    store = layers_of(model)[1].slots.store
    bad = range(store.runs[0].offsets[3], store.runs[0].offsets[3] + store.runs[0].nbytes)
    monkeypatch.setattr("mbolt_mlx.core.reads.MERGE_MAX", 0)
    Faults(monkeypatch, lambda n, fd, offset: eio() if offset in bad else None)
    failed = 0
    for seed in range(12):
        try:
            mx.eval(model(ids(1, 1, seed=seed)))
        except ReadError as error:
            failed += 1
            assert error.offset in bad
    assert 0 < failed < 12
    monkeypatch.undo()
    assert_right(model, wanted)


@pytest.fixture
def own_copy(make, tmp_path):
    return shutil.copytree(make(**SHAPE), tmp_path / "own")


@pytest.mark.parametrize("source", ["shard", "side-file"])
@pytest.mark.parametrize("what", ["deleted", "unreadable", "truncated", "emptied"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_changes_while_it_is_used(
    own_copy, make, side_file_of, tmp_path, wanted, source, what, direct
):
    if source == "side-file":
        original = side_file_of(make(**SHAPE))
        victim = tmp_path / "own.experts"
        shutil.copy(original, victim)
        shutil.copy(f"{original}.manifest.json", f"{victim}.manifest.json")
        model = load(make(**SHAPE), resident=0.25, side_file=victim, direct=direct)
    else:
        victim = own_copy / "model.safetensors"
        model = load(own_copy, resident=0.25, direct=direct)
    mx.eval(model(ids(1, 5)))
    if what == "deleted":
        victim.unlink()
    elif what == "unreadable":
        victim.chmod(0)
    if what in ("deleted", "unreadable"):
        assert_right(model, wanted)  # what is open stays open
        return
    whole = victim.read_bytes()
    os.truncate(victim, 0 if what == "emptied" else len(whole) // 3)
    with pytest.raises(ReadError) as caught:
        for seed in range(20):
            mx.eval(model(ids(1, 30, seed=seed)))
    assert str(caught.value).startswith(f"{victim}: byte ")
    assert "ends too early" in str(caught.value) and "\n" not in str(caught.value)
    with victim.open("r+b") as file:
        file.write(whole)
    assert_right(model, wanted)


class InterruptAt:
    """A tracer that raises KeyboardInterrupt at the n-th line that runs in the engine."""

    ROOMS = ("/mbolt_mlx/engine/", "/mbolt_mlx/core/")

    def __init__(self, line: int) -> None:
        self.line, self.seen, self.where = line, 0, ""

    def __call__(self, frame, event, argument):
        return self._each if any(r in frame.f_code.co_filename for r in self.ROOMS) else None

    def _each(self, frame, event, argument):
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._each

    def run(self, action) -> bool:
        """Whether ``action`` was cut short."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)


@pytest.fixture(params=["threads", "kernel"])
def reading(request, make, side_file_of):
    """How to load so that threads read, or the kernel by itself, where it can."""
    if request.param == "threads":
        return {}
    side_file = side_file_of(make(**SHAPE))
    try:
        aio.Queue(1)
        fd = files.open_read(side_file, direct=True)
        alignment = files.direct_alignment(fd)
        os.close(fd)
    except (OSError, ReadError):
        pytest.skip("no direct reads by the kernel itself here")
    if alignment > files.DIRECT_ALIGN:
        pytest.skip("the small model's pieces are not aligned for direct reads here")
    return dict(side_file=side_file, direct=True)


def still_reads_so(model, reading) -> bool:
    fetcher = layers_of(model)[0].fetcher
    return fetcher.asynchronous == bool(reading) and fetcher._reader._started != bool(reading)


@pytest.mark.parametrize("policy", ["lru", "decayed"])
@pytest.mark.parametrize(("way", "stride"), [((1, 1), 12), ((1, 40), 250)])
def test_an_interrupt_between_any_two_lines(make, wanted, reading, policy, way, stride):
    model = load(make(**SHAPE), resident=0.25, policy=policy, **reading)
    pick = random.Random(f"{policy}{way}")
    line, cut = 0, 0
    while True:
        line += pick.randint(1, 2 * stride)
        interrupt = InterruptAt(line)
        if not interrupt.run(lambda: model(ids(*way))):
            break
        cut += 1
        for again in (way, (1, 40), (1, 1)):
            got = np.array(model(ids(*again))).tobytes()
            assert got == wanted[again], f"{interrupt.where} spoilt {again}"
    assert cut > 8 and still_reads_so(model, reading)


@pytest.mark.parametrize("way", [(1, 1), (1, 40)])
def test_an_interrupt_while_reads_are_under_way(make, wanted, monkeypatch, way):
    """The first Ctrl-C comes while waiting for a slow drive, the second at once after it."""
    import time

    from mbolt_mlx.core import reads

    model = load(make(**SHAPE), resident=0.25)
    slow = [True]
    Faults(monkeypatch, lambda *_: time.sleep(0.03 if slow[0] else 0))
    take = reads.Batch.take
    for n in (1, 2, 3):
        left = [n]

        def interrupted(batch, at_least=1, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return take(batch, at_least)

        monkeypatch.setattr(reads.Batch, "take", interrupted)
        slow[0] = True
        with pytest.raises(KeyboardInterrupt):
            for seed in range(5):
                mx.eval(model(ids(*way, seed=seed)))
        monkeypatch.setattr(reads.Batch, "take", take)
        slow[0] = False
        assert_right(model, wanted)


@pytest.mark.slow
def test_a_real_ctrl_c_while_generating(make, stock, reading):
    """Signals at random moments in a process of its own; the text afterwards is stock's."""
    import mlx_lm

    path = make(**SHAPE)
    model, tokenizer = stock(path)
    text = mlx_lm.generate(model, tokenizer, "once upon a time", max_tokens=6)
    printed = run_python(
        """
import random, signal, sys, mlx_lm, mbolt_mlx
side_file = sys.argv[3] if sys.argv[3:] else None
model, tokenizer = mbolt_mlx.load(
    sys.argv[1], resident=0.25, side_file=side_file, direct=bool(side_file)
)
pick, cut = random.Random(0), 0
say = lambda: mlx_lm.generate(model, tokenizer, "once upon a time", max_tokens=6)
say()
for _ in range(10):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, pick.uniform(0.001, 0.06))
    try:
        say()
    except KeyboardInterrupt:
        cut += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if cut and say() != sys.argv[2]:
        sys.exit("another text after an interrupt")
print(cut, say() == sys.argv[2])
""",
        str(path),
        text,
        *(str(reading[key]) for key in reading if key == "side_file"),
    ).split()
    assert int(printed[0]) > 2 and printed[1] == "True"


MANY = """
import resource, sys
import mlx.core as mx, mlx_lm, mbolt_mlx  # mlx_lm raises the limit when it is imported
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
for resident in (0.25, 1.0):
    model, _ = mbolt_mlx.load(sys.argv[1], resident=resident, side_file=None)
    y = model(mx.arange(1, 41)[None])
    mx.eval(y)
    del model
import hashlib, numpy as np
print(hashlib.sha256(np.array(y).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_144_shards_with_256_open_files(make, stock):
    import hashlib

    path = make(layers=9, experts=16, top_k=4, per_expert=True, shards=144, hidden=32, width=16)
    assert len(list(path.glob("*.safetensors"))) == 144
    model = stock(path)[0]
    wanted = hashlib.sha256(np.array(model(mx.arange(1, 41)[None])).tobytes()).hexdigest()
    assert run_python(MANY, str(path)).split()[-1] == wanted


@pytest.mark.slow
def test_two_processes_on_the_same_files(make, stock, side_file_of):
    from concurrent.futures import ThreadPoolExecutor

    import mlx_lm

    path = make(**SHAPE)
    model, tokenizer = stock(path)
    text = mlx_lm.generate(model, tokenizer, "once upon a time", max_tokens=20)
    code = """
import sys, mlx_lm, mbolt_mlx
model, tokenizer = mbolt_mlx.load(sys.argv[1], resident=0.25, side_file=sys.argv[2])
sys.stdout.write(mlx_lm.generate(model, tokenizer, "once upon a time", max_tokens=20))
"""
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(run_python, code, str(path), str(side_file_of(path))) for _ in "ab"]
        assert [run.result() for run in runs] == [text, text]
