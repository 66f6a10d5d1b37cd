"""GGUF files where the commands that only reckon take a model: simulate, gate, trace-stats."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mbolt_gguf.headers import open_gguf
from mbolt_gguf.model import Model
from mbolt_gguf.predict import PAGE, predict, ranges_of
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.cli import sim
from mbolt_mlx.cli.headers import Headers, open_headers
from mbolt_mlx.cli.main import main as mlx_main
from mbolt_mlx.core.errors import UnsupportedError, UsageError
from mbolt_mlx.profile.layout import LAYOUTS
from mbolt_mlx.profile.perms import read_perms
from mbolt_mlx.profile.replay import Setup, replay
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace
from tests.gguf import made
from tests.gguf.conftest import F16, F32, Q8_0, value
from tests.gguf.llama import random_perms
from tests.gguf.makers import make_gguf

# Layout here → layout of the rewriter.
REWRITTEN = {
    "heat": "heat",
    "clique": "clique",
    "chain": "chain",
    "coalesced": "interleave",
    "interleave": "interleave+chain",
    "coalesced+heat": "interleave+heat",
    "coalesced+clique": "interleave+clique",
    "coalesced+chain": "interleave+chain",
}
EXPERTS = made.EXPERTS


def dense_first(path, **more):
    """A dense layer, then two of experts that differ in type and size."""
    tensors = [("token_embd.weight", F32, (32, 7)), ("blk.0.ffn_up.weight", F32, (32, 8))]
    tensors += [*made.layer(1, F16, ff=33), *made.layer(2, Q8_0), ("output.weight", F32, (32, 5))]
    return made.write_model(path, tensors, **more)


def trace_of(path, *, experts=EXPERTS, layers=(1, 2), seed=0):
    """Write a trace of random routing; returns it as read."""
    rng = np.random.default_rng(seed)
    infos = {n: LayerInfo(experts, 2) for n in layers}

    def chosen(tokens):
        return {n: np.stack([rng.permutation(experts)[:2] for _ in range(tokens)]) for n in infos}

    passes = [Pass("prefill", chosen(5))] + [Pass("decode", chosen(1)) for _ in range(30)]
    trace = make_trace(passes, infos, model="made")
    write_trace(path, trace)
    return trace


def sized(trace, path):
    """``trace`` with the sizes of the GGUF model ``path``."""
    return replace(trace, layers=open_gguf(path).infos)


def profile(folder):
    made.perms_of(folder / "perms.json", [1, 2])
    return read_perms(folder / "perms.json")


def told(capsys, *argv, status=0, main=sim.main):
    assert main([str(a) for a in argv]) == status
    return capsys.readouterr()


def says(capsys, *argv):
    """The one line of an error."""
    err = told(capsys, *argv, status=2).err
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("split", [0, 4])
def test_layers_and_sizes_come_from_the_header(tmp_path, split):
    path = dense_first(tmp_path / "m.gguf", split=split)
    found = open_headers(str(path))
    assert found.name == path.name and not found.remote
    # F16: two matrices of 256 × 33, and down, whose row is padded to whole blocks by the maker.
    first = 2 * (2 * 256 * 33 + 256 * 256)
    second = 34 * (2 * 256 * 32 + 256 * 256) // 32
    assert found.infos == {1: LayerInfo(8, 2, first, 3), 2: LayerInfo(8, 2, second, 3)}
    assert {n: (s.experts, s.top_k, s.expert_bytes) for n, s in found.shapes.items()} == {
        1: (8, 2, first),
        2: (8, 2, second),
    }
    assert found.ranges("stock") == ranges_of(Model.open(path))
    numbers = {n for some in found.ranges("stock").values() for r in some for n in r.files}
    assert len(numbers) > 1 if split else numbers == {0}


@pytest.mark.parametrize("source", ["as made", "chain", "interleave+heat"])
@pytest.mark.parametrize("split", [0, 4])
def test_each_layout_is_the_rewriters_to_the_byte(tmp_path, split, source):
    path, perms = dense_first(tmp_path / "m.gguf", split=split), profile(tmp_path)
    if source != "as made":
        other = random_perms(path, seed=3)
        path = rewrite(path, other, tmp_path / "s.gguf", layout=source, progress=False).paths[0]
    headers = open_gguf(path)
    assert {*REWRITTEN, "stock"} == {*LAYOUTS}
    for number, (name, layout) in enumerate(REWRITTEN.items()):
        target = tmp_path / f"{number}.gguf"
        written = rewrite(path, perms, target, layout=layout, progress=False).paths[0]
        assert headers.ranges(name, perms) == ranges_of(Model.open(written)), name


def test_a_profile_of_one_layer_leaves_the_other(tmp_path):
    path = dense_first(tmp_path / "m.gguf")
    made.perms_of(tmp_path / "perms.json", [2])
    perms = read_perms(tmp_path / "perms.json")
    found = open_gguf(path).ranges("chain", perms)
    assert list(found[1][0].offsets) == sorted(found[1][0].offsets)
    assert list(np.argsort(found[2][0].offsets)) == perms.order("chain")[2]


def test_what_a_layout_needs(tmp_path):
    path = dense_first(tmp_path / "m.gguf")
    headers = open_gguf(path)
    for name in REWRITTEN.keys() - {"coalesced"}:
        with pytest.raises(UsageError, match=f"layout {name.replace('+', '.')} needs an order"):
            headers.ranges(name)
    made.perms_of(tmp_path / "perms.json", [1, 7])
    with pytest.raises(UsageError, match="profile is of another model: layer 7"):
        headers.ranges("chain", read_perms(tmp_path / "perms.json"))
    odd = [("ffn_gate_tid2eid.weight", F32, (3,))]
    table = made.write_model(tmp_path / "t.gguf", made.layer(1, F16, more=odd))
    made.perms_of(tmp_path / "perms.json", [1])
    with pytest.raises(UnsupportedError, match="names experts by their ids"):
        open_gguf(table).ranges("heat", read_perms(tmp_path / "perms.json"))


@pytest.mark.parametrize("model", ["single", "split", "rewritten", "interleaved"])
def test_simulate_counts_as_predict_says(capsys, tmp_path, model):
    path = dense_first(tmp_path / "m.gguf", split=4 if model == "split" else 0)
    if model in ("rewritten", "interleaved"):
        layout = "heat" if model == "rewritten" else "interleave+chain"
        target = tmp_path / "r.gguf"
        path = rewrite(path, profile(tmp_path), target, layout=layout, progress=False).paths[0]
    trace = trace_of(tmp_path / "t.trace")
    budget = sum(5 * i.expert_bytes for i in open_gguf(path).infos.values())
    argv = ("simulate", "--trace", tmp_path / "t.trace", "--model", path, "--layout", "stock")
    argv += ("--policy", "lru", "--scope", "global", "--budget", budget, "--json")
    found = json.loads(told(capsys, *argv).out)
    said = predict(trace, Model.open(path), budget)
    assert found["reads_per_token"] == pytest.approx(said.issued_reads) and said.issued_reads > 1
    assert found["bytes_per_token"] == pytest.approx(said.issued_bytes)
    assert found["decode_hit_rate"] == pytest.approx(said.hit_rate)


def gated(capsys, folder, *argv):
    """Rows by layout of a short gate, after it said that it is done."""
    (folder / "drive").mkdir()
    argv += ("-o", folder / "g.json", "--scratch", folder / "drive")
    out = told(capsys, "gate", *argv, "--rounds", "1", "--seconds", "0.5", "--resident", "0.4").out
    document = json.loads((folder / "g.json").read_text())
    assert list((folder / "drive").iterdir()) == [] and "predicted" in out
    return document["name"], {row["layout"]: row for row in document["rows"]}


@pytest.mark.parametrize("model", ["single", "split", "rewritten"])
def test_gate_on_a_gguf(capsys, tmp_path, model):
    path = dense_first(tmp_path / "m.gguf", split=4 if model == "split" else 0)
    perms = profile(tmp_path)
    if model == "rewritten":
        other = random_perms(path, seed=3)
        path = rewrite(path, other, tmp_path / "r.gguf", layout="chain", progress=False).paths[0]
    trace = sized(trace_of(tmp_path / "t.trace"), path)
    argv = (path, tmp_path / "t.trace", tmp_path / "perms.json")
    if model == "single":
        argv += ("--layouts", ",".join(LAYOUTS))
    name, rows = gated(capsys, tmp_path, *argv)
    assert name == str(path)
    assert [*rows] == (
        [*LAYOUTS] if model == "single" else ["stock", "coalesced", "coalesced+chain"]
    )
    for layout, row in rows.items():
        here = path
        if layout != "stock":
            target = tmp_path / f"{layout}.gguf"
            wish = REWRITTEN[layout]
            here = rewrite(path, perms, target, layout=wish, progress=False).paths[0]
        setup = Setup(resident=0.4, merge_gap=PAGE - 1)
        counts = replay(trace, setup, ranges_of(Model.open(here))).decode
        assert row["tokens"] == 30 and counts.reads > 30
        assert (row["replayed_reads"], row["replayed_bytes"]) == (counts.reads, counts.bytes)
        assert row["reads_per_token"] * 30 == pytest.approx(counts.reads)
        assert row["bytes_per_token"] * 30 >= counts.bytes
    assert rows["coalesced"]["reads_per_token"] < rows["stock"]["reads_per_token"]


def test_gate_on_a_model_that_llama_would_run(capsys, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", "deepseek2-fused", "MXFP4", split=9)
    found = open_gguf(path)
    layers = [*found.shapes]
    assert 0 not in layers and {i.pieces for i in found.infos.values()} == {2}
    experts, top_k = {(s.experts, s.top_k) for s in found.shapes.values()}.pop()
    assert top_k >= 2
    trace_of(tmp_path / "t.trace", experts=experts, layers=layers)
    name, rows = gated(capsys, tmp_path, path, tmp_path / "t.trace")
    assert [*rows] == ["stock", "coalesced"]
    assert rows["coalesced"]["reads_per_token"] < rows["stock"]["reads_per_token"]


def test_trace_stats_and_cluster_take_sizes_of_a_gguf(capsys, tmp_path):
    path = dense_first(tmp_path / "m.gguf")
    trace_of(tmp_path / "t.trace")
    argv = (tmp_path / "t.trace", "--model", path)
    for main, name in ((sim.main, "stats"), (sim.main, "trace-stats"), (mlx_main, "trace-stats")):
        found = json.loads(told(capsys, name, *argv, "--json", main=main).out)
        each = [i.expert_bytes for i in open_gguf(path).infos.values()]
        assert found["token_bytes"] == 2 * sum(each)
    told(capsys, "cluster", *argv, "-o", tmp_path / "p.json")
    told(capsys, "simulate", "--trace", *argv, "--resident", "0.5", "--perms", tmp_path / "p.json",
         "--layout", "chain", "--seed-heat")  # fmt: skip


def test_a_trace_or_profile_of_another_model_is_one_line(capsys, tmp_path):
    path, drive = dense_first(tmp_path / "m.gguf"), ("-o", tmp_path / "g.json")
    trace_of(tmp_path / "t", experts=6)
    found = says(capsys, "gate", path, tmp_path / "t", *drive)
    assert f"{tmp_path / 't'}: the trace is of another model: layer 1 has another number" in found
    trace_of(tmp_path / "t", layers=(0, 1))
    found = says(
        capsys, "simulate", "--trace", tmp_path / "t", "--model", path, "--resident", "0.5"
    )
    assert "it has a layer 0 with experts" in found
    trace_of(tmp_path / "t")
    made.perms_of(tmp_path / "perms.json", [1, 2, 3])
    found = says(capsys, "gate", path, tmp_path / "t", tmp_path / "perms.json", *drive)
    assert "the profile is of another model: layer 3" in found
    found = says(capsys, "gate", path, tmp_path / "t", *drive, "--layouts", "stock,chain")
    assert "the layout chain needs an order" in found
    assert not (tmp_path / "g.json").exists()


def test_a_damaged_or_absent_gguf_is_one_line(capsys, tmp_path):
    path = dense_first(tmp_path / "m.gguf", split=4)
    trace_of(tmp_path / "t")
    argv = ("stats", tmp_path / "t", "--model")
    made.files_of(path)[1].unlink()
    assert "file 2 of the" in says(capsys, *argv, path)
    whole = dense_first(tmp_path / "w.gguf")
    whole.write_bytes(whole.read_bytes()[:-100])
    assert "cut short" in says(capsys, *argv, whole)
    (tmp_path / "text.gguf").write_text("no model")
    assert "not a GGUF file" in says(capsys, *argv, tmp_path / "text.gguf")
    assert "absent.gguf" in says(capsys, *argv, "folder/absent.gguf")
    dense = made.write_model(tmp_path / "d.gguf", [("blk.0.ffn_up.weight", F32, (32, 8))])
    assert "experts" in says(capsys, *argv, dense)
    assert "a folder, not a file" in says(capsys, *argv, tmp_path / "t")


def test_a_gguf_is_known_by_its_name_or_its_first_bytes(tmp_path, tiny_model):
    path = dense_first(tmp_path / "m.gguf")
    blob = path.rename(tmp_path / "sha256-0123")
    assert open_headers(str(blob)).name == "sha256-0123"
    folder = tmp_path / "model.gguf"
    folder.symlink_to(tiny_model)
    assert isinstance(open_headers(str(folder)), Headers)


def test_any_file_of_a_split_model_will_do(tmp_path):
    path = dense_first(tmp_path / "m.gguf", split=4)
    last = made.files_of(path)[-1]
    assert open_headers(str(last)).ranges("stock") == open_headers(str(path)).ranges("stock")


def test_a_plan_says_what_there_is_instead(capsys, tmp_path):
    path = dense_first(tmp_path / "m.gguf")
    assert "`mbolt-gguf map`" in says(capsys, "plan", "--model", path)


@pytest.mark.parametrize("command", ["gate", "simulate", "stats", "cluster"])
def test_help_says_so(capsys, command):
    assert "a GGUF file" in " ".join(told(capsys, command, "--help").out.split())


def test_layers_that_guess_ahead_need_not_be_traced(capsys, tmp_path):
    ahead = dense_first(
        tmp_path / "a.gguf",
        keys=[
            *made.values(),
            value("test.block_count", "u32", 3),
            value("test.nextn_predict_layers", "u32", 1),
        ],
    )
    trace_of(tmp_path / "t", layers=(1,))
    argv = ("simulate", "--trace", tmp_path / "t", "--resident", "0.5", "--model")
    told(capsys, *argv, ahead)
    all_layers = dense_first(tmp_path / "b.gguf")
    assert "the trace lacks layer 2" in says(capsys, *argv, all_layers)
    trace_of(tmp_path / "u", layers=(2,))
    argv = ("simulate", "--trace", tmp_path / "u", "--resident", "0.5", "--model")
    assert "the trace lacks layer 1" in says(capsys, *argv, ahead)
