"""Pictures come out, with one command each."""

import json
import os

import numpy as np
import pytest

from mbolt_mlx.cli.main import main
from mbolt_mlx.core.errors import TraceError
from mbolt_mlx.profile.compare import compare, held_out, table
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace


def made(sessions=1, tokens=24):
    rng = np.random.default_rng(0)
    layers = {n: LayerInfo(12, 3, 50000, 3) for n in (1, 2)}

    def chosen(count):
        return {n: np.stack([rng.permutation(12)[:3] for _ in range(count)]) for n in layers}

    passes = []
    for session in range(sessions):
        passes.append(Pass("prefill", chosen(5), session))
        passes += [Pass("decode", chosen(1), session) for _ in range(tokens)]
    return make_trace(passes, layers, model="made")


@pytest.fixture
def trace(tmp_path):
    write_trace(tmp_path / "made.trace", made())
    return str(tmp_path / "made.trace")


@pytest.mark.parametrize("kind", ["hits", "layouts", "coactivation"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_of_each_kind(tmp_path, trace, kind, ending):
    output = tmp_path / f"x.{ending}"
    assert main(["plot", kind, trace, "-o", str(output)]) == 0
    assert output.stat().st_size > 1000


def test_predicted_against_measured(tmp_path):
    rows = [
        {"layout": y, "predicted_ms_per_token": 10.0, "measured_ms_per_token": 11.0}
        for y in ("stock", "coalesced")
    ]
    (tmp_path / "g.json").write_text(json.dumps({"name": "m", "rows": rows}))
    argv = ["plot", "measured", str(tmp_path / "g.json"), "-o", str(tmp_path / "x.png")]
    assert main(argv) == 0


def test_a_plan_against_the_engine(tmp_path):
    rows = [
        {
            **{"model": model, "source": source, "predicted_ms_per_token": ms},
            "measured_ms_per_token": 1.1 * ms,
        }
        for model, ms in (("small", 20.0), ("large", 500.0))
        for source in ("side_file", "shards")
    ]
    (tmp_path / "p.json").write_text(json.dumps({"plan_check": {"rows": rows}}))
    assert main(["plot", "measured", str(tmp_path / "p.json"), "-o", str(tmp_path / "x.svg")]) == 0
    # Text is drawn as outlines; each is named in a comment.
    drawn = (tmp_path / "x.svg").read_text()
    assert "large, side-file" in drawn and "small, own files" in drawn
    rows[0]["source"] = "nowhere"
    (tmp_path / "p.json").write_text(json.dumps({"plan_check": {"rows": rows}}))
    assert main(["plot", "measured", str(tmp_path / "p.json"), "-o", str(tmp_path / "x.svg")]) == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["hits", "TRACE", "-o", "x.txt"], "ends in .png"),
        (["coactivation", "TRACE", "--layer", "7", "-o", "x.png"], "no layer 7"),
        (["coactivation", "TRACE", "-o", "absent/x.png"], "absent: no such folder"),
        (["layouts", "TRACE", "TRACE", "-o", "x.png"], "one trace"),
        (["measured", "TRACE", "-o", "x.png"], "not what `gate` or plan_check.py wrote"),
        (["measured", "absent", "-o", "x.png"], "absent"),
    ],
)
def test_what_cannot_be_drawn(capsys, tmp_path, trace, argv, says):
    argv = [trace if word == "TRACE" else word for word in argv]
    assert main(["plot", *argv]) == 2
    assert says in capsys.readouterr().err


def test_without_matplotlib_the_error_says_how_to_get_it(capsys, tmp_path, trace, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "hits", trace, "-o", str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert '`pip install -e ".[plot]"` in the checkout' in err and "mbolt-mlx[plot]" not in err


def test_policies_side_by_side():
    rows = compare(made(), residents=[0.5])
    assert len(rows) == 6
    base = rows[0]
    assert (base["policy"], base["scope"], base["gap_closed"]) == ("lru", "layer", 0.0)
    assert base["against_lru"] == [0.0, 0.0]
    for row in rows:
        assert row["range"][0] <= row["hit_rate"] <= row["range"][1]
        assert row["scope"] == "class" or row["hit_rate"] <= row["belady"]
    assert len(table(rows).splitlines()) == 8


def test_policies_are_not_compared_where_nothing_was_decoded():
    with pytest.raises(TraceError, match="no decoded token"):
        compare(held_out(made(), 1.0))


def test_what_is_held_out():
    many = held_out(made(sessions=4, tokens=2), 0.5)
    assert {one.session for one in many.passes} == {2, 3}
    one = held_out(made(tokens=10), 0.3)
    assert [p.phase for p in one.passes] == ["prefill"] + ["decode"] * 7


def one_line(capsys, *argv):
    assert main([str(a) for a in argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "unexpected" not in err
    return err


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
@pytest.mark.parametrize("kind", ["hits", "layouts", "coactivation"])
def test_only_a_picture_of_its_kind_is_replaced(tmp_path, trace, capsys, kind, ending):
    output = tmp_path / f"x.{ending}"
    argv = ("plot", kind, trace, "-o", output)
    for data in (b"GGUF\x03\0\0\0 <svg %PDF- \x89PNG", b"\0" * 9000):
        output.write_bytes(data)
        assert f"{output}: another file is there already, and it is no .{ending}" in one_line(
            capsys, *argv
        )
        assert output.read_bytes() == data
    output.write_bytes(b"")
    assert main([str(a) for a in argv]) == 0 and main([str(a) for a in argv]) == 0
    assert output.stat().st_size > 1000
    capsys.readouterr()
    other = {"png": "pdf", "svg": "png", "pdf": "svg"}[ending]
    wrong = tmp_path / f"y.{other}"
    output.rename(wrong)
    assert "another file is there" in one_line(capsys, *argv[:-1], wrong)


def test_a_pipe_a_folder_or_no_folder_is_no_place_for_a_picture(tmp_path, trace, capsys):
    os.mkfifo(tmp_path / "p.png")
    (tmp_path / "d.png").mkdir()
    for name, says in (("p.png", "a pipe"), ("d.png", "a folder"), ("no/x.png", "no such folder")):
        assert says in one_line(capsys, "plot", "hits", trace, "-o", tmp_path / name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"rows": []}', "no rows to draw"),
        ('{"plan_check": {"rows": []}}', "no rows to draw"),
        *(
            (f'{{"rows": [{{"layout": "x", "{a}": {value}, "{b}": 1}}]}}', f"row 0: {a} has no")
            for value in ("NaN", "Infinity", "-1", "0", "1e300")
            for a, b in (
                ("predicted_ms_per_token", "measured_ms_per_token"),
                ("measured_ms_per_token", "predicted_ms_per_token"),
            )
        ),
        (f'{{"rows": [{{"layout": "x", "predicted_ms_per_token": {10**400}}}]}}', "not what"),
    ],
)
def test_measurements_without_meaning(tmp_path, capsys, text, says):
    (tmp_path / "g.json").write_text(text)
    err = one_line(capsys, "plot", "measured", tmp_path / "g.json", "-o", tmp_path / "x.png")
    assert f"{tmp_path / 'g.json'}: " in err and says in err
    assert not (tmp_path / "x.png").exists()


def test_measurements_from_a_pipe_or_a_device(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        err = one_line(capsys, "plot", "measured", path, "-o", tmp_path / "x.png")
        assert "not a regular file" in err
