from collections import Counter

import pytest

from mbolt_mlx.bench.tokens import forced_tokens, tokens_of_text, vocabulary
from mbolt_mlx.core.errors import CheckpointError, UsageError

FIRST = [285, 397, 169, 404, 73, 323, 157, 296]


def test_the_same_everywhere():
    # Literal, so that another numpy or machine that gives other ids is noticed.
    assert forced_tokens(8, 512, seed=1234) == FIRST
    assert forced_tokens(100, 512)[:8] == FIRST
    assert forced_tokens(8, 512, seed=5) != FIRST


def test_zipf_prefers_few_and_pool_bounds_all():
    even = Counter(forced_tokens(4000, 1000, zipf=0, pool=50))
    uneven = Counter(forced_tokens(4000, 1000, zipf=1.2, pool=50))
    assert len(even) == 50 and max(even) < 1000
    assert uneven.most_common(1)[0][1] > 3 * even.most_common(1)[0][1]
    assert len(set(forced_tokens(4000, 20, zipf=0))) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"vocab": 0},
        {"pool": 0},
        {"seed": -1},
        {"zipf": -1},
        {"zipf": float("nan")},
    ],
)
def test_nonsense_is_refused(wrong):
    given = {"count": 4, "vocab": 10, **wrong}
    with pytest.raises(UsageError):
        forced_tokens(given.pop("count"), given.pop("vocab"), **given)


def test_vocabulary(tiny_model, tmp_path):
    assert vocabulary(tiny_model) == 300
    with pytest.raises(CheckpointError, match="config.json"):
        vocabulary(tmp_path)
    for text, says in {
        "{}": "vocab_size",
        '{"vocab_size": 1000000000000}': "vocab_size",
        '{"vocab_size": 0, "text_config": null}': "vocab_size",
        "[]": "not an object",
        "[" * 100_000: "nested too deeply",
    }.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=says):
            vocabulary(tmp_path)


def test_text(tiny_model, tmp_path):
    text = tmp_path / "words"
    text.write_text("hello, experts")
    ids = tokens_of_text(text, tiny_model, 5)
    assert len(ids) == 5 and all(0 <= n < 300 for n in ids)
    with pytest.raises(UsageError, match="too short"):
        tokens_of_text(text, tiny_model, 500)
    with pytest.raises(UsageError, match="cannot read"):
        tokens_of_text(tmp_path / "absent", tiny_model, 5)
