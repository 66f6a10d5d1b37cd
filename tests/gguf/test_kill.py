"""A rewrite that is killed leaves no file under a final name that is not whole."""

import contextlib
import hashlib
import os
import signal
import time

import numpy as np
import pytest

from mbolt_gguf import ranges
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import OutputError
from mbolt_mlx.core.output import partial_paths
from mbolt_mlx.profile.perms import read_perms
from tests.gguf import made
from tests.rewriters import Rewriters

# Started once; forks a rewriter for each line, because starting Python takes longer than a rewrite.
REWRITERS = """
import os, sys, time
from mbolt_mlx.core import files
from mbolt_gguf import ranges, rewrite
from mbolt_mlx.profile.perms import read_perms
ranges.WINDOW_BYTES = 128 << 10
rewrite.CHECKPOINT_BYTES = 256 << 10
real, replace = files.pwrite_all, files.replace
def slow(*a, **k):
    time.sleep(0.003)
    return real(*a, **k)
def slow_replace(*a):
    replace(*a)
    time.sleep(0.01)
files.pwrite_all, files.replace = slow, slow_replace
files.sync = files.sync_data = lambda fd, *, path=None: None
model, perms, target = sys.argv[1:]
def run():
    try:
        rewrite.rewrite(model, read_perms(perms), target, layout="interleave+chain")
        return 0
    except KeyboardInterrupt:
        return 130
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os._exit(run())
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def windows_done(targets):
    """Windows in the journals of what is not finished."""
    done = 0
    for path in targets:
        with contextlib.suppress(FileNotFoundError):
            done += max(0, partial_paths(path)[1].read_bytes().count(b"\n") - 1)
    return done


def wait(until):
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline, "nothing was written in 30 s"
        time.sleep(0.001)


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepared(tmp_path, split):
    """(model, profile, hashes of the model, the right result's, and the names of ours)."""
    model = made.typed_model(tmp_path / "m.gguf", split=split)
    made.perms_of(tmp_path / "perms.json", range(6))
    perms = read_perms(tmp_path / "perms.json")
    good = rewrite(model, perms, tmp_path / "good.gguf", layout="interleave+chain").paths
    targets = [p.with_name(p.name.replace("good", "out")) for p in good]
    before = {p: sha(p) for p in made.files_of(model)}
    return model, before, dict(zip(targets, map(sha, good), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("split", [0, 7])
def test_killed_20_times_at_random_moments(tmp_path, split):
    model, before, good = prepared(tmp_path, split)
    targets = list(good)
    rng = np.random.default_rng(3)
    midway = some = kills = 0
    with Rewriters(REWRITERS, model, tmp_path / "perms.json", tmp_path / "out.gguf") as rewriters:
        started = time.perf_counter()
        rewriters.start()
        assert rewriters.status() == 0
        takes = time.perf_counter() - started
        while kills < 20:
            if all(p.exists() for p in targets):  # it was faster than the kill: begin anew
                for path in targets:
                    path.unlink()
            pid = rewriters.start()
            if kills % 5 == 4:
                wait(lambda: any(p.exists() for p in targets))
            elif kills % 2:
                goal = windows_done(targets) + int(rng.integers(1, 8))
                wait(
                    lambda goal=goal: (
                        windows_done(targets) >= goal or any(p.exists() for p in targets)
                    )
                )
            else:
                time.sleep(rng.uniform(0, takes))
            with contextlib.suppress(ProcessLookupError):  # it has finished
                os.kill(pid, signal.SIGKILL)
            assert rewriters.status() in (-signal.SIGKILL, 0)
            kills += 1
            there = [p for p in targets if p.exists()]
            midway += any(partial_paths(p)[0].exists() for p in targets)
            some += 0 < len(there) < len(targets)
            assert all(sha(p) == good[p] for p in there)
            assert {p: sha(p) for p in before} == before
        if not all(p.exists() for p in targets) or partial_paths(targets[0])[1].exists():
            rewriters.start()
            assert rewriters.status() == 0
    assert {p: sha(p) for p in targets} == good
    assert midway >= 5 and (some or not split), "the kills came too early or too late"
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]
    print(f"{kills} kills, {midway} midway, {some} between two names")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_crash_between_the_names_of_a_split_output(tmp_path, monkeypatch, after, force):
    """The next run finds the files that are there to be its own, and gives the others names."""
    model, before, good = prepared(tmp_path, 7)
    targets = list(good)
    perms = read_perms(tmp_path / "perms.json")
    if force:
        rewrite(model, None, tmp_path / "out.gguf", layout="identity")
    real, left = files.replace, [after]

    def crash(source, target):
        if "out" in str(target):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        real(source, target)

    how = {"layout": "interleave+chain"}
    with monkeypatch.context() as m:
        m.setattr(files, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            rewrite(model, perms, tmp_path / "out.gguf", force=force, **how)
    there = [p for p in targets if p.exists()]
    assert len(there) == after and not targets[0].exists()
    assert all(sha(p) == good[p] for p in there)
    report = rewrite(model, perms, tmp_path / "out.gguf", **how)
    assert {p: sha(p) for p in targets} == good and report.resumed == report.bytes
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


def test_crash_after_the_last_name(tmp_path, monkeypatch):
    model, _, good = prepared(tmp_path, 0)
    perms = read_perms(tmp_path / "perms.json")
    real = files.replace

    def crash(source, target):
        real(source, target)
        raise KeyboardInterrupt

    how = {"layout": "interleave+chain"}
    with monkeypatch.context() as m:
        m.setattr(files, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            rewrite(model, perms, tmp_path / "out.gguf", **how)
    assert rewrite(model, perms, tmp_path / "out.gguf", **how).resumed
    assert sha(tmp_path / "out.gguf") == list(good.values())[0]
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]
    with pytest.raises(OutputError, match="exists"):
        rewrite(model, perms, tmp_path / "out.gguf", **how)


def test_a_stranger_among_the_names_is_not_taken_for_ours(tmp_path, monkeypatch):
    model, _, good = prepared(tmp_path, 7)
    perms = read_perms(tmp_path / "perms.json")
    how = {"layout": "interleave+chain"}
    with monkeypatch.context() as m:
        m.setattr(files, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rewrite(model, perms, tmp_path / "out.gguf", **how)
    list(good)[1].write_text("precious")
    with pytest.raises(OutputError, match="exists"):
        rewrite(model, perms, tmp_path / "out.gguf", **how)
    assert list(good)[1].read_text() == "precious"


def test_ctrl_c_leaves_a_part_that_the_next_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "WINDOW_BYTES", 128 << 10)
    model, _, good = prepared(tmp_path, 0)
    with Rewriters(REWRITERS, model, tmp_path / "perms.json", tmp_path / "out.gguf") as rewriters:
        pid = rewriters.start()
        wait(lambda: windows_done([tmp_path / "out.gguf"]) >= 3)
        os.kill(pid, signal.SIGINT)
        assert rewriters.status() == 130
    assert not (tmp_path / "out.gguf").exists()
    perms = read_perms(tmp_path / "perms.json")
    report = rewrite(model, perms, tmp_path / "out.gguf", layout="interleave+chain")
    assert report.resumed > 0
    assert sha(tmp_path / "out.gguf") == list(good.values())[0]


def test_a_part_of_another_layout_or_model_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "WINDOW_BYTES", 128 << 10)
    model, _, good = prepared(tmp_path, 0)
    perms = read_perms(tmp_path / "perms.json")
    for change in ("layout", "model"):
        with monkeypatch.context() as m:
            m.setattr(files, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                rewrite(model, perms, tmp_path / "out.gguf", layout="chain")
        if change == "model":
            os.utime(model, ns=(1, 1))
        layout = "interleave+chain" if change == "layout" else "chain"
        report = rewrite(model, perms, tmp_path / "out.gguf", layout=layout)
        assert report.resumed == 0
        (tmp_path / "out.gguf").unlink()


def test_two_processes_on_one_output(tmp_path):
    model, _, good = prepared(tmp_path, 0)
    with Rewriters(REWRITERS, model, tmp_path / "perms.json", tmp_path / "out.gguf") as rewriters:
        pid = rewriters.start()
        wait(partial_paths(tmp_path / "out.gguf")[0].exists)
        os.kill(pid, signal.SIGSTOP)  # so that it cannot finish meanwhile
        try:
            with pytest.raises(OutputError, match="another process"):
                rewrite(model, None, tmp_path / "out.gguf", layout="identity")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rewriters.status() == 0
    assert sha(tmp_path / "out.gguf") == list(good.values())[0]


def test_a_file_that_was_removed_after_the_names_is_no_reason_to_spoil_the_others(tmp_path):
    """A journal left beside a first file whose companions are gone: everything is refused."""
    model, _, good = prepared(tmp_path, 7)
    perms = read_perms(tmp_path / "perms.json")
    how = {"layout": "interleave+chain"}
    journal = partial_paths(list(good)[0])[1]
    left = []

    def before(plan, first):
        raise KeyboardInterrupt

    real = files.unlink
    with pytest.MonkeyPatch.context() as m:
        m.setattr(files, "unlink", lambda p: left.append(p) if p == journal else real(p))
        rewrite(model, perms, tmp_path / "out.gguf", **how)
    assert journal in left and journal.exists()
    list(good)[2].unlink()
    with pytest.raises(OutputError, match="exists"):
        rewrite(model, perms, tmp_path / "out.gguf", **how)
    assert sha(list(good)[0]) == good[list(good)[0]]
    with pytest.raises(KeyboardInterrupt):
        rewrite(model, perms, tmp_path / "out.gguf", force=True, before=before, **how)
    assert rewrite(model, perms, tmp_path / "out.gguf", force=True, **how).resumed == 0
    assert {p: sha(p) for p in good} == good
