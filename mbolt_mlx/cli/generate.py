"""``mbolt-mlx generate``: mlx-lm's own command, with our loader in place of its loader.

The prompt, the sampling and everything on stdout are mlx-lm's; so are all its options, by name and
meaning. What we add is read here and goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from mbolt_mlx.cli import arguments
from mbolt_mlx.core import streams
from mbolt_mlx.core.errors import UsageError

_ANY = (1 << 63) - 1
# What mlx-lm would go on with for ever, or fail on after the model is loaded.
_RANGES: dict[str, tuple[int, int]] = {
    "max_tokens": (-1, _ANY),
    "temp": (0, 1_000_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, _ANY),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "min_tokens_to_keep": (1, _ANY),
    "seed": (0, _ANY),
    "max_kv_size": (5, _ANY),  # mlx-lm keeps the first 4 always
    "prefill_step_size": (1, _ANY),
    "kv_bits": (1, 16),
    "kv_group_size": (1, 1024),
    "quantized_kv_start": (0, _ANY),
    "num_draft_tokens": (1, _ANY),
}
_TOKENIZER = ("tokenizer.*", "tokenizer_*.py", "vocab.*", "*.tiktoken", "*.model", "tokenization_*")
HELP = "write text as mlx_lm.generate does, with part of the experts in memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options and ours to ``parser``."""
    for action in _stock().setup_arg_parser()._actions:
        if "--help" in action.option_strings:
            continue
        if action.dest == "model":
            action.help = arguments.MODEL_HELP
        parser._add_action(action)
    arguments.add_engine_options(parser)
    parser.add_argument("--revision", help="branch, tag or commit of the hub repository")
    parser.add_argument(
        "--trace", metavar="FILE", help="record what the router chooses, for `mbolt-mlx simulate`"
    )
    parser.add_argument(
        "--stats", action="store_true", help="print what was read and what it cost, to stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Generate; with ``--trace``, record; with ``--stats``, print the table."""
    _check(args)
    stock = _stock()
    options = arguments.engine_options(args) | {"revision": args.revision}
    loader = _Loader(stock.load, options, args.trace)
    shown = _Shown(sys.stdout)
    try:
        with loader, _instead_of(stock, load=loader, setup_arg_parser=lambda: _Parsed(args)):
            with contextlib.redirect_stdout(shown):
                stock.main()
    except KeyboardInterrupt:
        if not shown.at_start:
            with contextlib.suppress(OSError):
                print(flush=True)
        raise
    except BrokenPipeError:
        raise
    except (ValueError, OSError, NotImplementedError) as error:
        if streams.is_lost(error):
            raise
        _check_tokenizer(loader.folder)
        raise UsageError(f"mlx-lm: {error or type(error).__name__}") from error
    if args.stats:
        from mbolt_mlx.cli.stats_table import print_stats

        print_stats(loader.model)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse early, and in terms of the options, what mlx-lm would fail on later."""
    cache = args.prompt_cache_file
    if args.model is None and cache is None:
        raise UsageError("no model is given", hint=f"--model takes {arguments.MODEL_HELP}")
    if cache is not None:
        _check_cache(cache)
    for name, (least, most) in _RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value <= most:  # nor not a number
            option = f"--{name.replace('_', '-')}"
            expected = f"at least {least}" if most == _ANY else f"{least} to {most}"
            raise UsageError(f"{option} has no meaning", expected=expected, found=value)
    if args.max_tokens == 0:
        raise UsageError("--max-tokens is at least 1, or -1 for no limit", found=0)
    if args.chat_template_config is not None:
        try:
            config = json.loads(args.chat_template_config)
        except ValueError as error:
            raise UsageError(f"--chat-template-config is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise UsageError("--chat-template-config is not a JSON object")


def _check_tokenizer(folder: Path | None) -> None:
    """Say that a model has no tokenizer, for which mlx-lm makes an empty one and then fails."""
    if folder is not None and not any(found for name in _TOKENIZER for found in folder.glob(name)):
        raise UsageError(
            "the model has no tokenizer: neither tokenizer.json nor tokenizer.model is there",
            path=folder, hint="download it again, or copy its tokenizer files there",
        )  # fmt: skip


def _check_cache(path: str) -> None:
    """Refuse what is not a prompt cache that mlx-lm saved."""
    from mbolt_mlx.storage.header import read_header_of

    if not os.path.isfile(path):
        raise UsageError("--prompt-cache-file: no such file", path=path)
    keys = {key.partition(".")[2] for key in read_header_of(Path(path)).metadata}
    if not {"model", "tokenizer_config"} <= keys:
        raise UsageError("not a prompt cache of mlx-lm", path=path)


class _Loader:
    """Stands in for ``mlx_lm.load``: the first model is ours, a draft model is stock.

    In its context the first model is recorded, where a trace was asked for.
    """

    def __init__(
        self, stock_load: Callable[..., Any], options: dict[str, Any], trace: str | None = None
    ) -> None:
        self._stock_load = stock_load
        self._options = options
        self._trace = trace
        self._recording = contextlib.ExitStack()
        self.model: Any = None
        self.folder: Path | None = None

    def __enter__(self) -> None:
        self._recording.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recording.__exit__(*error)

    def __call__(self, path: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        from mbolt_mlx.names import resolve

        if self.model is not None:
            return self._stock_load(str(resolve(path)), *args, **kwargs)
        import mbolt_mlx

        self.folder = resolve(path, revision=self._options["revision"])
        loaded = mbolt_mlx.load(path, *args, **kwargs, **self._options)
        self.model = loaded[0]
        if self._trace is not None:
            from mbolt_mlx.engine.record import recorded

            self._recording.enter_context(recorded(self.model, self._trace, name=str(path)))
        return loaded


class _Shown(io.TextIOBase):
    """Passes on what is written, and knows whether the next character begins a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.at_start = True

    def write(self, text: str) -> int:
        if text:
            self.at_start = text.endswith("\n")
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


class _Parsed:
    """A parser that has parsed already."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def parse_args(self) -> argparse.Namespace:
        return self._args


def _stock() -> ModuleType:
    # By import_module, because the package has a function of the same name.
    return importlib.import_module("mlx_lm.generate")


@contextlib.contextmanager
def _instead_of(module: ModuleType, **names: Any) -> Iterator[None]:
    """Put ``names`` into ``module`` for a while.

    mlx-lm's main() takes no arguments and looks both names up when it runs. Calling it, rather
    than repeating its hundred lines, is what keeps the two commands the same.
    """
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
