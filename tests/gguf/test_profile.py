import json

import numpy as np
import pytest

from mbolt_gguf.cli.main import main
from mbolt_gguf.profile import read_profile
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import GgufError, TraceError
from mbolt_mlx.profile.perms import read_perms, tier_hints
from tests.gguf import made
from tests.gguf.conftest import value


@pytest.fixture
def written(tmp_path):
    """(model, document of the profile): a dense first layer, then two of experts."""
    tensors = [("blk.0.ffn_up.weight", 0, (32, 8)), *made.layer(1), *made.layer(2)]
    model = made.write_model(tmp_path / "m.gguf", tensors)
    return model, made.perms_of(tmp_path / "perms.json", [1, 2])


@pytest.mark.parametrize("layout", ["heat", "chain+pipeline", "interleave+clique"])
def test_what_was_written_is_read_back(written, tmp_path, layout):
    model, document = written
    rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "out.gguf", layout=layout)
    assert main(["profile", str(tmp_path / "out.gguf"), "-o", str(tmp_path / "back.json")]) == 0
    back = read_perms(tmp_path / "back.json")
    kind = next(k for k in ("heat", "chain", "clique") if k in layout)
    assert back.document["order"] == kind
    for was, now in zip(document["layers"], back.document["layers"], strict=True):
        assert now["layer"] == was["layer"] and now["heat"] == was["heat"]
        assert now[f"{kind}_perm"] == was[f"{kind}_perm"]
        assert now["top_cliques"] == was["top_cliques"]


def test_the_profile_that_was_read_back_makes_the_same_file(written, tmp_path):
    model, _ = written
    rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "a.gguf")
    main(["profile", str(tmp_path / "a.gguf"), "-o", str(tmp_path / "back.json")])
    rewrite(model, read_perms(tmp_path / "back.json"), tmp_path / "b.gguf")
    a, b = (made.contents(tmp_path / f"{n}.gguf") for n in "ab")
    assert a[0] == b[0]
    for key in ("mbolt.perm", "mbolt.heat", "mbolt.tier_hint", "mbolt.coactivation_top_cliques"):
        assert made.field(a[1], key) == made.field(b[1], key)


@pytest.mark.parametrize("layout", ["heat", "chain", "identity"])
def test_heat_and_tiers_are_by_position_and_tiers_by_heat(written, tmp_path, layout):
    """Whatever the layout: the hot experts are those that are used, not those that come first."""
    model, document = written
    rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "out.gguf", layout=layout)
    _, fields = made.contents(tmp_path / "out.gguf")
    perm, heat, tier = (
        np.reshape(made.field(fields, f"mbolt.{k}"), (2, 8)) for k in ("perm", "heat", "tier_hint")
    )
    for i, layer in enumerate(document["layers"]):
        assert heat[i].tolist() == [layer["heat"][e] for e in perm[i]]
        assert tier[i].tolist() == [tier_hints(layer["heat"])[e] for e in perm[i]]


def test_heat_as_a_share(written, tmp_path):
    model, _ = written
    share = [0.5, 0.25, 0.125, 0.125, 0.0, 0.0, 0.0, 0.0]
    made.perms_of(tmp_path / "perms.json", [1, 2], heat=share)
    rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "out.gguf")
    heat = read_profile(tmp_path / "out.gguf").heat[1]
    assert heat == [1_000_000, 500_000, 250_000, 250_000, 0, 0, 0, 0]


def test_a_file_that_carries_none(written, tmp_path):
    with pytest.raises(TraceError, match="carries no profile"):
        read_profile(written[0])
    assert main(["profile", str(written[0]), "-o", str(tmp_path / "x.json")]) == 2
    assert not (tmp_path / "x.json").exists()


def test_an_order_without_heat(written, tmp_path):
    model, _ = written
    rewrite(model, None, tmp_path / "out.gguf", layout="interleave")
    back = read_profile(tmp_path / "out.gguf")
    assert back.order("chain") == {1: list(range(8)), 2: list(range(8))}
    assert back.document["order"] == "ids" and not any(back.heat[1])


@pytest.mark.parametrize(
    "key",
    [
        value("mbolt.heat", "u32[]", [1, 2]),
        value("mbolt.heat", "u32", 1),
        value("mbolt.heat", "f32[]", [0.5] * 8),
        value("mbolt.heat", "i32[]", [-1] * 8),
        value("mbolt.heat", "u64[]", [1 << 63] * 8),
        value("mbolt.heat", "str[]", ["1"] * 8),
        value("mbolt.coactivation_top_cliques", "str", "[[[99]]]"),
        value("mbolt.coactivation_top_cliques", "str", "{"),
    ],
)
def test_what_does_not_fit_the_experts(tmp_path, key):
    more = [value("mbolt.perm", "i32[]", list(range(8))), key]
    if b"heat" not in key:
        more.append(value("mbolt.heat", "u32[]", list(range(8))))
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), made.values(more=more))
    with pytest.raises(GgufError, match="mbolt"):
        read_profile(model)


@pytest.mark.parametrize("kind", ["f32[]", "u32[]"])
def test_an_order_is_of_whole_numbers(tmp_path, kind):
    keys = made.values(more=[value("mbolt.perm", kind, list(range(8)))])
    model = made.write_model(tmp_path / "m.gguf", made.layer(0), keys)
    if kind == "u32[]":
        assert read_profile(model).order("chain") == {0: list(range(8))}
        return
    with pytest.raises(GgufError, match="does not name each expert"):
        read_profile(model)


def test_names_of_an_odd_type_are_no_names(written, tmp_path):
    more = [
        value("mbolt.perm", "i32[]", list(range(8))),
        value("mbolt.heat", "u32[]", list(range(8))),
        value("mbolt.layout", "u32", 5),
        value("mbolt.profile.sha256", "u32", 5),
    ]
    model = made.write_model(tmp_path / "o.gguf", made.layer(0), made.values(more=more))
    assert read_profile(model).document["order"] == "ids"
    rewrite(model, None, tmp_path / "out.gguf", layout="interleave")
    assert read_profile(tmp_path / "out.gguf").heat == {0: list(range(8))}


def test_cliques_of_other_tools_that_are_no_lists_are_left_out(written, tmp_path):
    model, document = written
    document["layers"][0]["top_cliques"] = [{"experts": [1, 2]}, [3, 4], ["5"]]
    document["layers"][1].pop("top_cliques")
    (tmp_path / "perms.json").write_text(json.dumps(document))
    rewrite(model, read_perms(tmp_path / "perms.json"), tmp_path / "out.gguf")
    _, fields = made.contents(tmp_path / "out.gguf")
    found = json.loads(made.field(fields, "mbolt.coactivation_top_cliques"))
    assert found == [[[3, 4]], []]
