"""Token ids that every engine is made to follow, so that all of them route alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mbolt_mlx.core.errors import CheckpointError, UsageError
from mbolt_mlx.storage.checkpoint import read_json
from mbolt_mlx.storage.experts import configs

_VOCABULARY_MAX = 1 << 26


def forced_tokens(
    count: int, vocab: int, *, seed: int = 1234, zipf: float = 1.0, pool: int = 256
) -> list[int]:
    """``count`` ids below ``vocab``: the same ones for the same arguments, on every machine.

    ``pool`` different ids are drawn; the one of rank r occurs in proportion to 1 / r ** ``zipf``
    (0: all alike). Text is near 1.

    Raises:
        UsageError: for a count or pool below one, a negative seed, or a ``zipf`` without meaning.
    """
    if count < 1 or vocab < 1 or pool < 1 or seed < 0 or not 0 <= zipf < 1000:
        raise UsageError(
            "forced tokens need a count, vocabulary and pool of at least 1, a seed of at least 0 "
            "and zipf from 0 to 1000"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    # Only random() is used: choice() and permutation() differ between numpy versions.
    ids = np.argsort(generator.random(vocab), kind="stable")[:pool]
    weights = np.arange(1, len(ids) + 1, dtype=np.float64) ** -zipf
    edges = np.cumsum(weights / weights.sum())
    ranks = np.searchsorted(edges, generator.random(count), side="right")
    return ids[np.minimum(ranks, len(ids) - 1)].tolist()


def vocabulary(model: Path) -> int:
    """The number of token ids that the model folder ``model`` knows.

    Raises:
        CheckpointError: if its config.json is missing or does not say.
    """
    path = Path(model) / "config.json"
    config = read_json(path, "the configuration")
    if not isinstance(config, dict):
        raise CheckpointError("the configuration is not an object", path=path)
    for inner in configs(config):
        size = inner.get("vocab_size")
        if type(size) is int and 0 < size <= _VOCABULARY_MAX:
            return size
    raise CheckpointError("no usable vocab_size in the configuration", path=path)


def tokens_of_text(text: Path, model: Path, count: int) -> list[int]:
    """The first ``count`` ids of the file ``text`` under the tokenizer of ``model``.

    Raises:
        UsageError: if the text cannot be read or has fewer tokens.
    """
    from mlx_lm.utils import load_tokenizer

    try:
        words = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the text: {error}", path=text) from error
    ids = load_tokenizer(Path(model)).encode(words)
    if len(ids) < count:
        raise UsageError("the text is too short", path=text, expected=count, found=len(ids))
    return [int(n) for n in ids[:count]]
