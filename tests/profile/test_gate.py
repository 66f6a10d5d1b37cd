"""The gate: what is read is what was replayed, and nothing is left behind."""

import json

import numpy as np
import pytest

from mbolt_mlx.cli.main import main
from mbolt_mlx.core import files, reads
from mbolt_mlx.core.errors import OutputError, UsageError
from mbolt_mlx.profile import gate as gates
from mbolt_mlx.profile.gate import gate, work_of
from mbolt_mlx.profile.layout import lay_out
from mbolt_mlx.profile.perms import make_perms, write_perms
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(0)
    layers = {n: LayerInfo(12, 3, 600_000 + 700 * n, 3) for n in (1, 2)}
    passes = [
        Pass("decode", {n: np.array([rng.permutation(12)[:3]]) for n in layers}) for _ in range(20)
    ]
    return make_trace(passes, layers, model="made")


def test_a_works_reads_are_the_replays(trace):
    for layout in ("stock", "coalesced"):
        ranges = lay_out(layout, trace.layers)
        work = work_of(layout, trace, Setup(resident=0.5), ranges)
        counts = replay(trace, Setup(resident=0.5), ranges).decode
        assert sum(map(len, work.starts)) == work.reads == counts.reads
        assert work.nbytes == counts.bytes and work.tokens == 20
        for start in work.starts:
            for offset, nbytes in start:
                assert offset % 4096 == 0 and nbytes % 4096 == 0 and offset + nbytes <= work.end
        widened = sum(n for start in work.starts for _, n in start)
        assert counts.bytes <= widened <= counts.bytes + 8192 * counts.reads


