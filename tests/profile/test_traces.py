"""Traces in, traces out; every kind of broken file has an error that says where."""

import gzip
import lzma
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mbolt_mlx.core.errors import OutputError, TraceError
from mbolt_mlx.profile import mblt, trace_file
from mbolt_mlx.profile.trace_file import Recorder, write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace, read_trace

PUBLIC = Path(__file__).resolve().parents[2] / "examples" / "traces"


def made(sessions=2, layers=(3, 5), experts=16, top_k=4, prompt=6, answer=5, seed=0):
    rng = np.random.default_rng(seed)

    def chosen(tokens):
        return {
            layer: np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
            for layer in layers
        }

    passes = []
    for session in range(sessions):
        passes.append(Pass("prefill", chosen(prompt), session))
        passes += [Pass("decode", chosen(1), session) for _ in range(answer)]
    known = {layer: LayerInfo(experts, top_k, 1000 + layer, 3) for layer in layers}
    return make_trace(passes, known, model="made")


def same(a, b):
    return len(a.passes) == len(b.passes) and all(
        x.phase == y.phase
        and x.session == y.session
        and list(x.chosen) == list(y.chosen)
        and all(np.array_equal(x.chosen[layer], y.chosen[layer]) for layer in x.chosen)
        for x, y in zip(a.passes, b.passes, strict=True)
    )


@pytest.mark.parametrize("experts", [16, 256, 257, 512])
def test_our_format_gives_back_what_was_written(tmp_path, experts):
    trace = made(experts=experts)
    write_trace(tmp_path / "t", trace)
    again = read_trace(tmp_path / "t")
    assert same(trace, again)
    assert again.layers == trace.layers
    assert again.model == "made"
    assert again.sessions == 2
    assert again.tokens("prefill") == 12 and again.tokens("decode") == 10


def test_the_file_opens_with_plain_zstd_and_says_what_it_is(tmp_path):
    write_trace(tmp_path / "t", made())
    with zstandard.open(tmp_path / "t", "rb", closefd=True) as stream:
        # One frame at a time is what the module reads; the first one is the header.
        assert stream.read(24).startswith(b'{"format": "mbolt-trace"')


def test_whatever_is_left_after_a_kill_is_read_up_to_its_last_frame(tmp_path):
    path = tmp_path / "t"
    layers = {0: LayerInfo(8, 2), 1: LayerInfo(8, 2)}
    ends = []
    with Recorder(path, layers, seconds=1e9) as recorder:
        for n in range(5):
            for layer in layers:
                recorder.record("decode", layer, np.array([[n, n + 1]]))
            recorder.flush()
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(ends[0], len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:cut])
        trace = read_trace(tmp_path / "cut")
        complete = sum(end <= cut for end in ends)
        assert len(trace.passes) == complete
        assert bool(trace.notes) == (cut not in ends)


