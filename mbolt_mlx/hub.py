"""Model repositories on the Hugging Face hub: from the cache when complete, else downloaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from mbolt_mlx.core.errors import NamesError

# What mlx-lm reads of a repository; the rest (other formats, pictures) is not fetched.
PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


# Seconds that the hub has to answer the first question.
TIMEOUT = 10


def snapshot(repository: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """Return the local folder of ``ORG/NAME``, downloading what is missing of it.

    A snapshot that is complete in the hub's cache is used without asking the network, so a new
    revision on the hub is fetched only when ``revision`` asks for it.

    Raises:
        NamesError: the repository or revision does not exist, is closed to this user, or cannot
            be reached, and the cache does not hold it in full.
    """
    folder = cached(repository, revision)
    if folder is not None and is_complete(folder):
        return folder
    partly = "only part of it is in the cache" if folder else "it is not in the cache"
    reach(repository, revision, partly)
    folder = _download(repository, revision, progress, partly)
    if not is_complete(folder):
        raise NamesError(
            f"{repository} has no config.json with all its model*.safetensors",
            path=folder,
            hint="it may be in another format, or the download may have been cut short",
        )
    return folder


def is_complete(folder: Path) -> bool:
    """Tell whether a snapshot has its config and every weight file that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.is_file() for path in folder.glob("model*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def reach(repository: str, revision: str | None, partly: str) -> None:
    """Ask the hub whether it has ``repository``, before anything that would wait and try again.

    Args:
        partly: what this machine has of it, for the errors.

    Raises:
        NamesError: it has not, or it does not answer within `TIMEOUT`.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise NamesError(
            f"{repository} cannot be downloaded: HF_HUB_OFFLINE is set and {partly}",
            hint="unset it, or give a folder",
        )
    try:
        HfApi().model_info(repository, revision=revision, timeout=TIMEOUT)
    except Exception as error:
        raise explain(error, repository, revision, partly) from error


def cached(repository: str, revision: str | None) -> Path | None:
    """The snapshot in the hub's cache, whole or not; None where there is none.

    Raises:
        NamesError: when the cache cannot be used.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(PATTERNS), local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NamesError(f"the hub's cache cannot be used for {repository}: {error}") from error


def _download(repository: str, revision: str | None, progress: bool, partly: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with _bars(progress):
            return Path(
                snapshot_download(repository, revision=revision, allow_patterns=list(PATTERNS))
            )
    except Exception as error:
        raise explain(error, repository, revision, partly) from error


def explain(error: Exception, repository: str, revision: str | None, partly: str) -> NamesError:
    """Say in one line why the hub's library failed; its own texts run over many."""
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return NamesError(f"{repository} has no revision {revision!r}")
    if isinstance(error, errors.NotASafetensorsRepoError):
        return NamesError(f"{repository} has no safetensors files on the hub")
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return NamesError(
            f"{repository} is gated on the hub",
            hint=f"ask for access at https://huggingface.co/{repository}, then `hf auth login`",
        )
    # Without a login, the hub answers 401 for what does not exist.
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return NamesError(
            f"no folder and no repository on the hub is called {repository}, or it is private",
            hint="check the name; for a private one, `hf auth login`",
        )
    if status is not None:
        return NamesError(f"the hub answered {status} for {repository}, and {partly}")
    if isinstance(error, errors.HFValidationError):
        return NamesError(f"{repository!r} is not a repository name")
    if isinstance(error, OSError) and error.filename is not None:
        return NamesError(
            f"{repository} could not be stored: {error.strerror}", path=str(error.filename)
        )
    return NamesError(
        f"the hub cannot be reached for {repository} ({_first_line(error)}), and {partly}",
        hint="check the network, or give a folder",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Silence the hub's bars (which go to stderr) unless ``progress``."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
