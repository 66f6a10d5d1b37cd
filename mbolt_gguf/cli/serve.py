"""``mbolt-gguf serve``: start llama-server of the patched llama.cpp."""

from __future__ import annotations

import argparse

from mbolt_gguf.cli import launching

PROGRAM = "llama-server"
HELP = "serve a model with llama-server, its experts streamed"
DESCRIPTION = """\
Start llama-server, as `mbolt-gguf build-llama` built it, so that experts are read from the drive
when they are chosen. A prefetch map is made when it is missing or stale; weights are not repacked,
experts stay on the processor's side, and no warm-up reads the whole model. Flags of llama-server
after -- win over ours.

  mbolt-gguf serve model.gguf -- --port 8080"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    launching.add_options(parser, PROGRAM)


def run(args: argparse.Namespace) -> int:
    """Become llama-server; does not return."""
    return launching.start(PROGRAM, args)
