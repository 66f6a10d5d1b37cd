import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from mbolt_gguf import ranges
from mbolt_gguf import rewrite as module
from mbolt_gguf.cli.main import main
from mbolt_gguf.cli.seed import main as seed
from mbolt_gguf.header import read_gguf
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core import files, scatter
from mbolt_mlx.core.errors import GgufError, OutputError, UnsupportedError, UsageError
from mbolt_mlx.core.output import partial_paths
from mbolt_mlx.profile.perms import read_perms
from tests.gguf import made
from tests.gguf.conftest import F16, F32, Q8_0, value

LAYOUTS = [
    "identity", "identity+pipeline", "heat", "heat+pipeline", "clique", "clique+pipeline", "chain",
    "chain+pipeline", "interleave", "interleave+heat", "interleave+clique", "interleave+chain",
]  # fmt: skip


def profile(folder, layers, **more):
    document = made.perms_of(folder / "perms.json", layers, **more)
    return read_perms(folder / "perms.json"), document


def order_in(layout, document):
    kind = next((k for k in ("heat", "clique", "chain") if k in layout.split("+")), None)
    return made.orders_of(document, kind) if kind else {}


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("split", [0, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_every_type(tmp_path, layout, split):
    """F16, Q8_0, Q4_K, Q6_K, IQ4_XS and MXFP4 in slices that are no multiples of a page."""
    model = made.typed_model(tmp_path / "m.gguf", split=split, empty_first=layout == "chain")
    before = {p: sha(p) for p in made.files_of(model)}
    perms, document = profile(tmp_path, range(6))
    report = rewrite(model, perms, tmp_path / "out.gguf", layout=layout)
    fields = made.check(model, report.paths[0], order_in(layout, document))
    assert made.field(fields, "mbolt.layout") == layout
    assert made.field(fields, "mbolt.n_layers") == 6 and made.field(fields, "mbolt.n_experts") == 8
    assert made.field(fields, "general.alignment") is None
    assert len(report.paths) == len(before) and report.bytes == sum(
        p.stat().st_size for p in report.paths
    )
    assert {p: sha(p) for p in before} == before
    left = {p.name for p in tmp_path.iterdir()} - {"perms.json"}
    assert left == {p.name for p in [*before, *report.paths]}


ODD = {
    "biases and scales": dict(
        more=[(f"ffn_{r}_exps.bias", F32, (33,)) for r in ("gate", "up", "down")]
        + [("ffn_down_exps.scale", F32, ()), ("exp_probs_b.bias", F32, ())]
        + [("ffn_gate_inp.bias", F32, ())],
    ),
    "fused": dict(roles=("gate_up", "down")),
    "no gate": dict(roles=("up", "down")),
    "small slices": dict(ff=1, kind=Q8_0),
    "five experts": dict(experts=5, kind=F16),
}


@pytest.mark.parametrize("layout", ["chain", "chain+pipeline", "interleave+heat"])
@pytest.mark.parametrize("kind", ODD)
def test_whatever_is_indexed_by_expert_moves(tmp_path, kind, layout):
    what = {"more": (), **ODD[kind]}
    tensors = []
    for number in (1, 3, 4):  # a dense first layer, and every second one
        tensors += made.layer(number, **what)
    tensors += [("blk.0.ffn_up.weight", F32, (32, 8)), ("blk.2.ffn_up.weight", F32, (32, 5))]
    experts = what.get("experts", made.EXPERTS)
    model = made.write_model(tmp_path / "m.gguf", tensors, made.values(experts=experts))
    perms, document = profile(tmp_path, [1, 3, 4], experts=experts)
    rewrite(model, perms, tmp_path / "out.gguf", layout=layout)
    fields = made.check(model, tmp_path / "out.gguf", order_in(layout, document))
    assert made.field(fields, "mbolt.layers") == [1, 3, 4]
    perm = np.reshape(made.field(fields, "mbolt.perm"), (3, -1)).tolist()
    assert perm == list(order_in(layout, document).values())


def test_windows_that_cut_slices_and_header(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(scatter, "BOUNCE_BYTES", 1500)
    model = made.typed_model(tmp_path / "m.gguf")
    perms, document = profile(tmp_path, range(6))
    for layout in ("chain+pipeline", "interleave+chain"):
        rewrite(model, perms, tmp_path / f"{layout}.gguf", layout=layout)
        made.check(model, tmp_path / f"{layout}.gguf", order_in(layout, document))


def test_metadata_is_copied_byte_for_byte(tmp_path):
    """Zero-length arrays, bytes that are no UTF-8, a value of every kind."""
    model = made.typed_model(tmp_path / "m.gguf")
    perms, _ = profile(tmp_path, range(6))
    for layout in LAYOUTS:
        rewrite(model, perms, tmp_path / "out.gguf", layout=layout, force=True)
        assert made.kept_bytes(tmp_path / "out.gguf") == made.kept_bytes(model)


def test_the_number_of_tensors_of_a_split_model_follows_the_blocks(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf", split=4)
    perms, _ = profile(tmp_path, range(6))
    out = rewrite(model, perms, tmp_path / "out.gguf", layout="interleave")
    found = Model.open(out.paths[0])
    assert len(found.tensors) == len(Model.open(model).tensors) - 2 * 6
    for file in found.files:
        assert file.values["split.tensors.count"].get() == len(found.tensors)
        assert file.values["split.tensors.count"].type == 5


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_another_alignment_becomes_32(tmp_path, alignment):
    keys = made.values(more=[value("general.alignment", "u32", alignment)])
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), keys, alignment=alignment)
    perms, document = profile(tmp_path, [0])
    rewrite(model, perms, tmp_path / "out.gguf", layout="heat")
    fields = made.check(model, tmp_path / "out.gguf", order_in("heat", document))
    assert made.field(fields, "general.alignment") == 32


def test_a_last_tensor_without_padding(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf", last_padding=False)
    perms, document = profile(tmp_path, range(6))
    rewrite(model, perms, tmp_path / "out.gguf")
    made.check(model, tmp_path / "out.gguf", order_in("chain", document))


@pytest.mark.parametrize("layout", ["chain+pipeline", "interleave"])
def test_pipeline_puts_the_experts_last_in_the_order_of_their_use(tmp_path, layout):
    tensors = [*made.layer(2), *made.layer(0), ("output.weight", F32, (32, 5))]
    model = made.write_model(tmp_path / "m.gguf", tensors)
    perms, _ = profile(tmp_path, [0, 2])
    rewrite(model, perms, tmp_path / "out.gguf", layout=layout)
    file = read_gguf(tmp_path / "out.gguf")
    names = [t.name for t in file.tensors]
    dense = [name for name, *_ in tensors if "_exps" not in name]
    parts = ("ilv",) if layout == "interleave" else ("up", "gate", "down")
    experts = [f"blk.{n}.ffn_{part}_exps.weight" for n in (0, 2) for part in parts]
    assert names == dense + experts
    first = next(t for t in file.tensors if t.name == experts[0])
    assert first.offset % 4096 == 0


def test_without_pipeline_the_tensors_keep_their_order(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf")
    perms, _ = profile(tmp_path, range(6))
    rewrite(model, perms, tmp_path / "out.gguf", layout="clique")
    assert [t.name for t in read_gguf(tmp_path / "out.gguf").tensors] == [
        t.name for t in read_gguf(model).tensors
    ]


# --- again


AGAIN = ["chain", "heat+pipeline", "interleave+clique"]


@pytest.mark.parametrize("second", AGAIN)
@pytest.mark.parametrize("first", AGAIN)
def test_a_rewritten_file_can_be_rewritten(tmp_path, first, second):
    """The second result holds the original's bytes in the second order, by original ids."""
    model = made.typed_model(tmp_path / "m.gguf", split=7)
    one, _ = profile(tmp_path, range(6), seed=1)
    two, document = profile(tmp_path, range(6), seed=2)
    middle = rewrite(model, one, tmp_path / "a.gguf", layout=first).paths[0]
    twice = rewrite(middle, two, tmp_path / "b.gguf", layout=second).paths[0]
    fields = made.check(model, twice, order_in(second, document))
    flat = [e for order in order_in(second, document).values() for e in order]
    assert made.field(fields, "mbolt.perm") == flat
    assert made.field(fields, "mbolt.source.stamp") == Model.open(model).stamp
    if "pipeline" in second:  # no trace of the way that led there
        once = rewrite(model, two, tmp_path / "c.gguf", layout=second).paths
        if "interleave" not in first:  # an interleaved layer lies in one file of a split model
            assert [sha(p) for p in once] == [sha(p) for p in made.files_of(twice)]


@pytest.mark.parametrize("layout", ["identity", "interleave"])
def test_what_moves_no_expert_keeps_the_order_of_a_rewritten_file(tmp_path, layout):
    model = made.typed_model(tmp_path / "m.gguf")
    perms, document = profile(tmp_path, range(6))
    rewrite(model, perms, tmp_path / "a.gguf", layout="heat")
    rewrite(tmp_path / "a.gguf", None, tmp_path / "b.gguf", layout=layout)
    fields = made.check(model, tmp_path / "b.gguf", order_in("heat", document))
    name = "heat" if layout == "identity" else "interleave+heat"
    assert made.field(fields, "mbolt.layout") == name
    for key in ("mbolt.heat", "mbolt.tier_hint", "mbolt.coactivation_top_cliques"):
        kept = made.contents(tmp_path / "a.gguf")[1]
        assert made.field(fields, key) == made.field(kept, key) is not None


def test_identity_of_an_interleaved_file_is_the_same_file(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf")
    perms, _ = profile(tmp_path, range(6))
    rewrite(model, perms, tmp_path / "a.gguf", layout="interleave+chain")
    rewrite(tmp_path / "a.gguf", None, tmp_path / "b.gguf", layout="identity+pipeline")
    assert sha(tmp_path / "b.gguf") != sha(model)
    _, fields = made.contents(tmp_path / "b.gguf")
    assert made.field(fields, "mbolt.interleaved") is True
    made.check(model, tmp_path / "b.gguf", order_in("chain", profile(tmp_path, range(6))[1]))


@pytest.mark.parametrize(
    "perm, word",
    [
        ([0] * 8, "once"),
        (list(range(7)), "length"),
        ([8, *range(1, 8)], "once"),
        ([-1, *range(1, 8)], "once"),
    ],
)
def test_a_permutation_that_does_not_fit_is_refused(tmp_path, perm, word):
    """Never lose the original order in silence."""
    keys = made.values(more=[value("mbolt.perm", "i32[]", perm)])
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), keys)
    perms, _ = profile(tmp_path, [0])
    with pytest.raises(GgufError, match=f"mbolt.perm .*{word}.*original"):
        rewrite(model, perms, tmp_path / "out.gguf")


# --- groups, and what is not understood


def grouped(tmp_path, more=()):
    keys = made.values(more=[value("test.expert_group_count", "u32", 2), *more])
    return made.write_model(tmp_path / "m.gguf", made.layer(0), keys)


def test_experts_stay_in_their_routing_groups(tmp_path):
    model = grouped(tmp_path)
    perms, document = profile(tmp_path, [0])
    report = rewrite(model, perms, tmp_path / "out.gguf")
    order = document["layers"][0]["chain_perm"]
    inside = [e for e in order if e < 4] + [e for e in order if e >= 4]
    made.check(model, tmp_path / "out.gguf", {0: inside})
    assert any("groups" in note for note in report.notes)


def test_a_file_whose_experts_left_their_groups_is_refused(tmp_path):
    model = grouped(tmp_path, [value("mbolt.perm", "i32[]", [4, 1, 2, 3, 0, 5, 6, 7])])
    with pytest.raises(GgufError, match="groups"):
        rewrite(model, None, tmp_path / "out.gguf", layout="identity")


@pytest.mark.parametrize("stem", ["ffn_strange_exps.weight", "ffn_gate_tid2eid.weight"])
def test_an_unknown_tensor_of_the_experts_is_named(tmp_path, stem):
    tensors = made.layer(0, more=[(stem, F32, (32,))])
    model = made.write_model(tmp_path / "m.gguf", tensors)
    perms, _ = profile(tmp_path, [0])
    for layout in ("chain", "interleave+heat"):
        with pytest.raises(UnsupportedError, match=f"blk.0.{stem}"):
            rewrite(model, perms, tmp_path / "out.gguf", layout=layout)
    assert not (tmp_path / "out.gguf").exists()
    for layout in ("identity", "interleave"):  # these move nothing
        rewrite(model, perms, tmp_path / f"{layout}.gguf", layout=layout)
        made.check(model, tmp_path / f"{layout}.gguf", {})


def test_expert_count_that_disagrees_with_the_tensors(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), made.values(experts=16))
    perms, _ = profile(tmp_path, [0])
    with pytest.raises(GgufError, match="blk.0.*expected 16, found 8"):
        rewrite(model, perms, tmp_path / "out.gguf")


@pytest.mark.parametrize("layers, experts", [([0, 1], 8), ([0], 4), ([7], 8)])
def test_profile_of_another_model(tmp_path, layers, experts):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    perms, _ = profile(tmp_path, layers, experts=experts)
    with pytest.raises(UsageError, match="another model: layer"):
        rewrite(model, perms, tmp_path / "out.gguf")


def test_a_layer_that_the_profile_lacks_stays_as_it_is(tmp_path):
    """The layers that predict further tokens (MTP) are not in every trace."""
    model = made.write_model(tmp_path / "m.gguf", [*made.layer(0), *made.layer(1)])
    perms, document = profile(tmp_path, [0])
    report = rewrite(model, perms, tmp_path / "out.gguf")
    made.check(model, tmp_path / "out.gguf", order_in("chain", document))
    assert any("layer 1 is not in the profile" in note for note in report.notes)


@pytest.mark.parametrize("layout", ["", "chains", "chain+heat", "pipeline", "chain+chain", "heat+"])
def test_unknown_layout(tmp_path, layout):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    with pytest.raises(UsageError, match="unknown layout"):
        rewrite(model, None, tmp_path / "out.gguf", layout=layout)


def test_layout_that_needs_a_profile(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    with pytest.raises(UsageError, match="needs a profile"):
        rewrite(model, None, tmp_path / "out.gguf")


# --- where it must not write


@pytest.mark.parametrize("split", [0, 2])
def test_output_equal_to_the_model_by_any_name(tmp_path, split):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), split=split)
    before = {p: sha(p) for p in made.files_of(model)}
    last = made.files_of(model)[-1]
    (tmp_path / "link.gguf").symlink_to(last)
    os.link(last, tmp_path / "hard.gguf")
    (tmp_path / "folder").symlink_to(tmp_path)
    perms, _ = profile(tmp_path, [0])
    for target in (last, tmp_path / "link.gguf", tmp_path / "hard.gguf",
                   tmp_path / "folder" / last.name):  # fmt: skip
        for force in (False, True):
            with pytest.raises(OutputError, match="the model itself"):
                rewrite(model, perms, target, force=force)
    assert {p: sha(p) for p in before} == before


def test_output_that_exists(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    perms, document = profile(tmp_path, [0])
    (tmp_path / "out.gguf").write_text("precious")
    with pytest.raises(OutputError, match="exists.*--force"):
        rewrite(model, perms, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "precious"
    rewrite(model, perms, tmp_path / "out.gguf", force=True)
    made.check(model, tmp_path / "out.gguf", order_in("chain", document))


def test_any_file_of_a_split_output_that_exists(tmp_path):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), split=2)
    perms, document = profile(tmp_path, [0])
    taken = tmp_path / "out-00002-of-00003.gguf"
    taken.write_text("precious")
    with pytest.raises(OutputError, match="00002-of-00003.gguf: exists"):
        rewrite(model, perms, tmp_path / "out.gguf")
    assert {p.name for p in tmp_path.glob("*out*")} == {taken.name}
    rewrite(model, perms, tmp_path / "out.gguf", force=True)
    made.check(model, tmp_path / "out-00001-of-00003.gguf", order_in("chain", document))


@pytest.mark.parametrize("name", ["folder", "missing/out.gguf", ".out.gguf", "link.gguf"])
def test_output_that_is_no_place_for_a_file(tmp_path, name):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.gguf").symlink_to("elsewhere")
    with pytest.raises(OutputError):
        rewrite(model, None, tmp_path / name, layout="identity")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("split", [0, 2])
def test_drive_too_full_is_said_before_starting(tmp_path, monkeypatch, split):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), split=split)
    (tmp_path / "to").mkdir()
    monkeypatch.setattr(files, "free_space", lambda path: 100_000)
    with pytest.raises(OutputError, match="too little space.*100000 bytes"):
        rewrite(model, None, tmp_path / "to" / "out.gguf", layout="identity")
    assert not list((tmp_path / "to").iterdir())