def test_a_writer_killed_at_work_leaves_a_valid_trace(tmp_path):
    path = tmp_path / "t"
    code = (
        "import numpy as np, os, signal, sys\n"
        "from mbolt_mlx.profile.trace_file import Recorder\n"
        "from mbolt_mlx.profile.traces import LayerInfo\n"
        f"r = Recorder({str(path)!r}, {{0: LayerInfo(8, 2)}}, seconds=0.0)\n"
        "for n in range(50): r.record('decode', 0, np.array([[1, n % 8]]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == -9
    assert len(read_trace(path).passes) == 50


def test_recording_a_layer_costs_microseconds(tmp_path):
    ids = np.zeros((1, 8), np.int32)
    with Recorder(tmp_path / "t", {n: LayerInfo(128, 8) for n in range(48)}) as recorder:
        start = time.thread_time()
        for _ in range(500):
            for layer in range(48):
                recorder.record("decode", layer, ids)
        recorder.flush()
        spent = time.thread_time() - start
    assert spent / (500 * 48) < 30e-6
    assert read_trace(tmp_path / "t").tokens("decode") == 500


def test_a_layer_that_does_not_increase_begins_a_pass_and_batches_keep_their_rows(tmp_path):
    layers = {3: LayerInfo(8, 2)}
    with Recorder(tmp_path / "t", layers) as recorder:
        for _ in range(3):
            recorder.record("decode", 3, np.array([[0, 1], [2, 3], [4, 5]]))
    trace = read_trace(tmp_path / "t")
    assert [p.tokens for p in trace.passes] == [3, 3, 3]


def test_a_recorder_does_not_overwrite_what_is_no_trace(tmp_path):
    (tmp_path / "model").write_bytes(b"weights")
    with pytest.raises(OutputError, match="not a trace"):
        Recorder(tmp_path / "model", {0: LayerInfo(8, 2)})
    assert (tmp_path / "model").read_bytes() == b"weights"
    with pytest.raises(OutputError):
        Recorder(tmp_path, {0: LayerInfo(8, 2)})
    for _ in range(2):
        write_trace(tmp_path / "t", made())


def test_a_trace_has_one_writer(tmp_path):
    path, layers = tmp_path / "t", {0: LayerInfo(8, 2)}
    with Recorder(path, layers) as first:
        first.record("decode", 0, np.array([[1, 2]]))
        first.flush()
        before = path.read_bytes()
        with pytest.raises(OutputError, match="t: another process is writing this trace"):
            Recorder(path, layers)
        assert path.read_bytes() == before
        first.record("decode", 0, np.array([[3, 4]]))
    assert [p.chosen[0].tolist() for p in read_trace(path).passes] == [[[1, 2]], [[3, 4]]]
    Recorder(path, layers).close()


def test_a_drive_that_is_full_from_the_start_leaves_nothing_new(tmp_path):
    code = (
        "import resource, sys\n"
        "from mbolt_mlx.core.errors import OutputError\n"
        "from mbolt_mlx.profile.trace_file import Recorder\n"
        "from mbolt_mlx.profile.traces import LayerInfo\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))\n"
        "try:\n"
        "    Recorder(sys.argv[1], {0: LayerInfo(8, 2)})\n"
        "except OutputError as error:\n"
        "    print(error)\n"
    )
    (tmp_path / "old").write_bytes(b"")
    for name in ("new", "old"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "write failed" in done.stdout, done
    assert [place.name for place in tmp_path.iterdir()] == ["old"]


def test_a_drive_that_fails_ends_the_trace_and_not_the_model(tmp_path, caplog):
    recorder = Recorder(tmp_path / "t", {0: LayerInfo(8, 2)}, seconds=0.0)
    import os

    os.close(recorder._fd)
    recorder._fd = os.open(tmp_path / "t", os.O_RDONLY)
    for _ in range(3):
        recorder.record("decode", 0, np.array([[1, 2]]))
    recorder.close()
    assert "the trace ends here" in caplog.text


def test_damage_before_the_end_is_an_error_with_its_byte(tmp_path):
    path = tmp_path / "t"
    with Recorder(path, {0: LayerInfo(8, 2)}, seconds=0.0) as recorder:
        for n in range(40):
            recorder.record("decode", 0, np.array([[n % 8, 1]]))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(TraceError, match="byte|damaged"):
        read_trace(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b'{"format": "mbolt-trace", "version": 2, "layers": []}',
        b'{"format": "mbolt-trace", "version": 1, "layers": '
        b'[{"layer": 0, "experts": 2, "top_k": 3}]}',
        b'{"format": "mbolt-trace", "version": 1, "layers": 7}',
    ],
)
def test_headers_without_meaning(tmp_path, header):
    (tmp_path / "t").write_bytes(zstandard.compress(header + b"\n"))
    with pytest.raises(TraceError):
        read_trace(tmp_path / "t")


def test_mblt_there_and_back(tmp_path):
    trace = made()
    (tmp_path / "t").write_bytes(mblt.encode(trace))
    again = read_trace(tmp_path / "t")
    assert same(trace, again)
    assert again.layers[3] == LayerInfo(16, 4)


def test_mblt_cut_anywhere_keeps_the_whole_records(tmp_path):
    data = mblt.encode(made(sessions=1, layers=(3, 4), prompt=2, answer=3))
    for cut in range(12 + 2 * (12 + 32), len(data)):
        (tmp_path / "t").write_bytes(data[:cut])
        trace = read_trace(tmp_path / "t")
        assert all(len(p.chosen) == 2 for p in trace.passes[:-1])
    (tmp_path / "t").write_bytes(data[:20])
    with pytest.raises(TraceError, match="no complete record"):
        read_trace(tmp_path / "t")


def test_mblt_warm_up_passes_are_left_out(tmp_path):
    def record(layer, ids):
        ids = np.asarray(ids, "<i4")
        return struct.pack("<3I", layer, ids.shape[1], ids.shape[0]) + ids.tobytes()

    head = struct.pack("<3I", mblt.MAGIC, 1, 8)
    warm = b"".join(record(layer, [list(range(8))]) for layer in (3, 4))
    work = b"".join(record(layer, [[1, 2]]) for _ in range(4) for layer in (3, 4))
    (tmp_path / "t").write_bytes(head + warm + work)
    trace = read_trace(tmp_path / "t")
    assert len(trace.passes) == 4
    assert "warm-up" in trace.notes[0]
    assert trace.layers[3].top_k == 2


def test_mblt_decoding_in_batches(tmp_path):
    layers = {0: LayerInfo(8, 2)}
    ids = np.zeros((4, 2), int) + [0, 1]
    passes = [Pass("prefill", {0: np.zeros((9, 2), int) + [2, 3]})]
    passes += [Pass("decode", {0: ids}) for _ in range(3)]
    (tmp_path / "t").write_bytes(mblt.encode(make_trace(passes, layers)))
    assert [p.phase for p in read_trace(tmp_path / "t").passes] == ["prefill"] * 4
    trace = read_trace(tmp_path / "t", decode_tokens=4)
    assert [p.phase for p in trace.passes] == ["prefill", "decode", "decode", "decode"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (struct.pack("<2I", mblt.MAGIC, 1), "cut short"),
        (struct.pack("<3I", mblt.MAGIC, 2, 8), "unknown version"),
        (struct.pack("<3I", mblt.MAGIC, 1, 0), "number of experts"),
        (struct.pack("<3I", mblt.MAGIC, 1, 8), "no complete record"),
        (struct.pack("<6I", mblt.MAGIC, 1, 8, 0, 9, 1), "byte 12"),
        (struct.pack("<6Ii", mblt.MAGIC, 1, 8, 0, 1, 1, 8), "byte 24"),
        (struct.pack("<6Ii", mblt.MAGIC, 1, 8, 0, 1, 1, -1), "byte 24"),
        (struct.pack("<6I", mblt.MAGIC, 1, 8, 1 << 30, 1, 1), "no meaning"),
    ],
)
def test_mblt_without_meaning(tmp_path, data, match):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match=match):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "prompt", "layers", "widths"),
    [("qwen3-30b-a3b", 28, 48, {3059712, 2654208}), ("gemma4-26b-a4b", 29, 30, {4336640, 3593216})],
)
def test_the_public_traces(name, prompt, layers, widths):
    trace = read_trace(PUBLIC / f"{name}.route.csv.xz")
    assert (trace.tokens("prefill"), trace.tokens("decode")) == (prompt, 128)
    assert len(trace.layers) == layers
    assert {i.expert_bytes for i in trace.layers.values()} == widths
    assert {(i.experts, i.top_k) for i in trace.layers.values()} == {(128, 6)}
    assert trace.rows(0, "decode").shape == (128, 6)
    assert not trace.notes


