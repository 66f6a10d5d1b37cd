#!/usr/bin/env python3
"""The demo model from MLX to llama.cpp: converted, traced, clustered, rewritten, run and compared.

    python examples/gguf/demo.py WORK_FOLDER [--json OUT.json]

1. converts the demo model to GGUF; 2. runs held-out passages of four domains through MLX and
llama.cpp and compares which experts each token chose; 3. traces llama.cpp, clusters, rewrites;
4. runs the gates of `mbolt-gguf correctness` and writes some text; 5. replays each domain with the
profile of another: reads a token of each layout. Needs `mbolt-gguf build-llama`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from convert_demo import convert  # noqa: E402

from mbolt_gguf.build import binary  # noqa: E402
from mbolt_gguf.correctness import Checker  # noqa: E402
from mbolt_gguf.evaluate import DRIVER, Way, evaluate, run_driver  # noqa: E402
from mbolt_gguf.rewrite import rewrite  # noqa: E402
from mbolt_mlx.core.errors import MboltError  # noqa: E402
from mbolt_mlx.core.output import write_whole  # noqa: E402
from mbolt_mlx.profile.layout import lay_out  # noqa: E402
from mbolt_mlx.profile.perms import make_perms  # noqa: E402
from mbolt_mlx.profile.replay import Setup, replay  # noqa: E402
from mbolt_mlx.profile.traces import Trace  # noqa: E402
from mbolt_mlx.resources import resource  # noqa: E402

GAP = 1e-3
LAYOUTS = ("stock", "heat", "clique", "chain", "coalesced", "interleave")


@dataclass
class Agreement:
    """Top-k sets of two engines on the same tokens: equal ones, those whose router gap is below
    ``GAP``, others; ``gap`` is the largest gap of a differing set."""

    sets: int = 0
    equal: int = 0
    near: int = 0
    apart: int = 0
    gap: float = 0.0

    def add(self, other: Agreement) -> None:
        """Count ``other`` too."""
        self.gap = max(self.gap, other.gap)
        for name in ("sets", "equal", "near", "apart"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def passages(folder: Path) -> dict[str, list[list[int]]]:
    """Domain → token ids of each held-out passage."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: dict[str, list[list[int]]] = {}
    for snippet in json.loads((folder / "heldout.json").read_text(encoding="utf-8"))["snippets"]:
        ids = [0, *tokenizer.encode(snippet["text"]).ids]
        found.setdefault(snippet["domain"], []).append(ids)
    return found


def mlx_scores(folder: Path, passages: Sequence[Sequence[int]]) -> list[dict[int, np.ndarray]]:
    """For each passage, layer → ``[tokens, experts]``: the probabilities that MLX sorts."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import load

    model, _ = load(str(folder))
    seen: list[mx.array] = []

    class Recorded(nn.Module):
        def __init__(self, gate: nn.Module) -> None:
            super().__init__()
            self.gate = gate

        def __call__(self, x: mx.array) -> mx.array:
            seen.append(self.gate(x))
            return seen[-1]

    for layer in model.layers:
        layer.mlp.gate = Recorded(layer.mlp.gate)
    out = []
    for ids in passages:
        seen.clear()
        mx.eval(model(mx.array([list(ids)])))
        probabilities = [mx.softmax(logits[0], axis=-1, precise=True) for logits in seen]
        out.append({n: np.array(p) for n, p in enumerate(probabilities)})
    return out


def agreement(scores: Mapping[int, np.ndarray], routes: Mapping[int, np.ndarray]) -> Agreement:
    """Compare the top-k of ``scores`` with ``routes``, both by layer and token."""
    found = Agreement()
    for layer, chosen in routes.items():
        for values, theirs in zip(scores[layer], chosen, strict=True):
            ours = set(np.argsort(-values, kind="stable")[: len(theirs)].tolist())
            theirs = set(theirs.tolist())
            found.sets += 1
            if ours == theirs:
                found.equal += 1
                continue
            gap = float(max(values[[*(ours - theirs)]]) - min(values[[*(theirs - ours)]]))
            found.gap = max(found.gap, gap)
            found.near += gap < GAP
            found.apart += gap >= GAP
    return found


def traces(driver: Path, model: Path, texts: Mapping[str, list[list[int]]]) -> dict[str, Trace]:
    """Domain → trace of llama.cpp: 32 tokens of prompt, the others decoded one at a time."""
    found = {}
    for domain, some in texts.items():
        parts = []
        for session, ids in enumerate(some):
            way = Way(decode=max(1, len(ids) - 32))
            run = evaluate(model, ids, way, driver=driver, logits=False)
            parts += [replace(one, session=session) for one in run.trace.passes]
        found[domain] = replace(run.trace, passes=tuple(parts))
    return found


def reads_by_domain(
    traces: Mapping[str, Trace], expert_bytes: int, resident: float
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Profile domain → replayed domain → layout → reads and MB a decoded token."""
    sized = {
        name: replace(
            trace,
            layers={
                n: replace(info, expert_bytes=expert_bytes, pieces=3)
                for n, info in trace.layers.items()
            },
        )
        for name, trace in traces.items()
    }
    out: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for source, profiled in sized.items():
        orders = make_perms(profiled).orders
        for target, trace in sized.items():
            rows = {}
            for layout in LAYOUTS:
                ranges = lay_out(layout, trace.layers, orders)
                counts = replay(trace, Setup(resident=resident), ranges).decode
                rows[layout] = {
                    "reads": round(counts.per_token("reads"), 3),
                    "mb": round(counts.per_token("bytes") / 1e6, 4),
                    "hit_rate": round(counts.hit_rate, 4),
                }
            out.setdefault(source, {})[target] = rows
    return out


