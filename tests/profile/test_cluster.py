"""Communities against networkx, orders by their meaning, and perms.json in the seed's schema."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from mbolt_mlx.core.errors import TraceError
from mbolt_mlx.profile import cluster, mblt
from mbolt_mlx.profile.perms import entropy_bits, make_perms, read_perms, write_perms
from mbolt_mlx.profile.trace_file import write_trace
from mbolt_mlx.profile.traces import LayerInfo, Pass, make_trace, read_trace
from mbolt_mlx.resources import resource

PUBLIC = Path(__file__).resolve().parents[2] / "examples" / "traces"


def routes(experts, k, tokens, topics, seed=0):
    """Choices of a router that prefers, for each token, the experts of one topic."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, topics, experts)
    liking = rng.random(experts) ** 2 + 0.02
    score = np.log(liking)[None] + np.log(6.0) * (
        topic[None] == rng.integers(0, topics, tokens)[:, None]
    )
    return np.argsort(-(score + rng.gumbel(size=score.shape)), axis=1)[:, :k]


def test_coactivation_counts_tokens_that_chose_both():
    rows = np.array([[0, 1, 2], [1, 2, 3], [2, 0, 3]])
    pairs = cluster.coactivation(rows, 5)
    for a, b in itertools.product(range(5), repeat=2):
        both = sum(a in row and b in row for row in rows.tolist())
        assert pairs[a, b] == (both if a != b else 0)
    assert cluster.heat_of(rows, 5).tolist() == [2, 2, 3, 2, 0]
    lift = cluster.lift(pairs, cluster.heat_of(rows, 5), 3)
    assert lift[0, 1] == pytest.approx((1 / 3) / (2 / 3 * 2 / 3))
    assert lift[0, 4] == 0


def test_modularity_is_networkxs():
    nx = pytest.importorskip("networkx")
    pairs = cluster.coactivation(routes(40, 4, 300, 5), 40)
    groups = [list(range(n, 40, 3)) for n in range(3)]
    graph = nx.from_numpy_array(pairs)
    assert cluster.modularity(pairs, groups) == pytest.approx(
        nx.community.modularity(graph, groups)
    )


@pytest.mark.parametrize("seed", range(6))
def test_communities_are_never_worse_than_networkxs_greedy_ones(seed):
    nx = pytest.importorskip("networkx")
    experts, k, topics = [(32, 4, 4), (60, 4, 6), (128, 8, 10)][seed % 3]
    pairs = cluster.coactivation(routes(experts, k, 600, topics, seed), experts)
    theirs = nx.community.greedy_modularity_communities(nx.from_numpy_array(pairs), "weight")
    ours = cluster.communities(pairs)
    assert sorted(e for group in ours for e in group) == list(range(experts))
    assert cluster.modularity(pairs, ours) >= (
        cluster.modularity(pairs, [list(group) for group in theirs]) - 1e-12
    )


def test_nor_on_the_public_traces():
    nx = pytest.importorskip("networkx")
    for name in ("qwen3-30b-a3b", "gemma4-26b-a4b"):
        trace = read_trace(PUBLIC / f"{name}.route.csv.xz")
        for layer in list(trace.layers)[::12]:
            pairs = cluster.coactivation(trace.rows(layer, "decode"), 128)
            graph = nx.from_numpy_array(pairs)
            theirs = nx.community.greedy_modularity_communities(graph, "weight")
            assert cluster.modularity(pairs, cluster.communities(pairs)) >= (
                cluster.modularity(pairs, [list(group) for group in theirs]) - 1e-12
            )


def test_512_experts_take_seconds_where_ten_a_layer_were_usual():
    pairs = cluster.coactivation(routes(512, 10, 2000, 24), 512)
    start = time.thread_time()
    cluster.communities(pairs)
    # 48 such layers in five minutes of two cores is 6 s a layer; a loaded machine gets slack.
    assert time.thread_time() - start < 3.0


def test_two_cliques_are_two_communities():
    pairs = np.zeros((7, 7))
    pairs[:3, :3] = pairs[3:6, 3:6] = 5
    pairs[2, 3] = pairs[3, 2] = 1
    np.fill_diagonal(pairs, 0)
    assert cluster.communities(pairs) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_graph_without_edges():
    assert cluster.communities(np.zeros((3, 3))) == [[0], [1], [2]]
    assert cluster.modularity(np.zeros((3, 3)), [[0, 1, 2]]) == 0.0


