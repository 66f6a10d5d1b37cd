"""Why mlx-lm could not build a model, in one line."""

from __future__ import annotations

import re
from typing import Any

from mbolt_mlx.core.errors import CheckpointError, MboltError, UnsupportedError
from mbolt_mlx.storage.checkpoint import Checkpoint, read_json
from mbolt_mlx.storage.experts import configs, find_experts

AFTER_STACKING = ("awq", "gptq")
CONVERT = "use its files from before the quantisation, or ones that mlx_lm.convert made of them"
_MODELOPT = "hf_quant_config.json"
_EXTRA = re.compile(r"Received (?P<count>\d+) parameters not in model:\s+(?P<name>[^\s,]+)")
_LACKS = re.compile(r"Missing (?P<count>\d+) parameters:\s+(?P<name>[^\s,]+)")
_SHAPE = re.compile(
    r"Expected shape (?P<expected>.+) but received shape (?P<found>.+) for parameter (?P<name>\S+)"
)
_QWEIGHT = re.compile(r"\bexperts\.\d+\..+\.qweight$")
_TEXT_MAX = 300


def quantisation_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the files say of a quantisation that is not MLX's own; empty where nothing."""
    for config in configs(checkpoint.config):
        found = config.get("quantization_config")
        if isinstance(found, dict):
            return found
    path = checkpoint.path / _MODELOPT
    found = read_json(path, _MODELOPT) if path.exists() else None
    return found if isinstance(found, dict) else {}


def method_of(checkpoint: Checkpoint) -> str | None:
    """The name of that quantisation, such as "modelopt NVFP4"."""
    how = quantisation_of(checkpoint)
    inner = how.get("quantization")
    settings = inner if isinstance(inner, dict) else how
    producer = how.get("producer")
    names = [
        how.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None),
        settings.get("format") or settings.get("quant_algo"),
    ]
    return " ".join(name for name in names if isinstance(name, str)) or None


def explained(checkpoint: Checkpoint, error: Exception) -> MboltError:
    """Why mlx-lm could not build the model, by the name of the tensor if that tells."""
    try:
        find_experts(checkpoint)
    except CheckpointError as found:
        return found
    except UnsupportedError:
        pass
    method = method_of(checkpoint)
    about: dict[str, Any] = {"found": method, "hint": CONVERT if method else None}
    packed = min(filter(_QWEIGHT.search, checkpoint.tensors), default=None)
    text = str(error)
    if packed is not None:
        why = "it unpacks AWQ and GPTQ after it has stacked the experts, so it loads no such expert"
        about["tensor"] = packed
    elif match := _EXTRA.match(text):
        why = f"it has no place for {match['count']} of the tensors, of which this is the first"
        about["tensor"] = match["name"]
    elif match := _LACKS.match(text):
        why = f"it lacks {match['count']} tensors, of which this is the first"
        about["tensor"] = match["name"]
    elif match := _SHAPE.match(text):
        why = f"the shape is {match['found']} and not {match['expected']}"
        about["tensor"] = match["name"]
    else:
        why = " ".join(text.split())[:_TEXT_MAX] or type(error).__name__
        if isinstance(error, KeyError):
            why = f"{why} is absent"
    return UnsupportedError(f"mlx-lm cannot build this model: {why}", path=checkpoint.path, **about)
