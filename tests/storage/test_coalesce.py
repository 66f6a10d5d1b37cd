import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xxhash

from mbolt_mlx.core import files, scatter
from mbolt_mlx.core.errors import OutputError, UsageError
from mbolt_mlx.core.output import partial_paths
from mbolt_mlx.storage import coalesce as module
from mbolt_mlx.storage import gather
from mbolt_mlx.storage.checkpoint import Checkpoint, read_header
from mbolt_mlx.storage.coalesce import coalesce, estimate
from mbolt_mlx.storage.experts import find_experts
from mbolt_mlx.storage.locate import open_side_file
from mbolt_mlx.storage.manifest import Manifest, manifest_path
from mbolt_mlx.storage.verify import check_schema
from tests.rewriters import Rewriters
from tests.storage.made import expert_tensors, large_model, model


def opened(folder):
    checkpoint = Checkpoint.open(folder)
    return checkpoint, find_experts(checkpoint)


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_all(target, checkpoint, layers):
    """Every piece of every expert, read through the manifest, is the source's own bytes."""
    manifest = Manifest.read(manifest_path(target))
    raw = target.read_bytes()
    sources = [shard.path.read_bytes() for shard in checkpoint.shards]
    for layer, entry in zip(layers, manifest.layers, strict=True):
        for e in range(layer.experts):
            start = int(entry.offsets[e])
            block = raw[start : start + entry.block_bytes]
            assert xxhash.xxh3_128_hexdigest(block) == entry.checksums[e]
            rest = bytearray(block)
            for p, piece in enumerate(layer.pieces):
                at = entry.pieces[p].offset
                begin = int(layer.offsets[p, e])
                want = sources[layer.files[p, e]][begin : begin + piece.nbytes]
                assert block[at : at + piece.nbytes] == want
                rest[at : at + piece.nbytes] = bytes(piece.nbytes)
            assert not any(rest), "padding is not zero"
    return manifest


@pytest.mark.parametrize(
    "fixture", ["tiny_model", "tiny_model_q4", "tiny_model_sharded", "tiny_model_per_expert"]
)
def test_every_piece_is_the_sources_own_bytes(fixture, request, tmp_path):
    checkpoint, layers = opened(request.getfixturevalue(fixture))
    target = tmp_path / "side.safetensors"
    report = coalesce(checkpoint, layers, target)
    assert report.bytes == estimate(layers) == target.stat().st_size
    assert report.blocks == 16 and report.resumed_from == 0 and not report.already
    check_all(target, checkpoint, layers)
    check_schema(manifest_path(target))
    open_side_file(target, checkpoint, layers)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        target.name,
        f"{target.name}.manifest.json",
    ]


