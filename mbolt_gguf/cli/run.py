"""``mbolt-gguf run``: start llama-cli of the patched llama.cpp."""

from __future__ import annotations

import argparse

from mbolt_gguf.cli import launching

PROGRAM = "llama-cli"
HELP = "chat with a model in llama-cli, its experts streamed"
DESCRIPTION = """\
Start llama-cli, as `mbolt-gguf build-llama` built it, so that experts are read from the drive when
they are chosen. A prefetch map is made when it is missing or stale; weights are not repacked,
experts stay on the processor's side, and no warm-up reads the whole model. Flags of llama-cli
after -- win over ours. The chat goes on after the answer to -p, until /exit or Ctrl-C; with -st it
ends there.

  mbolt-gguf run model.gguf -- -p "Once upon a time" -n 64"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    launching.add_options(parser, PROGRAM)


def run(args: argparse.Namespace) -> int:
    """Become llama-cli; does not return."""
    return launching.start(PROGRAM, args)
