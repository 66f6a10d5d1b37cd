"""Train the demo model on the CPU.

    python train.py CORPUS_DIR OUT_DIR --minutes 75

Writes ``tokenizer.json`` and ``checkpoint.pt`` to OUT_DIR, and resumes from them when it is started
again. The learning rate follows a cosine over the budget, given in minutes or in tokens. For the
last part of the budget the weights are rounded in the forward pass as MLX will round them, and the
gradient goes to the unrounded ones, so that quantising costs little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import corpus
import data
import numpy as np
import torch
import torch.nn.functional as F
from model import CONFIG, Model
from tokenizers import Tokenizer
from tqdm import tqdm

CHECKPOINT = "checkpoint.pt"
SAVE_EVERY_S = 240.0
GROUP = 64  # weights that share one scale and bias


def rounded(w: torch.Tensor, bits: int) -> torch.Tensor:
    """``w`` after MLX's affine quantisation to ``bits`` bits in groups of ``GROUP`` and back."""
    levels = 2**bits - 1
    g = w.reshape(-1, GROUP)
    low, high = g.amin(dim=1, keepdim=True), g.amax(dim=1, keepdim=True)
    scale = ((high - low) / levels).clamp_min(1e-7)
    low_side = low.abs() > high.abs()
    scale = torch.where(low_side, scale, -scale)
    edge = torch.where(low_side, low, high)
    zero = torch.round(edge / scale)
    scale = torch.where(zero != 0, edge / zero, scale)
    bias = torch.where(zero != 0, edge, torch.zeros_like(edge))
    q = torch.round((g - bias) / scale).clamp_(0, levels)
    return (q * scale + bias).reshape(w.shape)


def bits_of(name: str, dense_bits: int) -> int:
    """Bits of a weight in the shipped model: experts 4, router 8, the rest ``dense_bits``."""
    if "switch_mlp" in name:
        return 4
    return 8 if name.endswith("mlp.gate.weight") else dense_bits


def learning_rate(step: int, progress: float, peak: float, warm_up: int) -> float:
    """Linear warm-up over ``warm_up`` steps, then a cosine from ``peak`` to a fiftieth of it."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * cosine)


@torch.no_grad()
def held_out_loss(model: Model, streams: dict[str, np.ndarray], length: int) -> dict[str, float]:
    """Nats per token by domain over the first 16 windows of each held-out stream."""
    losses = {}
    for domain, stream in streams.items():
        rows = stream[: 16 * length + 1]
        count = (len(rows) - 1) // length
        x = torch.from_numpy(rows[: count * length].reshape(count, length).astype(np.int64))
        y = torch.from_numpy(rows[1 : count * length + 1].astype(np.int64))
        losses[domain] = F.cross_entropy(model(x).flatten(0, 1), y).item()
    return losses


def train(args: argparse.Namespace) -> None:
    """Train until the budget is used; everything that resuming needs is in the checkpoint."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    tokenizer_path = args.out / "tokenizer.json"
    if tokenizer_path.is_file():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = data.train_tokenizer(args.corpus, args.seed)
        tokenizer.save(str(tokenizer_path))
    held_out = {
        d: data.encode_documents(tokenizer, corpus.read_documents(args.corpus, d, "heldout"))
        for d in corpus.DOMAINS
    }

    model = Model(CONFIG)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    step, tokens, seconds, history = 0, 0, 0.0, []
    path = args.out / CHECKPOINT
    if path.is_file():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, tokens, seconds = state["step"], state["tokens"], state["seconds"]
        history = state["history"]
        print(f"resumed at step {step}, {seconds / 60:.1f} minutes", flush=True)

    mixer = data.Mixer(tokenizer, args.corpus, args.length, args.seed + step)
    print(f"training tokens by source: {mixer.tokens}", flush=True)

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "step": step,
            "seconds": seconds,
            "optimizer": optimizer.state_dict(),
            "history": history,
            "tokens": tokens,
            "corpus_tokens": mixer.tokens,
            "config": CONFIG,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)
        (args.out / "history.json").write_text(json.dumps(history, indent=1))

    per_step = args.batch * args.length
    budget = args.tokens if args.tokens else args.minutes * 60
    bar = tqdm(total=budget, initial=tokens if args.tokens else seconds,
               mininterval=30, unit="tok" if args.tokens else "s", file=sys.stdout,
               bar_format="{percentage:5.1f}% {elapsed}<{remaining} {postfix}\n")  # fmt: skip
    named = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    saved, last, average = seconds, time.monotonic(), None
    while True:
        progress = tokens / args.tokens if args.tokens else seconds / budget
        if progress >= 1:
            break
        lr = learning_rate(step, progress, args.lr, args.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = lr
        rows = torch.from_numpy(mixer.batch(args.batch))
        exact = {}
        if progress >= args.round_from:
            for name, p in named:
                exact[name] = p.data
                p.data = rounded(p.data, bits_of(name, args.dense_bits))
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        balance = model.balance()
        (loss + args.balance * balance).backward()
        for name, p in named:
            if name in exact:
                p.data = exact[name]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + per_step
        now = time.monotonic()
        took, last = now - last, now
        seconds += took
        average = loss.item() if average is None else 0.97 * average + 0.03 * loss.item()
        bar.set_postfix_str(
            f"step {step} {tokens / 1e6:.2f} Mtok {per_step / took:.0f} tok/s "
            f"loss {average:.3f} balance {balance.item():.3f} norm {norm.item():.2f} lr {lr:.5f}",
            refresh=False,
        )
        bar.update(per_step if args.tokens else took)
        if seconds - saved > SAVE_EVERY_S:
            losses = held_out_loss(model, held_out, args.length)
            history.append(
                {
                    "step": step,
                    "tokens": tokens,
                    "seconds": round(seconds, 1),
                    "train": average,
                    "heldout": losses,
                }
            )
            print("held out:", {k: round(v, 3) for k, v in losses.items()}, flush=True)
            save()
            saved = seconds
    save()
    print(f"done: {step} steps, {tokens:,} tokens, {seconds / 60:.1f} minutes")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder that corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder for the tokenizer and the checkpoint")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="wall-clock budget")
    budget.add_argument("--tokens", type=int, help="token budget")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=150, help="steps")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--round-from", type=float, default=0.85,
                        help="part of the budget after which weights are rounded")  # fmt: skip
    parser.add_argument("--dense-bits", type=int, default=4, choices=(4, 8),
                        help="bits of attention and embedding in the shipped model")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    try:
        train(parser.parse_args())
    except corpus.CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