def test_it_is_a_valid_safetensors_file_for_others(tiny_model_q4, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    checkpoint, layers = opened(tiny_model_q4)
    target = tmp_path / "side.safetensors"
    coalesce(checkpoint, layers, target)
    with safetensors.safe_open(target, "np") as f:
        assert sorted(f.keys()) == [f"{y.module}.blocks" for y in layers]
        blocks = f.get_tensor(f"{layers[0].module}.blocks")
        assert blocks.dtype == np.uint8 and blocks.shape[0] == 8
    assert read_header(target)[2] % 16384 == 0


def test_alignment_of_blocks_and_pieces(tmp_path):
    """4 KiB where it costs under 3 %, else 512; blocks always 16 KiB."""
    checkpoint, layers = opened(model(tmp_path / "m"))
    target = tmp_path / "a"
    coalesce(checkpoint, layers, target)
    manifest = Manifest.read(manifest_path(target))
    assert (manifest.alignment.block, manifest.alignment.piece) == (16384, 4096)
    odd = expert_tensors(hidden=100, width=33)
    checkpoint, layers = opened(model(tmp_path / "odd", {"model.safetensors": odd}))
    coalesce(checkpoint, layers, tmp_path / "b")
    manifest = check_all(tmp_path / "b", checkpoint, layers)
    assert manifest.alignment.piece == 512
    for entry in manifest.layers:
        assert entry.block_bytes % 16384 == 0 and not (entry.offsets % 16384).any()
        assert all(p.offset % 512 == 0 for p in entry.pieces)


def test_blocks_larger_than_a_window(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "WINDOW_BYTES", 16384)
    monkeypatch.setattr(scatter, "BOUNCE_BYTES", 4096)
    checkpoint, layers = opened(
        model(tmp_path / "m", {"model.safetensors": expert_tensors(hidden=100, width=33)})
    )
    coalesce(checkpoint, layers, tmp_path / "s")
    check_all(tmp_path / "s", checkpoint, layers)


def test_drive_without_direct_reads_and_writes(tiny_model_sharded, tmp_path, monkeypatch):
    real = os.open

    def no_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(files.os, "open", no_direct)
    checkpoint, layers = opened(tiny_model_sharded)
    coalesce(checkpoint, layers, tmp_path / "s")
    check_all(tmp_path / "s", checkpoint, layers)


def test_drive_that_refuses_direct_writes_late(tiny_model, tmp_path, monkeypatch):
    real = os.pwrite
    refused = []

    def pwrite(fd, data, offset):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    checkpoint, layers = opened(tiny_model)
    coalesce(checkpoint, layers, tmp_path / "s")
    check_all(tmp_path / "s", checkpoint, layers)


def test_any_order_of_blocks_is_found_by_original_id(tiny_model_sharded, tmp_path):
    checkpoint, layers = opened(tiny_model_sharded)
    rng = np.random.default_rng(1)
    order = {y.layer: rng.permutation(y.experts).tolist() for y in layers}
    note = {"kind": "clique", "profile_sha256": "0" * 64}
    coalesce(checkpoint, layers, tmp_path / "s", order=order, order_note=note)
    manifest = check_all(tmp_path / "s", checkpoint, layers)
    assert manifest.order == note
    assert np.argsort(manifest.layers[0].offsets).tolist() == order[0]
    open_side_file(tmp_path / "s", checkpoint, layers)


@pytest.mark.parametrize("order", [[0, 1], [0] * 8, list(range(1, 9))])
def test_order_that_is_no_permutation(tiny_model, tmp_path, order):
    checkpoint, layers = opened(tiny_model)
    with pytest.raises(UsageError, match="layer 0"):
        coalesce(checkpoint, layers, tmp_path / "s", order={0: order})
    assert not list(tmp_path.iterdir())


def test_second_run_does_nothing(tiny_model, tmp_path):
    checkpoint, layers = opened(tiny_model)
    coalesce(checkpoint, layers, tmp_path / "s")
    before = (tmp_path / "s").stat()
    assert coalesce(checkpoint, layers, tmp_path / "s").already
    assert (tmp_path / "s").stat().st_mtime_ns == before.st_mtime_ns
    assert not coalesce(checkpoint, layers, tmp_path / "s", force=True).already


def test_manifest_that_was_lost_or_cut_is_repaired(tiny_model, tmp_path):
    checkpoint, layers = opened(tiny_model)
    coalesce(checkpoint, layers, tmp_path / "s")
    manifest = manifest_path(tmp_path / "s")
    manifest.unlink()
    assert not coalesce(checkpoint, layers, tmp_path / "s").already
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert not coalesce(checkpoint, layers, tmp_path / "s").already
    check_all(tmp_path / "s", checkpoint, layers)


# --- where it must not write


def refused(checkpoint, layers, target, *words, **more):
    with pytest.raises(OutputError) as caught:
        coalesce(checkpoint, layers, target, **more)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.fixture
def copied(tiny_model_sharded, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_sharded, folder)
    return folder


def test_output_equal_to_a_shard_by_any_name(copied, tmp_path):
    checkpoint, layers = opened(copied)
    shard = checkpoint.shards[1].path
    before = sha(shard)
    (tmp_path / "link").symlink_to(shard)
    os.link(shard, tmp_path / "hard.bin")
    for target in (
        shard,
        tmp_path / "link",
        tmp_path / "hard.bin",
        copied / ".." / "model" / shard.name,
    ):
        for force in (False, True):
            refused(checkpoint, layers, target, "own", shard.name, force=force)
    assert sha(shard) == before


@pytest.mark.parametrize("name", ["model-side.safetensors", "x.safetensors", "X.SAFETENSORS"])
def test_output_that_would_be_loaded_as_weights(copied, name):
    checkpoint, layers = opened(copied)
    refused(checkpoint, layers, copied / name, "loaded as weights")
    assert not (copied / name).exists()


def test_output_in_the_model_folder_under_another_ending(copied):
    checkpoint, layers = opened(copied)
    coalesce(checkpoint, layers, copied / "experts.mbolt")
    check_all(copied / "experts.mbolt", *opened(copied))


def test_output_that_exists_and_is_not_ours(tiny_model, tmp_path):
    checkpoint, layers = opened(tiny_model)
    other = tmp_path / "other.txt"
    other.write_text("precious")
    for force in (False, True):
        refused(checkpoint, layers, other, "not a side-file", force=force)
    weights = tmp_path / "weights.safetensors"
    shutil.copy(tiny_model / "model.safetensors", weights)
    refused(checkpoint, layers, weights, "not a side-file")
    assert other.read_text() == "precious"


@pytest.mark.parametrize("what", ["blocks", "header", "everything"])
@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("force", [False, True])
def test_a_damaged_side_file_is_written_again(tiny_model, tmp_path, what, manifest, force):
    checkpoint, layers = opened(tiny_model)
    target = tmp_path / "s"
    coalesce(checkpoint, layers, target)
    before = sha(target)
    keep = {"blocks": target.stat().st_size - 1, "header": 1500, "everything": 0}[what]
    os.truncate(target, keep)
    if not manifest:
        manifest_path(target).unlink()
    if what == "everything" and not manifest:
        refused(checkpoint, layers, target, "not a side-file", force=force)
        return
    coalesce(checkpoint, layers, target, force=force)
    assert sha(target) == before
    check_all(target, checkpoint, layers)


def test_a_damaged_side_file_of_another_model_is_not_replaced(tiny_model, tiny_model_q4, tmp_path):
    target = tmp_path / "s"
    coalesce(*opened(tiny_model), target)
    os.truncate(target, target.stat().st_size // 2)
    checkpoint, layers = opened(tiny_model_q4)
    refused(checkpoint, layers, target, "another source", "--force")
    coalesce(checkpoint, layers, target, force=True)
    check_all(target, checkpoint, layers)


def test_manifest_name_taken_by_another_file(tiny_model, tmp_path):
    checkpoint, layers = opened(tiny_model)
    (tmp_path / "s.manifest.json").write_text("{}")
    refused(checkpoint, layers, tmp_path / "s", "s.manifest.json", "not the manifest")


def test_side_file_of_another_model_is_not_replaced(tiny_model, tiny_model_q4, tmp_path):
    coalesce(*opened(tiny_model), tmp_path / "s")
    before = sha(tmp_path / "s")
    checkpoint, layers = opened(tiny_model_q4)
    refused(checkpoint, layers, tmp_path / "s", "another source", "--force")
    assert sha(tmp_path / "s") == before
    coalesce(checkpoint, layers, tmp_path / "s", force=True)
    check_all(tmp_path / "s", checkpoint, layers)


@pytest.mark.parametrize("name", ["folder", "missing/s", "."])
def test_output_that_is_no_place_for_a_file(tiny_model, tmp_path, name):
    (tmp_path / "folder").mkdir()
    checkpoint, layers = opened(tiny_model)
    refused(checkpoint, layers, tmp_path / name)


def test_output_link_is_refused(tiny_model, tmp_path):
    (tmp_path / "s").symlink_to("elsewhere")
    refused(*opened(tiny_model), tmp_path / "s", "a link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tiny_model, tmp_path):
    folder = tmp_path / "ro"
    folder.mkdir(mode=0o500)
    refused(*opened(tiny_model), folder / "s", "cannot write", "Permission denied")


def test_folder_that_cannot_be_written(tiny_model, tmp_path, monkeypatch):
    real = os.open

    def deny(path, flags, *rest, **more):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(files.os, "open", deny)
    refused(*opened(tiny_model), tmp_path / "s", "Read-only file system", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_drive_too_full_is_said_before_starting(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_space", lambda path: 1000)
    checkpoint, layers = opened(tiny_model)
    refused(checkpoint, layers, tmp_path / "s", str(estimate(layers)), "1000 bytes", "free")
    assert not list(tmp_path.iterdir())


def test_drive_that_fills_up_midway_keeps_the_part_for_later(tmp_path, monkeypatch):
    checkpoint, layers = opened(large_model(tmp_path / "m"))
    real = files.pwrite_all
    target = tmp_path / "s"
    budget = [25 << 20]

    def full(fd, data, offset, **more):
        budget[0] -= len(data)
        if budget[0] < 0 and len(data) > 16384:  # the space of the small journal is there
            raise OutputError("write failed: No space left on device", path=target)
        return real(fd, data, offset, **more)

    monkeypatch.setattr(gather, "WINDOW_BYTES", 4 << 20)
    monkeypatch.setattr(files, "pwrite_all", full)
    refused(checkpoint, layers, target, "No space left")
    assert not target.exists() and not manifest_path(target).exists()
    monkeypatch.setattr(files, "pwrite_all", real)
    report = coalesce(checkpoint, layers, target)
    assert report.resumed_from > 0
    check_all(target, checkpoint, layers)


# --- interrupted and in company


# Started once; forks a rewriter for each line, because starting Python takes longer than a rewrite.
REWRITERS = """
import os, sys, time
from mbolt_mlx.core import files
from mbolt_mlx.storage import gather, coalesce
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import find_experts
gather.WINDOW_BYTES = 1 << 20
coalesce.CHECKPOINT_BYTES = 2 << 20
real = files.pwrite_all
def slow(*a, **k):
    time.sleep(0.005)
    return real(*a, **k)
files.pwrite_all = slow
files.sync = files.sync_data = lambda fd, *, path=None: None
def rewrite():
    try:
        checkpoint = Checkpoint.open(sys.argv[1])
        coalesce.coalesce(checkpoint, find_experts(checkpoint), sys.argv[2])
        return 0
    except KeyboardInterrupt:
        return 130
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os._exit(rewrite())
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def blocks_done(target):
    try:
        return max(0, partial_paths(target)[1].read_bytes().count(b"\n") - 1)
    except FileNotFoundError:
        return 0


def wait_for_blocks(target, more=1):
    """Until ``more`` blocks are in the journal, or the file is finished."""
    before = blocks_done(target)
    deadline = time.monotonic() + 30
    while blocks_done(target) < before + more and not target.exists():
        assert time.monotonic() < deadline, "no block was written in 30 s"
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_20_times_at_random_moments_gives_the_same_bytes(tmp_path):
    folder = large_model(tmp_path / "m", layers=2)
    checkpoint, layers = opened(folder)
    whole = tmp_path / "whole"
    coalesce(checkpoint, layers, whole)
    rng = np.random.default_rng(7)
    target = tmp_path / "s"
    kills = midway = 0
    with Rewriters(REWRITERS, folder, target) as rewriters:
        started = time.perf_counter()
        rewriters.start()
        assert rewriters.status() == 0
        takes = time.perf_counter() - started
        target.unlink(), manifest_path(target).unlink()
        while kills < 20:
            pid = rewriters.start()
            if kills % 2:
                wait_for_blocks(target, more=int(rng.integers(1, 20)))
            else:
                time.sleep(rng.uniform(0, takes))
            with contextlib.suppress(ProcessLookupError):  # it has finished
                os.kill(pid, signal.SIGKILL)
            assert rewriters.status() in (-signal.SIGKILL, 0)
            kills += 1
            midway += blocks_done(target) > 0
            if target.exists():  # it was faster than the kill: begin anew
                assert sha(target) == sha(whole)
                open_side_file(target, checkpoint, layers)
                target.unlink()
                manifest_path(target).unlink()
        rewriters.start()
        assert rewriters.status() == 0
    assert sha(target) == sha(whole)
    check_all(target, checkpoint, layers)
    assert midway >= 5, "the kills came too early or too late to mean anything"
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]
    a, b = (json.loads(manifest_path(p).read_text()) for p in (target, whole))
    a.pop("created"), b.pop("created")
    assert a == b


def test_ctrl_c_leaves_a_part_that_the_next_run_continues(tmp_path):
    folder = large_model(tmp_path / "m")
    target = tmp_path / "s"
    with Rewriters(REWRITERS, folder, target) as rewriters:
        pid = rewriters.start()
        wait_for_blocks(target)
        os.kill(pid, signal.SIGINT)
        assert rewriters.status() == 130
    assert not target.exists() and partial_paths(target)[0].exists()
    checkpoint, layers = opened(folder)
    assert coalesce(checkpoint, layers, target).resumed_from > 0
    check_all(target, checkpoint, layers)


def test_two_processes_on_one_target(tmp_path):
    folder = large_model(tmp_path / "m")
    target = tmp_path / "s"
    with Rewriters(REWRITERS, folder, target) as rewriters:
        pid = rewriters.start()
        wait_for_blocks(target)
        os.kill(pid, signal.SIGSTOP)  # so that it cannot finish meanwhile
        try:
            refused(*opened(folder), target, "another process")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rewriters.status() == 0
    check_all(target, *opened(folder))


def interrupted(folder, target, monkeypatch):
    """Leave a partial file of which some blocks are done."""
    checkpoint, layers = opened(folder)
    with monkeypatch.context() as m:
        m.setattr(gather, "WINDOW_BYTES", 1 << 20)
        left = [12]

        def stop(self, job):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        m.setattr(module._Rewrite, "_maybe_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            coalesce(checkpoint, layers, target)


def test_part_of_a_source_that_changed_since_is_not_continued(tmp_path, monkeypatch):
    folder = large_model(tmp_path / "m")
    target = tmp_path / "s"
    interrupted(folder, target, monkeypatch)
    shard = Checkpoint.open(folder).shards[0].path
    raw = bytearray(shard.read_bytes())
    raw[-1000] ^= 1
    shard.write_bytes(raw)
    checkpoint, layers = opened(folder)
    assert coalesce(checkpoint, layers, target).resumed_from == 0
    check_all(target, checkpoint, layers)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "partial gone", "torn line"])
def test_damaged_journal_only_costs_work(tmp_path, monkeypatch, damage):
    folder = large_model(tmp_path / "m", layers=1)
    target = tmp_path / "s"
    interrupted(folder, target, monkeypatch)
    partial, journal = partial_paths(target)
    raw = bytearray(journal.read_bytes())
    if damage == "cut":
        journal.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        raw[len(raw) // 2] ^= 1
        journal.write_bytes(raw)
    elif damage == "empty":
        journal.write_bytes(b"")
    elif damage == "torn line":
        journal.write_bytes(raw + b"0123")
    else:
        partial.unlink()
    checkpoint, layers = opened(folder)
    coalesce(checkpoint, layers, target)
    check_all(target, checkpoint, layers)


def test_bytes_of_a_part_that_rotted_are_found_by_reading_back(tmp_path, monkeypatch):
    folder = large_model(tmp_path / "m")
    target = tmp_path / "s"
    interrupted(folder, target, monkeypatch)
    partial, journal = partial_paths(target)
    done = min(int(line.split()[1]) for line in journal.read_text().splitlines()[1:])
    checkpoint, layers = opened(folder)
    manifest_layers = module.make_plan(layers, "0" * 64).layers
    at = int(manifest_layers[done // 12].starts[done % 12]) + 5
    with open(partial, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 4]))
    refused(
        checkpoint, layers, target, f"layer {done // 12}, expert {done % 12} came back different"
    )
    assert not target.exists() and not partial.exists()
    coalesce(checkpoint, layers, target)
    check_all(target, checkpoint, layers)


def test_source_that_changes_under_the_rewrite(tmp_path, monkeypatch):
    folder = large_model(tmp_path / "m", layers=1)
    checkpoint, layers = opened(folder)
    shard = checkpoint.shards[0].path
    monkeypatch.setattr(
        module._Rewrite, "_maybe_checkpoint", lambda self, n: os.utime(shard, ns=(1, 1))
    )
    refused(checkpoint, layers, tmp_path / "s", "changed while it was read", shard.name)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("moment", ["manifest", "rename"])
def test_crash_between_the_two_renames_is_refused_and_repaired(tmp_path, monkeypatch, moment):
    """A new manifest beside an old side-file, or beside none, is never believed."""
    folder = large_model(tmp_path / "m", layers=1)
    target = tmp_path / "s"
    coalesce(*opened(folder), target)
    shard = Checkpoint.open(folder).shards[0].path
    raw = bytearray(shard.read_bytes())
    raw[-1000] ^= 1  # same size and header, so that only the blocks' checksums tell
    shard.write_bytes(raw)
    checkpoint, layers = opened(folder)
    real = files.replace

    def crash(source, destination):
        if moment == "rename" and str(destination) == str(target):
            raise KeyboardInterrupt
        real(source, destination)
        if moment == "manifest":
            raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(files, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            coalesce(checkpoint, layers, target, force=True)
    from mbolt_mlx.core.errors import SideFileError

    with pytest.raises(SideFileError, match="does not belong"):
        open_side_file(target, checkpoint, layers)
    report = coalesce(checkpoint, layers, target)
    assert report.resumed_from == report.blocks and not report.already
    check_all(target, checkpoint, layers)


def test_memory_stays_bounded_whatever_the_block(tmp_path):
    """Blocks of 48 MiB: peak growth stays far under them times the threads."""
    tensors = expert_tensors([0], 2, 2048, 2048)
    folder = model(tmp_path / "m", {"model.safetensors": tensors})
    code = (
        "import sys\n"
        "from mbolt_mlx.bench.counters import peak_rss_bytes as peak\n"
        "from mbolt_mlx.storage.checkpoint import Checkpoint\n"
        "from mbolt_mlx.storage.experts import find_experts\n"
        "from mbolt_mlx.storage.coalesce import coalesce\n"
        "c = Checkpoint.open(sys.argv[1]); y = find_experts(c)\n"
        "before = peak(); coalesce(c, y, sys.argv[2]); print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "s")],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert int(done.stdout) < 150e6
