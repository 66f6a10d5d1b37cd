"""Rewriters that a test starts one after the other, and kills at any moment."""

from __future__ import annotations

import os
import subprocess
import sys


class Rewriters:
    """A process that forks a rewriter at each ``go``, so that its imports are paid for once.

    Args:
        script: reads lines from stdin; prints a child's process id, then its exit status.
        arguments: what the script finds in ``sys.argv``.
    """

    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip

    def start(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def status(self):
        return int(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)
