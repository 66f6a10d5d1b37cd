import errno
import mmap
import os

import pytest

from mbolt_mlx.core import files, output
from mbolt_mlx.core.errors import OutputError
from mbolt_mlx.core.output import open_output, partial_paths, write_whole

MIB = 1 << 20


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_small_file_is_written_whole_and_leaves_nothing_else(tmp_path):
    write_whole(tmp_path / "a", b"one")
    write_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two" and names(tmp_path) == ["a"]


def test_small_file_survives_a_failed_replacement(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"one")

    def fail(fd, data, offset, **more):
        raise OutputError("write failed: No space left on device")

    monkeypatch.setattr(files, "pwrite_all", fail)
    with pytest.raises(OutputError):
        write_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one" and names(tmp_path) == ["a"]


def test_small_file_after_a_kill_in_the_middle(tmp_path):
    (tmp_path / ".a.partial").write_bytes(b"left by another run, longer")
    write_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two" and names(tmp_path) == ["a"]


def test_small_file_in_a_folder_that_is_absent(tmp_path):
    with pytest.raises(OutputError, match="cannot write"):
        write_whole(tmp_path / "no" / "a", b"")


@pytest.mark.parametrize("direct", [False, True])
def test_target_appears_only_when_finished(tmp_path, direct):
    target = tmp_path / "a"
    with open_output(target, 2 * MIB, "stamp", direct=direct) as out:
        page = memoryview(mmap.mmap(-1, MIB))
        page[:4] = b"data"
        out.write(page, MIB)
        out.record(1, "x")
        out.checkpoint()
        assert not target.exists()
        out.commit([(tmp_path / "a.json", b"{}")])
    assert names(tmp_path) == ["a", "a.json"]
    raw = target.read_bytes()
    assert len(raw) == 2 * MIB and raw[MIB : MIB + 4] == b"data"


def test_what_was_checkpointed_is_there_after_reopening_and_nothing_else(tmp_path):
    target = tmp_path / "a"
    with open_output(target, 4096, "stamp") as out:
        out.write(b"abc", 5)
        out.record(3, "note of three")
        out.record(12, "")
        out.checkpoint()
        out.record(4, "not on the drive yet")
    with open_output(target, 4096, "stamp") as out:
        assert out.done == {3: "note of three", 12: ""}
        out.record(5, "five")
        out.checkpoint()
    with open_output(target, 4096, "stamp") as out:
        assert sorted(out.done) == [3, 5, 12]
        out.commit()
    assert target.read_bytes()[5:8] == b"abc"


@pytest.mark.parametrize("change", [{"stamp": "other"}, {"size": 4097}, {"resume": False}])
def test_another_stamp_or_size_begins_anew(tmp_path, change):
    target = tmp_path / "a"
    with open_output(target, 4096, "stamp") as out:
        out.write(b"abc", 0)
        out.record(0, "")
        out.checkpoint()
    how = {"size": 4096, "stamp": "stamp", "resume": True} | change
    with open_output(target, how["size"], how["stamp"], resume=how["resume"]) as out:
        assert not out.done
        out.commit()
    assert not any(target.read_bytes())


def test_data_is_on_the_drive_before_the_journal_says_so(tmp_path, monkeypatch):
    order = []
    real_sync, real_write = files.sync_data, files.pwrite_all
    monkeypatch.setattr(
        files, "sync_data", lambda fd, **m: (order.append("sync"), real_sync(fd, **m))
    )
    monkeypatch.setattr(
        files,
        "pwrite_all",
        lambda fd, b, o, **m: (order.append(bytes(b)), real_write(fd, b, o, **m)),
    )
    with open_output(tmp_path / "a", 4096, "stamp") as out:
        del order[:]
        out.write(b"abc", 0)
        out.record(0, "zero")
        out.checkpoint()
        assert order[:2] == [b"abc", "sync"] and b"0 zero" in order[2]
        out.discard()
    assert not names(tmp_path)


def test_second_writer_is_refused_until_the_first_lets_go(tmp_path):
    target = tmp_path / "a"
    first = open_output(target, 10, "stamp")
    with pytest.raises(OutputError, match="another process"):
        open_output(target, 10, "stamp")
    first.close()
    open_output(target, 10, "stamp").discard()
    assert not names(tmp_path)


def test_write_past_the_end(tmp_path):
    with open_output(tmp_path / "a", 10, "stamp") as out:
        for offset in (8, -1):
            with pytest.raises(OutputError, match="past the end"):
                out.write(b"abc", offset)


def test_too_little_space_names_both_sizes_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_space", lambda path: 999)
    with pytest.raises(OutputError, match=r"1000 bytes\) more.*999 bytes\) free"):
        open_output(tmp_path / "a", 1000, "stamp")
    assert not names(tmp_path)


def test_space_that_a_part_already_takes_is_not_asked_for_twice(tmp_path, monkeypatch):
    with open_output(tmp_path / "a", MIB, "stamp") as out:
        out.record(0, "")
        out.checkpoint()
    monkeypatch.setattr(files, "free_space", lambda path: 0)
    if files.allocated_bytes(partial_paths(tmp_path / "a")[0]) >= MIB:
        open_output(tmp_path / "a", MIB, "stamp").discard()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_drive_says_what_to_do():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OutputError, match="No space left.*free some space"):
            files.pwrite_all(fd, b"abc", 0)
    finally:
        os.close(fd)


def test_journal_with_a_torn_end_keeps_what_is_whole(tmp_path):
    target = tmp_path / "a"
    with open_output(target, 10, "stamp") as out:
        for unit in range(3):
            out.record(unit, f"note {unit}")
        out.checkpoint()
    journal = partial_paths(target)[1]
    raw = journal.read_bytes()
    for size in range(len(raw)):
        journal.write_bytes(raw[:size])
        with open_output(target, 10, "stamp") as out:
            whole = raw[:size].count(b"\n") - 1
            assert len(out.done) == max(0, whole)
            if whole < 0:
                assert output._read_journal(journal, raw.split(b"\n")[0] + b"\n", 10)[0] == {}
            else:
                continue
        with open_output(target, 10, "stamp") as out:
            out.write(b"x", 0)


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "link").symlink_to("a")
    write_whole(tmp_path / "link", b"two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_bytes() == b"two"


def test_a_pipe_is_written_to_and_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"one")
        assert os.read(reader, 9) == b"one" and pipe.is_fifo() and names(tmp_path) == ["pipe"]
    finally:
        os.close(reader)
    with pytest.raises(OutputError, match="a pipe or a device"):
        open_output(pipe, 1, "stamp")
    assert pipe.is_fifo() and names(tmp_path) == ["pipe"]


def test_a_small_file_on_a_full_drive_promises_no_more_than_it_keeps(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = open_output(tmp_path / "large", 9, "stamp")
    monkeypatch.setattr(os, "pwrite", full)
    with out, pytest.raises(OutputError, match="large: .*run again: it resumes$"):
        out.write(b"one", 0)
    with pytest.raises(OutputError, match="free some space and run again$"):
        write_whole(tmp_path / "a", b"one")
    assert not (tmp_path / "a").exists()
