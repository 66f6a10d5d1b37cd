"""``mbolt-mlx support`` and the README's table say what the tests of this folder run.

After a change, write both anew with ``python -m tests.engine.test_support``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mbolt_mlx.cli import main
from mbolt_mlx.cli.support import DATA, remarks, row
from tests.engine import architectures, formats, quantised, raw, refused

ROOT = Path(__file__).resolve().parents[2]
START, END = "<!-- support: written by tests/engine/test_support.py -->", "<!-- support: end -->"
NAMES = {
    "single": "one tensor an expert",
    quantised.SINGLE: "one quantised an expert",
    "fused": "gate and up fused",
    "transposed": "fused, transposed",
    "whole": "a whole model's names",
    "whole, transposed": "the same with a whole model's names",
    "one more": "shared expert in the stack",
    "prefix": "other names",
    "prefixed": "other names",
    "renamed": "other names",
}
COMPUTED = raw.COMPUTED | quantised.COMPUTED
REASONS = {
    **architectures.REASONS,
    **dict.fromkeys(
        architectures.METAL_ONLY,
        "its attention runs on Metal only, so on the CPU its experts were compared layer by layer; "
        "nvfp4 with a scale for each expert, as it is published, needs a GPU",
    ),
}


def matrix() -> list[dict[str, Any]]:
    """What the parametrised tests cover."""
    return [entry(module) for module in sorted(architectures.CONFIGS, key=str.casefold)]


def entry(module: str) -> dict[str, Any]:
    never = module in architectures.REFUSED
    names = ["converted", *raw.RAW.get(module, {})]
    names += [layout for owner, layout in quantised.MAKERS if owner == module]
    how = {NAMES.get(n, n): "side-file" if n in COMPUTED else "files" for n in names}
    no = [layout for owner, layout in refused.REFUSED if owner == module]
    how |= {NAMES.get(n, n): "refused" for n in no}
    return {
        "architecture": module,
        "status": "refused" if never else "supported",
        "formats": [] if never else formats.NAMES,
        "layouts": {} if never else how,
        "reason": REASONS.get(module),
    }


def table() -> str:
    """The README's section."""
    lines = ["| architecture | status | read as they lie | after `coalesce` |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row(e))} |" for e in matrix()]
    notes = [f"- {line}." for line in remarks(matrix())]
    return "\n".join([START, *lines, "", *notes, END])


def test_the_command_says_what_is_tested(capsys) -> None:
    assert main.main(["support", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == matrix()


def test_the_command_prints_a_line_for_each(capsys) -> None:
    assert main.main(["support"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["architecture", "status"]
    found = {line.split()[0] for line in lines[1 : len(matrix()) + 1]}
    assert found == set(architectures.CONFIGS)


def test_the_readme_says_what_is_tested() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = text.index(START), text.index(END) + len(END)
    assert text[start:end] == table()


def write() -> None:
    """Write the data and the README's section."""
    data = json.dumps(matrix(), indent=1) + "\n"
    (ROOT / DATA).write_text(data, encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    start, end = text.index(START), text.index(END) + len(END)
    readme.write_text(text[:start] + table() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    write()