def route_lines(*, cut=0):
    text = "# route_trace v1\n# model=/a/m.gguf n_layer=4 n_expert=8 n_expert_used=2\n"
    text += "# layer=3 expert_bytes=500 dense_bytes=1\nturn,phase,step,layer,slot,expert,weight,"
    text += "residency,expert_bytes\n"
    for phase, step in ((0, 0), (0, 1), (1, 2), (1, 3)):
        text += "".join(f"0,{phase},{step},3,{slot},{slot + step},0.5,0,500\n" for slot in (0, 1))
    return text[: len(text) - cut]


def test_route_csv_whose_layers_start_at_three(tmp_path):
    (tmp_path / "t").write_text(route_lines())
    trace = read_trace(tmp_path / "t")
    assert list(trace.layers) == [3]
    assert trace.layers[3] == LayerInfo(8, 2, 500)
    assert [p.tokens for p in trace.passes] == [2, 1, 1]
    for name, pack in (("t.gz", gzip.compress), ("t.xz", lzma.compress)):
        (tmp_path / name).write_bytes(pack(route_lines().encode()))
        assert same(read_trace(tmp_path / name), trace)


def test_a_cut_route_csv_loses_only_the_incomplete_layer(tmp_path):
    for cut in (1, 5, 20):
        (tmp_path / "t").write_text(route_lines(cut=cut))
        trace = read_trace(tmp_path / "t")
        assert [p.tokens for p in trace.passes] == [2, 1]
        assert len(trace.notes) == 2


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("0,1,2,3,1,3,", "0,1,2,3,1,x,", "line 10"),
        ("0,1,2,3,1,3,0.5,0,500", "0,1,2,3,1,3", "line 10"),
        ("0,1,2,3,1,3,", "0,1,2,3,4,3,", "slot 4"),
        ("0,1,2,3,1,3,", "0,1,2,3,1,8,", "does not have"),
        ("0,1,2,3,1,3,", "0,7,2,3,1,3,", "line 10"),
        ("expert_bytes=500", "expert_bytes=x", "line 3"),
    ],
)
def test_route_csv_without_meaning(tmp_path, old, new, match):
    assert old in route_lines()
    (tmp_path / "t").write_text(route_lines().replace(old, new))
    with pytest.raises(TraceError, match=match):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x1f\x8b" + b"x" * 20, b"\xfd7zXZ\x00" + b"x" * 20]
)
def test_what_is_no_trace(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match="t: "):
        read_trace(tmp_path / "t")


