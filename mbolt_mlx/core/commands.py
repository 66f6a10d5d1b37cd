"""``PROG COMMAND …``: find the command, run it, turn errors into one line and a status.

Status 0: done. 1: a check failed. 2: wrong usage or input. 130: Ctrl-C. 141: the reader of stdout
went away.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from mbolt_mlx import __version__
from mbolt_mlx.core import streams
from mbolt_mlx.core.errors import MboltError, UsageError

# Texts for a model.
_MAY_BE_EMPTY = frozenset({"command", "prompt", "system_prompt", "prefill_response"})


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are our errors: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # Most often a shell's variable that is not set: a default in its place would be a surprise.
        if not text and action.dest not in _MAY_BE_EMPTY and action.nargs != argparse.REMAINDER:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self.error(f"argument {name}: it is empty")
        return super()._get_value(action, text)


@dataclass(frozen=True)
class CommandLine:
    """A program of several commands.

    Args:
        prog: its name.
        description: one sentence, for ``--help``.
        commands: name → module. A module has HELP, configure(parser) and run(args) → status. It is
            imported only when it is used.
        loggers: whose notes are shown the way errors are.
    """

    prog: str
    description: str
    commands: dict[str, str]
    loggers: tuple[str, ...] = ("mbolt_mlx",)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command line and return its exit status."""
        argv = list(sys.argv[1:] if argv is None else argv)
        return guarded(self.prog, self._dispatch, argv, self.loggers)

    def _dispatch(self, argv: list[str]) -> int:
        parser = self._top_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.epilog = self._list_commands()
            parser.print_help(sys.stderr)
            return 2
        if args.command not in self.commands:
            close = difflib.get_close_matches(args.command, self.commands, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(self.commands)}"
            raise UsageError(f"there is no command {args.command!r}", hint=hint)
        module = importlib.import_module(self.commands[args.command])
        return _run(f"{self.prog} {args.command}", module, args.rest)

    def _top_parser(self) -> Parser:
        line = self

        class Help(argparse.Action):
            """Lists the commands too, for which it imports them all."""

            def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
                parser.epilog = line._list_commands()
                parser.print_help()
                parser.exit()

        parser = Parser(
            prog=self.prog,
            usage=f"{self.prog} [--version] [--debug] COMMAND …",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        parser.add_argument("-h", "--help", action=Help, nargs=0, help="show this and exit")
        parser.add_argument(
            "--version",
            action="version",
            version=f"{self.prog} {__version__}",
            help="show the version and exit",
        )
        _add_debug(parser)
        parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        return parser

    def _list_commands(self) -> str:
        lines = ["commands:"]
        for name, path in self.commands.items():
            module: ModuleType = importlib.import_module(path)
            lines.append(f"  {name:<12} {module.HELP}")
        lines.append(f"\n`{self.prog} COMMAND --help` shows a command's options.")
        return "\n".join(lines)


def script(
    prog: str,
    path: str,
    argv: Sequence[str] | None = None,
    *,
    loggers: tuple[str, ...] = ("mbolt_mlx",),
) -> int:
    """Run the program ``prog`` that is the one command of the module ``path``; its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(
        prog, lambda rest: _run(prog, importlib.import_module(path), rest), argv, loggers
    )


def guarded(
    prog: str,
    run: Callable[[list[str]], int],
    argv: list[str],
    loggers: tuple[str, ...] = ("mbolt_mlx",),
) -> int:
    """``run(argv)``, with what it raises as one line on stderr (all of it after ``--debug``)."""
    debug = "--debug" in argv
    streams.hold_standard()
    streams.show_what_can_be_shown()
    try:
        _log_to_stderr(prog, loggers)
        status = run(argv)
        sys.stdout.flush()
        return status
    except SystemExit as done:  # argparse, after --help and --version
        return done.code if isinstance(done.code, int) else 2
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        _say(prog, "interrupted")
        return 130
    except BrokenPipeError:
        streams.drop_rest(sys.stdout)
        return 141
    except MboltError as error:
        if debug:
            traceback.print_exc()
        _say(prog, f"error: {error}")
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and streams.is_lost(error):
            streams.drop_rest(sys.stdout)
            _say(prog, f"error: cannot write to stdout: {error.strerror}")
            return 2
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            _say(prog, f"error: {MboltError(error.strerror, path=os.fsdecode(error.filename))}")
            return 2
        text = " ".join(str(error).split())
        _say(prog, f"error: unexpected {type(error).__name__}: {text}; --debug shows where")
        return 2


def _run(prog: str, module: ModuleType, argv: list[str]) -> int:
    parser = Parser(prog=prog, description=_sentence(module.HELP))
    module.configure(parser)
    _add_debug(parser)
    args = parser.parse_args(argv)
    args.prog = prog  # a command may be of several programs
    return module.run(args)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


class _OneLine(logging.Formatter):
    def __init__(self, prog: str) -> None:
        super().__init__()
        self.prog = prog

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.prog}: {level}{text}"


def _log_to_stderr(prog: str, names: Sequence[str]) -> None:
    """Show what our own libraries note the way errors are shown."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(prog))
    for name in names:
        logger = logging.getLogger(name)
        for old in list(logger.handlers):
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _say(prog: str, text: str) -> None:
    with contextlib.suppress(OSError):  # the status tells it, too
        print(f"{prog}: {text}", file=sys.stderr)
