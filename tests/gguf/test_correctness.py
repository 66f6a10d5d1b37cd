"""The four gates: they pass where nothing changed, and each fails for its own reason."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mbolt_gguf.cli.main import main
from mbolt_gguf.correctness import Checker, Sets, default_tokens
from mbolt_gguf.evaluate import read_scores
from mbolt_gguf.model import Model
from mbolt_gguf.rewrite import rewrite
from mbolt_mlx.core.errors import ReadError, UsageError
from tests.gguf.llama import random_perms, some_tokens
from tests.gguf.makers import make_gguf

TOKENS = some_tokens(32)


def made(folder, model, quant, layout, **options):
    path = make_gguf(folder / "original.gguf", model, quant, **options)
    target = folder / "rewritten.gguf"
    return path, rewrite(path, random_perms(path), target, layout=layout, progress=False).paths[0]


@pytest.mark.parametrize(
    "model, quant, layout, options",
    [
        ("qwen3moe", "Q8_0", "chain+pipeline", {}),
        ("gpt-oss", "MXFP4", "interleave+chain", {}),
        ("deepseek2-groups", "Q4_K_M", "heat", {"split": 12}),
        ("qwen3next", "IQ4_XS", "interleave", {}),
    ],
)
def test_all_gates_pass(llama, tmp_path, model, quant, layout, options):
    path, rewritten = made(tmp_path, model, quant, layout, **options)
    gates = list(Checker(path, rewritten, driver=llama.patched, tokens=TOKENS).run())
    assert [g.name for g in gates] == ["bytes", "identity", "routing", "distribution"]
    assert all(g.passed for g in gates), [g.found for g in gates]
    routing, distribution = gates[2].numbers, gates[3].numbers
    assert routing["layers_alone"] == routing["layers_moved"]
    assert (routing["layers_moved"] > 0) == (layout != "interleave")
    assert routing["whole"]["equal"] > 0 and not routing["whole"]["wrong"]
    assert distribution["bound"] > 0 >= distribution["permutation"]["mean"] - distribution["bound"]


def test_command(llama, user_cache, tmp_path, capsys):
    path, rewritten = made(tmp_path, "qwen3moe", "Q8_0", "clique")
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    arguments = ["correctness", str(path), str(rewritten), "--tokens", str(tokens), "-q"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, "pass"] for name in ("bytes", "identity", "routing", "distribution")
    ]
    assert main([*arguments, "--json", "--count", "16", "--layers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["gates"][2]["numbers"]["layers_alone"] == 1
    assert str(tmp_path) not in json.dumps(found)


def test_a_flipped_byte_fails_the_first_gate(llama, user_cache, tmp_path, capsys):
    path, rewritten = made(tmp_path, "qwen3moe", "Q8_0", "chain")
    data = bytearray(rewritten.read_bytes())
    data[-1000] ^= 1
    rewritten.write_bytes(data)
    assert main(["correctness", str(path), str(rewritten), "--count", "16", "-q"]) == 1
    out = capsys.readouterr().out
    assert out.split()[:2] == ["bytes", "FAIL"] and "identity" not in out


def test_a_file_cut_short_fails_the_first_gate(llama, user_cache, tmp_path, capsys):
    path, rewritten = made(tmp_path, "qwen3moe", "Q8_0", "chain")
    rewritten.write_bytes(rewritten.read_bytes()[:-5000])
    assert main(["correctness", str(path), str(rewritten), "--count", "16", "-q"]) == 1
    assert capsys.readouterr().out.split()[:2] == ["bytes", "FAIL"]


def test_a_router_that_did_not_move_fails_the_third_gate(llama, tmp_path):
    path, rewritten = made(tmp_path, "qwen3moe", "Q8_0", "heat")
    checker = Checker(path, rewritten, driver=llama.patched, tokens=TOKENS, layers=0)
    base, changed = (llama.run(p, TOKENS, checker.way, scores=True) for p in (path, rewritten))
    assert checker.routing(base, changed).passed
    assert checker.routing(base, base).numbers["whole"]["wrong"] > 0


def test_another_model_fails_the_fourth_gate(llama, tmp_path):
    path = make_gguf(tmp_path / "a.gguf", "qwen3moe", "F16")
    other = make_gguf(tmp_path / "b.gguf", "qwen3moe", "F16", seed=1)
    checker = Checker(path, path, driver=llama.patched, tokens=TOKENS)
    base = llama.run(path, TOKENS, checker.way)
    assert checker.distribution(base, base).passed
    gate = checker.distribution(base, llama.run(other, TOKENS, checker.way))
    assert not gate.passed and "outside" in gate.found


def test_what_may_follow_a_change_is_counted_apart(tmp_path):
    """A near tie in one layer excuses this token and later ones in later layers, nothing else."""
    from types import SimpleNamespace as Fake

    checker = Checker.__new__(Checker)
    checker.tokens, checker.gap = [0] * 3, 1e-3
    same = np.arange(4)
    checker.take = {0: same, 1: same, 2: same}
    rows = np.array([[0, 1], [0, 1], [0, 1]])
    near = np.array([[0.4, 0.3, 0.2999, 0.0]] * 3, np.float32)
    far = np.array([[0.5, 0.3, 0.1, 0.1]] * 3, np.float32)
    base = Fake(routes=dict.fromkeys(range(3), rows), scores={0: far, 1: near, 2: far})
    changed = Fake(routes={n: rows.copy() for n in range(3)})
    changed.routes[1][1] = [0, 2]  # a gap of 1e-4
    changed.routes[2][2] = [0, 3]  # after it
    assert checker._count_whole(base, changed) == Sets(equal=7, small=1, after=1, gap=near[0, 1] - near[0, 2])  # fmt: skip  # noqa: E501
    changed.routes[2][0] = [0, 3]  # an earlier token
    assert checker._count_whole(base, changed).wrong == 1
    changed.routes[0][2] = [0, 2]  # the first layer has no excuse
    assert checker._count_whole(base, changed).wrong == 2


def test_tokens_are_ordinary_ones(tmp_path):
    model = Model.open(make_gguf(tmp_path / "m.gguf"))
    ids = default_tokens(model, 500)
    assert len(ids) == 500 and set(ids) <= set(range(262)) and ids == default_tokens(model, 500)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--count", "3"], "at least 16"),
        (["--tokens", "TOKENS"], "list of token ids"),
        (["--tokens", "TOKENS2"], "whole u32"),
    ],
)
def test_nonsense_is_one_line(llama, user_cache, tmp_path, capsys, arguments, said):
    path = make_gguf(tmp_path / "m.gguf")
    (tmp_path / "TOKENS").write_text('{"a": 1}')
    (tmp_path / "TOKENS2").write_bytes(b"abcde")
    arguments = [str(tmp_path / a) if a.startswith("TOKENS") else a for a in arguments]
    assert main(["correctness", str(path), str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_scores_that_end_early_are_an_error():
    record = np.array([3, 2, 1], "<u4").tobytes() + np.array([0.5, 0.25], "<f4").tobytes()
    assert read_scores(record * 2)[3].tolist() == [[0.5, 0.25]] * 2
    with pytest.raises(ReadError, match="within a record"):
        read_scores(record[:-1])


def test_too_few_tokens(tmp_path):
    path = make_gguf(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="at least 16 tokens"):
        Checker(path, path, driver=path, tokens=[1] * 15)
