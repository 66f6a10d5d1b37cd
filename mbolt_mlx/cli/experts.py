"""Where a model's experts lie, for commands that read or write them."""

from __future__ import annotations

from collections.abc import Sequence

from mbolt_mlx.core.errors import UnsupportedError
from mbolt_mlx.storage.checkpoint import Checkpoint
from mbolt_mlx.storage.experts import ExpertLayer, find_experts
from mbolt_mlx.storage.gather import Computer


def open_experts(checkpoint: Checkpoint) -> tuple[Sequence[ExpertLayer], Computer | None]:
    """The expert layers of ``checkpoint`` as the engine will want them, and what computes those
    that need it, if any do.

    Raises:
        UnsupportedError, CheckpointError: when there are none, or they cannot be used.
    """
    from mbolt_mlx.engine.compute import open_experts as build

    try:
        return build(checkpoint)
    except UnsupportedError as error:
        if error.tensor is not None:
            raise  # mlx-lm knows the model and cannot use these files: a side-file helps nobody
        try:
            return find_experts(checkpoint), None
        except UnsupportedError:
            raise error from None


def named_experts(checkpoint: Checkpoint) -> Sequence[ExpertLayer]:
    """The expert layers by the names of their tensors; where these do not tell, as mlx-lm builds
    the model.

    Raises:
        UnsupportedError, CheckpointError: as `open_experts`.
    """
    try:
        return find_experts(checkpoint)
    except UnsupportedError:
        return open_experts(checkpoint)[0]
