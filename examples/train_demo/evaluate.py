"""Held-out loss of a model folder by domain, with stock mlx-lm.

    python evaluate.py CORPUS_DIR MODEL_DIR... --out losses.json

Each domain's held-out documents are joined and cut into windows of ``--length`` tokens, of which
``--windows`` evenly spaced ones are scored. Loss is in nats per token; bits per byte divides the
total by the bytes of UTF-8 text that the tokens stand for, so that other tokenizers compare.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import corpus
import data
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import load
from tokenizers import Tokenizer


def windows_of(stream: np.ndarray, length: int, most: int) -> np.ndarray:
    """At most ``most`` evenly spaced windows of ``length`` + 1 ids."""
    starts = np.arange(0, len(stream) - length, length)
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).astype(int)]
    return np.stack([stream[s : s + length + 1] for s in starts])


def score(model: nn.Module, tokenizer: Tokenizer, rows: np.ndarray) -> dict[str, float]:
    """Mean loss of every token of ``rows`` but each row's first."""
    nats, tokens, size = 0.0, 0, 0
    for row in rows:
        ids = mx.array(row)[None]
        loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="sum")
        nats += loss.item()
        tokens += len(row) - 1
        # End-of-text tokens stand for no bytes.
        size += len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=True).encode())
    return {"nats_per_token": round(nats / tokens, 4),
            "bits_per_byte": round(nats / math.log(2) / size, 4),
            "tokens": tokens, "bytes": size}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=80, help="windows of a domain")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    result: dict[str, dict] = {}
    for path in args.models:
        model, _ = load(str(path))
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        result[path.name] = {}
        for domain in corpus.DOMAINS:
            documents = corpus.read_documents(args.corpus, domain, "heldout")
            stream = data.encode_documents(tokenizer, documents)
            rows = windows_of(stream, args.length, args.windows)
            result[path.name][domain] = scored = score(model, tokenizer, rows)
            print(
                f"{path.name:12} {domain:8} {scored['nats_per_token']:.3f} nats/token "
                f"{scored['bits_per_byte']:.3f} bits/byte over {scored['tokens']:,} tokens"
            )
        mean = np.mean([s["nats_per_token"] for s in result[path.name].values()])
        print(f"{path.name:12} {'mean':8} {mean:.3f} nats/token")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
