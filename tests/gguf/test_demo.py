"""The shipped demo model as a GGUF: its text, its routing beside MLX's, the gates, the profile."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mbolt_gguf.experts import find_experts
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.profile.perms import make_perms
from mbolt_mlx.resources import resource
from tests.gguf import makers  # puts examples/gguf on the path

import convert_demo  # isort: skip
import demo  # isort: skip


@pytest.fixture(scope="module")
def folder():
    return resource("demo")


@pytest.fixture(scope="module")
def gguf(folder, tmp_path_factory):
    return convert_demo.convert(folder, tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def texts(folder):
    return demo.passages(folder)


@pytest.fixture(scope="module")
def traces(llama, gguf, texts):
    return demo.traces(llama.patched, gguf, texts)


def test_shape(gguf):
    layers = find_experts(Model.open(gguf))
    assert [(y.layer, y.experts, y.top_k) for y in layers] == [(n, 32, 4) for n in range(6)]
    assert {y.expert_bytes for y in layers} == {3 * 4 * 256 * 64}


def test_weights_are_what_mlx_computes_with(folder, gguf):
    import mlx.core as mx
    import numpy as np
    from gguf import GGUFReader

    ours = {t.name: t.data for t in GGUFReader(gguf).tensors}
    tensors = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.2.mlp.switch_mlp.down_proj"
    parts = [tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    assert np.array_equal(
        ours["blk.2.ffn_down_exps.weight"], mx.dequantize(*parts, group_size=64, bits=4)
    )
    name = "model.layers.5.mlp.gate"
    parts = [tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    assert np.array_equal(
        ours["blk.5.ffn_gate_inp.weight"], mx.dequantize(*parts, group_size=64, bits=8)
    )


def test_another_architecture_is_refused(tmp_path, tiny_model):
    config = json.loads((tiny_model / "config.json").read_text())
    if config["model_type"] == "qwen3_moe":
        for file in tiny_model.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
        tiny_model = tmp_path
    with pytest.raises(UnsupportedError, match="expected qwen3_moe"):
        convert_demo.convert(tiny_model, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_text(llama, gguf, folder, tmp_path, kind):
    if kind != "F32":
        gguf = convert_demo.convert(folder, tmp_path / "m.gguf", kind)
    text = demo.text(llama.patched, gguf, "And the LORD said unto", 24)
    assert "the LORD" in text and text.isprintable() or "\n" in text
    assert len(text.split()) > 10


def test_routing_is_that_of_mlx(llama, gguf, folder, texts):
    """Equal top-k sets, or experts whose probabilities differ by less than 1e-3; both counted."""
    found, some = demo.Agreement(), [ids for some in texts.values() for ids in some]
    for ids, scores in zip(some, demo.mlx_scores(folder, some), strict=True):
        found.add(demo.agreement(scores, llama.run(gguf, ids).routes))
    assert found.sets == 6 * sum(map(len, some))
    assert found.apart == 0, found
    assert found.equal >= 0.99 * found.sets, found


def test_a_profile_makes_fewer_reads_on_its_own_domain_and_on_others(traces):
    assert set(traces) == {"bible", "english", "german", "python"}
    two = {domain: traces[domain] for domain in ("bible", "german")}
    found = demo.reads_by_domain(two, 3 * 4 * 256 * 64, 0.25)
    for source, targets in found.items():
        own = targets[source]
        assert own["chain"]["reads"] < own["stock"]["reads"]
        assert own["interleave"]["reads"] < own["stock"]["reads"] / 2.8
        for rows in targets.values():
            assert rows["chain"]["reads"] < rows["stock"]["reads"]


@pytest.mark.parametrize("layout", ["chain+pipeline", "interleave+chain"])
def test_gates_and_text_of_rewritten_files(llama, gguf, texts, traces, tmp_path, layout):
    perms = make_perms(traces["bible"])
    path = rewrite(gguf, perms, tmp_path / "out.gguf", layout=layout, progress=False).paths[0]
    tokens = texts["english"][0][:64]
    gates = list(demo.Checker(gguf, path, driver=llama.patched, tokens=tokens, layers=3).run())
    assert all(g.passed for g in gates), [g.found for g in gates]
    before, after = (
        demo.text(llama.patched, p, "And the LORD said unto", 24) for p in (gguf, path)
    )
    assert before == after


@pytest.mark.parametrize("script", ["convert_demo", "demo", "random_gguf"])
def test_scripts_explain_themselves(script):
    path = makers.EXAMPLES / f"{script}.py"
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout) > 200, done.stderr


def test_a_random_model_by_command(tmp_path):
    out = tmp_path / "m.gguf"
    words = [str(out), "--arch", "glm4moe", "--quant", "MXFP4", "--layers", "2", "--experts", "4"]
    command = [sys.executable, makers.EXAMPLES / "random_gguf.py", *words]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{out}\n"
    assert [y.layer for y in find_experts(Model.open(out))] == [1, 2]
