"""Small GGUFs of random weights that llama.cpp loads and runs, single and split.

They are those of examples/gguf/random_gguf.py, with names for what a test wants.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "gguf"
if str(EXAMPLES) not in sys.path:  # examples are scripts, not a package
    sys.path.insert(0, str(EXAMPLES))

from random_gguf import write_gguf  # noqa: E402
from random_shapes import ARCHS, QUANTS, Spec  # noqa: E402

__all__ = ["ARCHS", "MODELS", "QUANTS", "Spec", "make_gguf", "spec_of"]

# Name → what differs from the defaults. Slices of ff_exp 96 in Q8_0 and MXFP4 are no multiple of
# 4096 bytes.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"arch": "qwen3moe"},
    "gpt-oss": {"arch": "gpt-oss"},
    "deepseek2": {"arch": "deepseek2"},
    "deepseek2-groups": {
        "arch": "deepseek2",
        "experts": 16,
        "top_k": 4,
        "options": {"groups": 4, "groups_used": 2},
    },
    "deepseek2-fused": {"arch": "deepseek2", "options": {"fused": True}},
    "glm4moe": {"arch": "glm4moe"},
    "qwen3next": {"arch": "qwen3next", "layers": 4},
    "qwen3next-fused": {"arch": "qwen3next", "layers": 4, "options": {"fused": True}},
}


def spec_of(model: str = "qwen3moe", quant: str = "Q8_0", **changes: Any) -> Spec:
    """The shape of ``model`` (a key of `MODELS`) in ``quant`` (of `QUANTS`), with ``changes``."""
    chosen = {"ff_exp": 256 if quant in ("Q4_K_M", "IQ4_XS") else 96, **MODELS[model], **changes}
    return Spec(quant=quant, **chosen)


def make_gguf(
    path: Path,
    model: str = "qwen3moe",
    quant: str = "Q8_0",
    *,
    seed: int = 0,
    split: int = 0,
    empty_first: bool = False,
    **changes: Any,
) -> Path:
    """Write a model and return the path to give to llama.cpp.

    Args:
        path: of the file; a split model gets NAME-00001-of-0000N.gguf beside it.
        model: a key of `MODELS`.
        quant: a key of `QUANTS`.
        seed: of the weights.
        split: tensors a file, 0 for one file.
        empty_first: the first file of a split model has no tensors.
        changes: fields of `Spec`.
    """
    return write_gguf(
        Path(path),
        spec_of(model, quant, **changes),
        seed=seed,
        split_tensors=split,
        empty_first=empty_first,
    )
