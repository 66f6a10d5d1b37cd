"""Sizes in words: ``24GB`` (10⁹ bytes each) and ``4000MiB`` (2²⁰ bytes each)."""

from __future__ import annotations

import re

from mbolt_mlx.core.errors import UsageError

UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    UNITS[_letter] = UNITS[f"{_letter}B"] = 1000**_power
    UNITS[f"{_letter}I"] = UNITS[f"{_letter}IB"] = 1024**_power

# More than 30 digits are nobody's size, and some hundred of them no float.
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)")


def parse_size(text: str | int) -> int:
    """Return the bytes that ``text`` means.

    A bare number counts bytes. ``KB``, ``MB``, ``GB``, ``TB`` are powers of 1000 (the ``B`` may be
    left out), ``KiB``, ``MiB``, ``GiB``, ``TiB`` powers of 1024. Case does not matter.

    Raises:
        UsageError: not a size, or not at least one byte.
    """
    shown = text if isinstance(text, int) else repr(text)
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"{shown} is not a size", hint="write 24GB, 4000MiB or a number of bytes")
    number, unit = match[1], UNITS[match[2].upper()]
    # Whole numbers stay exact: a float holds only 53 bits.
    size = int(number) * unit if number.isdigit() else round(float(number) * unit)
    if size < 1:
        raise UsageError(f"{shown} is no space at all", hint="a size is at least one byte")
    return size


def format_size(size: float) -> str:
    """Return ``size`` bytes in decimal units with three digits or so: ``10.6 MB``."""
    if abs(size) < 1000:
        return f"{size:.0f} B" if size == int(size) else f"{size:.1f} B"
    units = ["TB", "GB", "MB", "kB"]
    size /= 1000
    # 999.95 would be shown as 1000.0 and belongs to the next unit.
    while abs(size) >= 999.95 and len(units) > 1:
        units.pop()
        size /= 1000
    return f"{size:.2f} {units[-1]}" if abs(size) < 9.995 else f"{size:.1f} {units[-1]}"