def test_a_route_csv_without_routes(tmp_path):
    (tmp_path / "t").write_text("# route_trace v1\n")
    with pytest.raises(TraceError, match="no routes"):
        read_trace(tmp_path / "t")


def test_a_trace_of_another_model_is_refused():
    trace = made(layers=(3, 5))
    trace.check_model({3: 16, 5: 16, 7: 16})
    with pytest.raises(TraceError, match="layer 5"):
        trace.check_model({3: 16})
    with pytest.raises(TraceError, match="expected 32, found 16"):
        trace.check_model({3: 32, 5: 16})


def test_the_header_of_a_trace_is_what_its_writer_knew(tmp_path):
    trace = made()
    write_trace(tmp_path / "t", trace)
    assert trace_file.is_ours((tmp_path / "t").read_bytes())
    assert not trace_file.is_ours(zstandard.compress(b"{}"))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("n_expert=8", "n_expert=999999999999", "the experts of layer 3 have no meaning"),
        ("n_expert=8", "n_expert=²", "the number of experts"),
        ("n_expert_used=2", "n_expert_used=9", "the top_k of layer 3 have no meaning"),
        ("expert_bytes=500 ", "expert_bytes=-500 ", "the expert_bytes of layer 3"),
        ("expert_bytes=500 ", f"expert_bytes={10**30} ", "the expert_bytes of layer 3"),
        (",3,0,0,", ",3,0,99999999999,", "line 5 has the expert 99999999999"),
    ],
)
def test_a_route_csv_with_numbers_without_meaning(tmp_path, old, new, match):
    text = route_lines().replace(old, new, 1)
    assert new in text
    (tmp_path / "t").write_text(text)
    if "²" in new:
        assert match in read_trace(tmp_path / "t").notes[0]
        return
    with pytest.raises(TraceError, match=match):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("experts", ["1e400", "Infinity", str(1 << 40), "NaN", "0", "null"])
def test_a_header_with_numbers_without_meaning(tmp_path, experts):
    head = '{"format": "mbolt-trace", "version": 1, "layers": '
    head += f'[{{"layer": 0, "experts": {experts}, "top_k": 2}}]}}'
    record = struct.pack("<BBHHI", 3, 0, 0, 2, 1) + bytes(2)
    (tmp_path / "t").write_bytes(b"".join(map(zstandard.compress, (head.encode(), record))))
    with pytest.raises(TraceError, match="no meaning"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_packed_in_several_parts(tmp_path, pack):
    text = route_lines().encode()
    (tmp_path / "t").write_bytes(pack(text[:200]) + pack(text[200:]))
    (tmp_path / "u").write_bytes(text)
    assert same(read_trace(tmp_path / "t"), read_trace(tmp_path / "u"))


def test_a_trace_of_another_top_k_or_with_fewer_layers_is_refused():
    trace = made(layers=(3, 5))
    experts = {3: 16, 5: 16}
    trace.check_model(experts, top_k={3: 4, 5: 4})
    with pytest.raises(TraceError, match="layer 5 .*experts a token; expected 2, found 4"):
        trace.check_model(experts, top_k={3: 4, 5: 2})
    with pytest.raises(TraceError, match="lacks layer 4.*; record all layers"):
        trace.check_model({**experts, 4: 16}, top_k={3: 4, 4: 4, 5: 4})
