"""Tokenizer and token streams: from corpus documents to batches of token ids."""

from __future__ import annotations

import random
from pathlib import Path

import chat
import corpus
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 and 2
END_OF_TEXT = 0
VOCABULARY = 2048
# Share of the training sequences of each kind; the exchanges take an equal part of each domain.
MIX = {"bible": 0.15, "english": 0.18, "manual": 0.19, "german": 0.14, "python": 0.20, "chat": 0.14}
TOKENIZER_CHARS = 2_000_000  # of each domain


def train_tokenizer(folder: Path, seed: int = 0) -> Tokenizer:
    """A byte-level BPE over equal amounts of each domain's training split."""
    rng = random.Random(seed)
    texts = []
    for domain in corpus.DOMAINS:
        documents = corpus.read_documents(folder, domain, "train")
        rng.shuffle(documents)
        taken = 0
        for doc in documents:
            if taken < TOKENIZER_CHARS:
                texts.append(doc["text"])
                taken += len(doc["text"])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[dict]) -> np.ndarray:
    """Every document, each followed by the end-of-text token, as one int32 stream."""
    encoded = tokenizer.encode_batch([doc["text"] for doc in documents])
    return np.concatenate([np.asarray([*e.ids, END_OF_TEXT], dtype=np.int32) for e in encoded])


def chat_sequences(tokenizer: Tokenizer, folder: Path, length: int, seed: int) -> np.ndarray:
    """Rows of ``length`` + 1 ids that start with an exchange and are filled with further ones."""
    made = [
        chat.dialogues(domain, corpus.read_documents(folder, domain, "train"), seed)
        for domain in corpus.DOMAINS
    ]
    most = max(map(len, made[:2])) // 2
    texts = [group[i % len(group)] for i in range(most) for group in made]
    rows, row = [], []
    for e in tokenizer.encode_batch(texts):
        row += e.ids
        if len(row) > length:
            rows.append(row[: length + 1])
            row = []
    return np.asarray(rows, dtype=np.int32)


class Mixer:
    """Draws sequences of ``length`` + 1 ids by ``MIX``; each is used up before it repeats."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, length: int, seed: int = 0) -> None:
        self.length = length
        self._rng = np.random.default_rng(seed)
        self.tokens: dict[str, int] = {}
        self._streams: dict[str, np.ndarray] = {}
        for domain in corpus.DOMAINS:
            stream = encode_documents(tokenizer, corpus.read_documents(folder, domain, "train"))
            self._streams[domain] = stream
            self.tokens[domain] = len(stream)
        rows = chat_sequences(tokenizer, folder, length, seed)
        self._streams["chat"] = rows
        self.tokens["chat"] = int(rows.size)
        self._waiting: dict[str, list[int]] = {name: [] for name in MIX}

    def _next(self, name: str) -> np.ndarray:
        stream = self._streams[name]
        waiting = self._waiting[name]
        if stream.ndim == 2:
            if not waiting:
                waiting.extend(self._rng.permutation(len(stream)).tolist())
            return stream[waiting.pop()]
        if not waiting:
            offset = int(self._rng.integers(self.length))
            count = (len(stream) - offset - 1) // self.length
            waiting.extend((offset + self.length * self._rng.permutation(count)).tolist())
        at = waiting.pop()
        return stream[at : at + self.length + 1]

    def batch(self, size: int) -> np.ndarray:
        """``size`` rows of ids, int64."""
        names = self._rng.choice(list(MIX), size=size, p=list(MIX.values()))
        return np.stack([self._next(str(name)) for name in names]).astype(np.int64)
