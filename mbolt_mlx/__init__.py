"""Run mixture-of-experts models that are bigger than memory, on MLX.

    import mbolt_mlx, mlx_lm
    model, tokenizer = mbolt_mlx.load("Qwen3-235B", resident=0.2)
    mlx_lm.generate(model, tokenizer, prompt="…")

Importing this imports no MLX; `load`, `stats` and `reset_stats` do when they are first used.
"""

from __future__ import annotations

from typing import Any

from mbolt_mlx.core.errors import MboltError

__version__ = "0.1.0"
__all__ = ["MboltError", "load", "reset_stats", "stats"]


def load(path_or_hf_repo: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Load a model with part of its experts in memory; see `mbolt_mlx.engine.load.load`."""
    from mbolt_mlx.engine.load import load as load_model

    return load_model(path_or_hf_repo, *args, **kwargs)


def stats(model: Any) -> Any:
    """What ``model`` has done since it was loaded, as `mbolt_mlx.engine.stats.Stats`."""
    from mbolt_mlx.engine.runtime import engine_of

    return engine_of(model).stats()


def reset_stats(model: Any) -> None:
    """Count from zero again; the experts in memory stay."""
    from mbolt_mlx.engine.runtime import engine_of

    engine_of(model).reset_stats()
