"""Token ids that every engine is made to follow, so that all of them route alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mbolt_mlx.core.errors import CheckpointError, UsageError


def forced_tokens(
    count: int, vocab: int, *, seed: int = 1234, zipf: float = 1.0, pool: int = 256
) -> list[int]:
    """``count`` ids below ``vocab``: the same ones for the same arguments, on every machine.

    ``pool`` different ids are drawn; the one of rank r occurs in proportion to 1 / r ** ``zipf``
    (0: all alike). Text is near 1.

    Raises:
        UsageError: for a count or pool below one, or a negative ``zipf``.
    """
    if count < 1 or vocab < 1 or pool < 1 or zipf < 0:
        raise UsageError("forced tokens need a count, vocabulary and pool of at least 1, zipf >= 0")
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
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the configuration: {error}", path=path) from error
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise CheckpointError("no vocab_size in the configuration", path=path)
    return size


def tokens_of_text(text: Path, model: Path, count: int) -> list[int]:
    """The first ``count`` ids of the file ``text`` under the tokenizer of ``model``.

    Raises:
        UsageError: if the text cannot be read or has fewer tokens.
    """
    from mlx_lm.utils import load_tokenizer

    try:
        words = Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the text: {error}", path=text) from error
    ids = load_tokenizer(Path(model)).encode(words)
    if len(ids) < count:
        raise UsageError("the text is too short", path=text, expected=count, found=len(ids))
    return [int(n) for n in ids[:count]]