def test_several_files_of_a_layout_do_not_overlap(trace):
    class Run:
        pieces, nbytes = (0,), 5000

        def __init__(self, file):
            self.files, self.offsets = (file,) * 12, tuple(range(0, 60000, 5000))

    ranges = {1: (Run(0),), 2: (Run(3),)}
    work = work_of("x", trace, Setup(resident=0.5), ranges)
    places = {offset // (1 << 20) for start in work.starts for offset, _ in start}
    assert places == {0, 1} and work.end == 2 << 20


def test_predict_and_measure(trace, tmp_path, monkeypatch):
    seen = []
    real = reads.Reader.start

    def noting(reader, requests, batch):
        seen.append([(r.offset, r.nbytes) for r in requests])
        return real(reader, requests, batch)

    monkeypatch.setattr(reads.Reader, "start", noting)
    works = [
        work_of(name, trace, Setup(resident=0.5), lay_out(name, trace.layers))
        for name in ("stock", "coalesced")
    ]
    found = gate(works, tmp_path, rounds=2, seconds=0.5)
    assert list(tmp_path.iterdir()) == []
    stock, coalesced = ([list(start) for start in work.starts] for work in works)
    assert seen == [*stock, *coalesced, *coalesced, *stock]
    for row, work in zip(found["rows"], works, strict=True):
        assert row["reads_per_token"] * row["tokens"] == pytest.approx(work.reads)
        assert len(row["all_ms_per_token"]) == 2
        assert len(row["all_predicted_ms_per_token"]) == len(found["probes"]) == 3
        assert row["predicted_ms_per_token"] > 0 and row["measured_ms_per_token"] > 0
    json.dumps(found)


def test_fewer_tokens(trace, tmp_path):
    work = work_of("stock", trace, Setup(resident=0.5), lay_out("stock", trace.layers))
    found = gate([work], tmp_path, rounds=1, tokens=5, seconds=0.5)
    assert found["rows"][0]["tokens"] == 5


def test_a_drive_without_room_is_left_alone(trace, tmp_path, monkeypatch):
    work = work_of("stock", trace, Setup(resident=0.5), lay_out("stock", trace.layers))
    monkeypatch.setattr(files, "free_space", lambda path: 1 << 20)
    with pytest.raises(OutputError, match="too little space"):
        gate([work], tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        gate([work], tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_what_fails_midway_leaves_nothing(trace, tmp_path, monkeypatch):
    work = work_of("stock", trace, Setup(resident=0.5), lay_out("stock", trace.layers))

    def fails(*args, **kwargs):
        raise OutputError("write failed")

    monkeypatch.setattr(gates, "probe", fails)
    with pytest.raises(OutputError):
        gate([work], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command(trace, tmp_path, capsys):
    (tmp_path / "drive").mkdir()
    write_trace(tmp_path / "t", trace)
    write_perms(tmp_path / "p.json", make_perms(trace))
    argv = ["gate", "trace", str(tmp_path / "t"), str(tmp_path / "p.json")]
    argv += ["-o", str(tmp_path / "g.json"), "--scratch", str(tmp_path / "drive")]
    assert main([*argv, "--rounds", "1", "--seconds", "0.5", "--resident", "0.5"]) == 0
    assert "predicted" in capsys.readouterr().out
    document = json.loads((tmp_path / "g.json").read_text())
    assert [row["layout"] for row in document["rows"]] == ["stock", "coalesced", "coalesced+chain"]
    assert list((tmp_path / "drive").iterdir()) == []
    assert main([*argv, "--layouts", "nonsense"]) == 2
    assert main([*argv, "--rounds", "0"]) == 2


def row(name, predicted, measured, again=None):
    return {
        "layout": name,
        "measured_ms_per_token": measured,
        "error": predicted / measured - 1.0,
        "drift": max(again or predicted, predicted) / min(again or predicted, predicted) - 1.0,
    }


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [row("stock", 98, 100), row("coalesced", 51, 50)],
            "within 2%; coalesced reads 2.00 times",
        ),
        ([row("stock", 98, 100), row("coalesced", 98, 99)], "no layout reads clearly faster"),
        ([row("stock", 70, 100)], "does not hold here: it is off by up to 30%"),
        ([row("stock", 70, 100, 98)], "the drive itself changed"),
    ],
)
def test_the_verdict(rows, says):
    assert says in gates.verdict(rows)


def refused(capsys, tmp_path, path, *more):
    """The one line of an error, from a gate that wrote nothing."""
    (tmp_path / "drive").mkdir(exist_ok=True)
    argv = ["gate", "trace", str(path), "-o", str(tmp_path / "g.json")]
    argv += ["--scratch", str(tmp_path / "drive"), "--rounds", "1", "--seconds", "0.5"]
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "writing" not in err
    assert not (tmp_path / "g.json").exists() and not list((tmp_path / "drive").iterdir())
    return err


def test_nothing_to_measure_is_said_before_anything_is_written(trace, tmp_path, capsys):
    write_trace(tmp_path / "t", trace)
    assert "is in memory; give a smaller --resident" in refused(
        capsys, tmp_path, tmp_path / "t", "--resident", "1.0"
    )
    prompts = trace.part(Pass("prefill", p.chosen) for p in trace.passes)
    write_trace(tmp_path / "p", prompts)
    assert f"{tmp_path / 'p'}: the trace has no decoded token" in refused(
        capsys, tmp_path, tmp_path / "p", "--resident", "0.5"
    )
    # The same expert again and again: read once, in the prompt.
    same = {n: np.array([[0, 1, 2]]) for n in trace.layers}
    steady = trace.part([Pass("prefill", same), *[Pass("decode", same)] * 9])
    write_trace(tmp_path / "s", steady)
    assert "is in memory" in refused(capsys, tmp_path, tmp_path / "s", "--resident", "0.5")
    late = {n: np.array([[3, 4, 5]]) for n in trace.layers}
    write_trace(tmp_path / "l", steady.part([*steady.passes, Pass("decode", late)]))
    assert "in the first 1 decoded tokens; give more --tokens" in refused(
        capsys, tmp_path, tmp_path / "l", "--resident", "0.5", "--tokens", "1"
    )
    ranges = lay_out("stock", prompts.layers)
    with pytest.raises(UsageError, match="no decoded token"):
        gate([work_of("stock", prompts, Setup(resident=0.5), ranges)], tmp_path)


def test_layouts_that_cannot_be_compared(trace, tmp_path, capsys):
    write_trace(tmp_path / "t", trace)
    twice = refused(capsys, tmp_path, tmp_path / "t", "--layouts", "stock,coalesced,stock")
    assert "--layouts names stock twice" in twice
    for name in ("coalesced+chain", "heat"):
        err = refused(capsys, tmp_path, tmp_path / "t", "--layouts", f"stock,{name}")
        assert f"the layout {name} needs an order; give PERMS" in err and "--perms" not in err


def test_the_table_says_what_its_error_is():
    from mbolt_mlx.cli.gate import lines

    one = row("stock", 98, 100) | {"reads_per_token": 1.0, "bytes_per_token": 1e6}
    out = lines({"rows": [one | {"predicted_ms_per_token": 98.0}], "verdict": "v"})
    assert out[0].endswith("error a round") and out[1].endswith("-2%")
    assert out[2].startswith("error a round: median over the rounds of predicted ÷ measured")