def test_drive_that_fills_up_midway_keeps_the_part_for_later(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "WINDOW_BYTES", 65536)
    model = made.typed_model(tmp_path / "m.gguf", split=9)
    perms, document = profile(tmp_path, range(6))
    real, left = files.pwrite_all, [2 << 20]

    def full(fd, data, offset, **more):
        left[0] -= len(data)
        if left[0] < 0 and len(data) > 16384:  # the space of the small journal is there
            raise OutputError("write failed: No space left on device")
        return real(fd, data, offset, **more)

    with monkeypatch.context() as m:
        m.setattr(files, "pwrite_all", full)
        with pytest.raises(OutputError, match="No space left"):
            rewrite(model, perms, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out*"))
    report = rewrite(model, perms, tmp_path / "out.gguf")
    assert report.resumed > 0
    made.check(model, report.paths[0], order_in("chain", document))


def test_model_that_changes_meanwhile(tmp_path, monkeypatch):
    model = made.typed_model(tmp_path / "m.gguf")
    monkeypatch.setattr(
        module._Rewrite, "_maybe_checkpoint", lambda self, out, n: os.utime(model, ns=(1, 1))
    )
    with pytest.raises(OutputError, match="changed while it was read"):
        rewrite(model, None, tmp_path / "out.gguf", layout="identity")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_what_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    model = made.typed_model(tmp_path / "m.gguf", split=9)
    real = module.compare

    def rot(*args, **more):
        partial = partial_paths(tmp_path / "out-00002-of-00004.gguf")[0]
        with open(partial, "r+b") as f:
            f.seek(-9000, 2)
            byte = f.read(1)
            f.seek(-9000, 2)
            f.write(bytes([byte[0] ^ 4]))
        return real(*args, **more)

    monkeypatch.setattr(module, "compare", rot)
    with pytest.raises(Exception, match="differs from the original"):
        rewrite(model, None, tmp_path / "out.gguf", layout="identity")
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


# --- the commands


def test_commands(tmp_path, capsys):
    model = made.typed_model(tmp_path / "m.gguf")
    document = made.perms_of(tmp_path / "perms.json", range(6))
    perms, out = str(tmp_path / "perms.json"), tmp_path / "out.gguf"
    assert main(["rewrite", str(model), perms, "-o", str(out), "--layout", "heat"]) == 0
    made.check(model, out, order_in("heat", document))
    assert "every byte is the same" in capsys.readouterr().err
    assert main(["rewrite", str(model), perms, "-o", str(out)]) == 2
    assert f"{out}: exists" in capsys.readouterr().err
    assert main(["rewrite", str(model), perms]) == 0  # beside the model
    made.check(model, tmp_path / "m-mbolt-chain-pipeline.gguf", order_in("chain", document))
    assert main(["rewrite", str(model), "--layout", "interleave", "-q"]) == 0
    made.check(model, tmp_path / "m-mbolt-interleave.gguf", {})


def test_the_first_implementations_command(tmp_path):
    model = made.typed_model(tmp_path / "m.gguf")
    document = made.perms_of(tmp_path / "perms.json", range(6))
    out = tmp_path / "out.gguf"
    assert seed([str(model), str(tmp_path / "perms.json"), "-o", str(out)]) == 0
    made.check(model, out, order_in("chain", document))


@pytest.mark.parametrize(
    "output", ["out.gguf", "out", "out-00001-of-00003.gguf", "out-00003-of-00003.gguf"]
)
def test_names_of_a_split_output(tmp_path, output):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), split=2)
    report = rewrite(model, None, tmp_path / output, layout="identity")
    assert [p.name for p in report.paths] == [f"out-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


MEMORY = """
import sys
from mbolt_gguf import rewrite
from mbolt_mlx.bench.counters import peak_rss_bytes
from mbolt_mlx.profile.perms import read_perms
rewrite.rewrite(sys.argv[1], read_perms(sys.argv[2]), sys.argv[3], layout=sys.argv[4])
print(peak_rss_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["chain+pipeline", "interleave+chain"])
def test_memory_stays_under_400_mb(tmp_path, layout):
    """A file of 0.7 GB: slices of 16 MB, a tensor of 300 MB, 200,000 tokens."""
    tokens = value("tokenizer.ggml.more", "str[]", ["a token"] * 200_000)
    tensors = made.layer(0, F16, ff=32768)
    tensors.append(("token_embd.weight", F16, (1024, 150_000)))
    offsets, end = {}, 0
    for name, kind, shape in tensors:
        offsets[name] = end
        end += -(-made.size_of(kind, shape) // 32) * 32
    model = tmp_path / "m.gguf"
    head = made.encode(
        made.values(more=[tokens]), [(*tensor, b"") for tensor in tensors], offsets=offsets
    )
    model.write_bytes(head)
    os.truncate(model, len(head) + end)
    profile(tmp_path, [0])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, model, tmp_path / "perms.json", tmp_path / "out", layout],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    peak = int(done.stdout)
    print(f"peak {peak / 1e6:.0f} MB")
    assert peak < 400e6, peak


def test_force_does_not_replace_the_profile(tmp_path, capsys):
    model = made.write_model(tmp_path / "m.gguf", made.layer(0))
    profile(tmp_path, [0])
    (perms,) = tmp_path.glob("*.json")
    before = perms.read_bytes()
    assert main(["rewrite", str(model), str(perms), "-o", str(perms), "--force"]) == 2
    assert "the output is the profile itself" in capsys.readouterr().err
    assert perms.read_bytes() == before