def test_orders():
    heat = np.array([1, 9, 5, 5, 7, 0])
    pairs = np.zeros((6, 6))
    for a, b, weight in ((1, 2, 1), (1, 4, 3), (4, 2, 2), (3, 0, 1)):
        pairs[a, b] = pairs[b, a] = weight
    groups = [[1, 2, 4], [0, 3], [5]]
    assert cluster.heat_order(heat) == [1, 4, 2, 3, 0, 5]
    assert cluster.clique_order(groups, heat) == [1, 4, 2, 3, 0, 5]
    assert cluster.chain_order(pairs, groups, heat) == [1, 4, 2, 3, 0, 5]
    pairs[1, 2] = pairs[2, 1] = 9
    assert cluster.chain_order(pairs, groups, heat)[:3] == [1, 2, 4]


def test_entropy():
    assert entropy_bits(np.array([1, 1, 1, 1])) == 2.0
    assert entropy_bits(np.array([4, 0, 0, 0])) == 0.0
    assert entropy_bits(np.array([0, 0])) == 0.0


def made(layers=(3, 5), experts=24):
    rows = {layer: routes(experts, 4, 50, 3, layer) for layer in layers}
    passes = [
        Pass("decode", {layer: rows[layer][n : n + 1] for layer in layers}) for n in range(50)
    ]
    return make_trace(passes, {layer: LayerInfo(experts, 4) for layer in layers}, model="made")


def test_perms_there_and_back_and_by_the_schema(tmp_path):
    import jsonschema

    perms = make_perms(made(), train=0.8)
    write_perms(tmp_path / "p.json", perms)
    again = read_perms(tmp_path / "p.json")
    assert again.sha256 == perms.sha256
    assert again.document == perms.document
    schema = json.loads(resource("manifests/schemas/perms.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(perms.document, schema)
    assert perms.document["train_tokens"] == 40 and perms.document["n_tokens"] == 50
    assert perms.experts == {3: 24, 5: 24}
    for kind, orders in perms.orders.items():
        for layer, order in orders.items():
            assert sorted(order) == list(range(24)), (kind, layer)
    assert perms.order("heat")[3][0] == int(np.argmax(perms.heat[3]))


def test_the_seeds_own_files_are_read(tmp_path):
    """Without our keys, and with what it may leave out."""
    document = {
        "n_layers": 1,
        "n_expert": 3,
        "n_tokens": 10,
        "train_frac": 0.8,
        "train_tokens": 8,
        "layers": [
            {"layer": 0, "clique_perm": [2, 0, 1], "chain_perm": [0, 2, 1], "heat": [1, 5, 2]}
        ],
    }
    (tmp_path / "p.json").write_text(json.dumps(document))
    perms = read_perms(tmp_path / "p.json")
    assert perms.order("heat") == {0: [1, 2, 0]}
    assert perms.order("clique") == {0: [2, 0, 1]}


GOOD = {
    "layer": 0,
    "clique_perm": [1, 0],
    "chain_perm": [0, 1],
    "heat_perm": [0, 1],
    "heat": [2, 1],
}


@pytest.mark.parametrize(
    "layers",
    [
        [],
        "x",
        [3],
        [GOOD | {"heat": None}],
        [GOOD | {"heat": [1, -1]}],
        [GOOD | {"heat": [1, True]}],
        [GOOD | {"heat": [1, float("inf")]}],
        [GOOD | {"heat": [1, float("nan")]}],
        [GOOD | {"heat": [1, 10**400]}],
        [GOOD | {"chain_perm": [0, 0]}],
        [GOOD | {"chain_perm": [0, 2]}],
        [GOOD | {"clique_perm": [0]}],
        [GOOD | {"chain_perm": None}],
        [GOOD | {"layer": "0"}],
        [GOOD, GOOD],
    ],
)
def test_perms_without_meaning(tmp_path, layers):
    (tmp_path / "p.json").write_text(json.dumps({"layers": layers}))
    with pytest.raises(TraceError, match="p.json"):
        read_perms(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(TraceError, match="not JSON"):
        read_perms(tmp_path / "p.json")


def test_a_trace_for_a_profile(tmp_path):
    trace = make_trace([Pass("decode", {0: np.array([[0, 1]])})], {0: LayerInfo(4, 2)})
    write_trace(tmp_path / "own", trace)
    (tmp_path / "mblt").write_bytes(mblt.encode(trace))
    for place in (tmp_path / "own", tmp_path / "mblt", PUBLIC / "gemma4-26b-a4b.route.csv.xz"):
        with pytest.raises(TraceError, match="a trace, not a profile; `mbolt-mlx cluster"):
            read_perms(place)
    (tmp_path / "text").write_text("neither")
    with pytest.raises(TraceError, match="not JSON"):
        read_perms(tmp_path / "text")


def test_a_profile_needs_tokens():
    with pytest.raises(TraceError, match="layer 3"):
        make_perms(made(), phase="prefill")
