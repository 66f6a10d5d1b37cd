#!/usr/bin/env python3
"""Traces of a model that reads documents token by token, one trace for each domain.

    python examples/traces/record.py demo CORPUS_DIR -o DIR [--sessions 12]

CORPUS_DIR holds ``DOMAIN.jsonl`` files of documents ({"split", "text"}), as
examples/train_demo/corpus.py makes them. Each document is one session: its first tokens are the
prompt, and the following ones are decoded one at a time as if the model had said them (forced), so
that the routing is that of real text. Documents of the held-out split only, which the demo model
has not been trained on; those of even number go to DOMAIN.tune.trace, those of odd number to
DOMAIN.judge.trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

import mbolt_mlx  # noqa: E402
from mbolt_mlx.engine.record import recorded  # noqa: E402


def documents(path: Path, tokenizer, least: int, split: str) -> list[list[int]]:
    """Token ids of the documents of ``split`` that have at least ``least`` tokens."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if document.get("split") == split and len(document["text"]) > 2 * least:
            ids = tokenizer.encode(document["text"][: 12 * least])
            if len(ids) >= least:
                found.append(ids[:least])
    return found


def read_through(model, ids: list[int], prompt: int) -> None:
    """Prefill ``prompt`` tokens, then force the others one by one."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:prompt]]), cache=cache))
    for token in ids[prompt:]:
        mx.eval(model(mx.array([[token]]), cache=cache))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=12, help="documents a trace")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=320, help="tokens forced after it")
    parser.add_argument("--split", default="heldout")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = mbolt_mlx.load(args.model, resident=1.0, side_file=None)
    length = args.prompt + args.decode
    for path in sorted(args.corpus.glob("*.jsonl")):
        found = documents(path, tokenizer, length, args.split)
        if len(found) < 2:
            print(f"{path.stem}: too few documents of {length} tokens", file=sys.stderr)
            continue
        for part, name in enumerate(("tune", "judge")):
            start, mine = time.perf_counter(), found[part::2][: args.sessions]
            target = args.output / f"{path.stem}.{name}.trace"
            with recorded(model, target, name=args.model):
                for ids in mine:
                    read_through(model, ids, args.prompt)
            rate = len(mine) * length / (time.perf_counter() - start)
            print(f"{target}: {len(mine)} sessions, {rate:.0f} tokens a second", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