def text(driver: Path, model: Path, prompt: str, tokens: int) -> str:
    """Greedy text of ``model`` after ``prompt``."""
    command = [str(driver), "-m", str(model), "--prompt", prompt, "-n", str(tokens), "--json"]
    return run_driver(command, model).get("text", "")


def show(driver: Path, work: Path, say=lambda text: None) -> dict[str, Any]:
    """All of it; the figures as JSON values."""
    folder = resource("demo")
    work.mkdir(parents=True, exist_ok=True)
    model = work / "demo.gguf"
    if not model.exists():
        say("converting")
        convert(folder, model)
    texts = passages(folder)
    say("routing of MLX and of llama.cpp")
    agreed: dict[str, Agreement] = {}
    named = [(domain, ids) for domain, some in texts.items() for ids in some]
    for (domain, ids), scores in zip(named, mlx_scores(folder, [i for _, i in named]), strict=True):
        run = evaluate(model, ids, driver=driver)
        agreed.setdefault(domain, Agreement()).add(agreement(scores, run.routes))
    say("traces")
    traced = traces(driver, model, texts)
    perms = make_perms(traced["bible"])
    gates, written = {}, {}
    prompt = "And the LORD said unto"
    written["original"] = text(driver, model, prompt, 40)
    for layout in ("chain+pipeline", "interleave", "interleave+chain"):
        say(f"rewriting: {layout}")
        target = work / f"demo-{layout.replace('+', '-')}.gguf"
        path = rewrite(model, perms, target, layout=layout, force=True, progress=False).paths[0]
        checker = Checker(model, path, driver=driver, tokens=texts["english"][0][:96])
        gates[layout] = [gate.document() for gate in checker.run()]
        written[layout] = text(driver, path, prompt, 40)
    expert = 3 * 4 * 256 * 64  # float32
    return {
        "format": "mbolt-gguf-demo",
        "version": 1,
        "routing": {domain: asdict(found) for domain, found in agreed.items()},
        "text": {"prompt": prompt, **written},
        "gates": gates,
        "resident": 0.25,
        "reads_a_token": reads_by_domain(traced, expert, 0.25),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The figures for people."""
    out = ["routing of MLX and llama.cpp, top-k sets:"]
    for domain, one in found["routing"].items():
        out.append(
            f"  {domain:<8} {one['equal']} of {one['sets']} equal, {one['near']} with a router gap "
            f"under {GAP:g}, {one['apart']} others (largest gap {one['gap']:.2g})"
        )
    for layout, gates in found["gates"].items():
        out.append(f"gates, {layout}:")
        out += [
            f"  {g['name']:<13}{'pass' if g['passed'] else 'FAIL'}  {g['found']}" for g in gates
        ]
    out.append("greedy text:")
    out += [f"  {name:<18} {words!r}" for name, words in found["text"].items()]
    out.append(f"reads a decoded token, a quarter of the experts in memory, by layout {LAYOUTS}:")
    for source, targets in found["reads_a_token"].items():
        for target, rows in targets.items():
            numbers = "  ".join(f"{rows[name]['reads']:7.2f}" for name in LAYOUTS)
            out.append(f"  profile {source:<8} on {target:<8} {numbers}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    try:
        data = show(binary(DRIVER), args.work, lambda t: print(t, file=sys.stderr, flush=True))
        print("\n".join(lines(data)))
        if args.json:
            write_whole(args.json, json.dumps(data, indent=1).encode() + b"\n")
    except MboltError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(g["passed"] for gates in data["gates"].values() for g in gates) else 1


if __name__ == "__main__":
    sys.exit(main())
