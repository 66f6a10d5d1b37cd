"""``mbolt-mlx COMMAND …``: find the command, run it, turn errors into one line and a status.

Status 0: done. 1: a check failed. 2: wrong usage or input. 130: Ctrl-C. 141: the reader of stdout
went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from mbolt_mlx import __version__
from mbolt_mlx.core.errors import MboltError, UsageError

PROG = "mbolt-mlx"

# A command is a module with HELP, configure(parser) and run(args) -> status. It is imported only
# when it is used, and imports MLX no earlier than in configure.
COMMANDS = {
    "generate": "mbolt_mlx.cli.generate",
    "coalesce": "mbolt_mlx.cli.coalesce",
    "verify": "mbolt_mlx.cli.verify",
    "inspect": "mbolt_mlx.cli.inspect",
    "bench": "mbolt_mlx.cli.bench",
    "models": "mbolt_mlx.cli.models",
    "support": "mbolt_mlx.cli.support",
    "plan": "mbolt_mlx.cli.plan",
    "probe": "mbolt_mlx.cli.probe",
    "trace-stats": "mbolt_mlx.cli.trace_stats",
    "cluster": "mbolt_mlx.cli.cluster",
    "profile": "mbolt_mlx.cli.profile",
    "simulate": "mbolt_mlx.cli.simulate",
    "gate": "mbolt_mlx.cli.gate",
    "plot": "mbolt_mlx.cli.plot",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are our errors: one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        _log_to_stderr()
        status = _dispatch(argv)
        sys.stdout.flush()
        return status
    except SystemExit as done:  # argparse, after --help and --version
        return done.code if isinstance(done.code, int) else 2
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        _say("interrupted")
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MboltError as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = " ".join(str(error).split())
        _say(f"error: unexpected {type(error).__name__}: {text}; --debug shows where")
        return 2


def _dispatch(argv: list[str]) -> int:
    parser = _top_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.epilog = _list_commands()
        parser.print_help(sys.stderr)
        return 2
    if args.command not in COMMANDS:
        close = difflib.get_close_matches(args.command, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {args.command!r}", hint=hint)
    module = importlib.import_module(COMMANDS[args.command])
    command = Parser(prog=f"{PROG} {args.command}", description=_sentence(module.HELP))
    module.configure(command)
    _add_debug(command)
    return module.run(command.parse_args(args.rest))


def _top_parser() -> Parser:
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [--version] [--debug] COMMAND …",
        description="Run mixture-of-experts models that are bigger than memory, on MLX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this and exit")
    parser.add_argument(
        "--version",
        action="version",
        version=f"{PROG} {__version__}",
        help="show the version and exit",
    )
    _add_debug(parser)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


class _Help(argparse.Action):
    """Lists the commands too, for which it imports them all."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parser.epilog = _list_commands()
        parser.print_help()
        parser.exit()


def _list_commands() -> str:
    lines = ["commands:"]
    for name, path in COMMANDS.items():
        module: ModuleType = importlib.import_module(path)
        lines.append(f"  {name:<12} {module.HELP}")
    lines.append(f"\n`{PROG} COMMAND --help` shows a command's options.")
    return "\n".join(lines)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{PROG}: {level}{text}"


def _log_to_stderr() -> None:
    """Show what our own library notes the way errors are shown."""
    logger = logging.getLogger("mbolt_mlx")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
