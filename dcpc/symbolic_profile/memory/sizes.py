"""Bytes as a person writes them: 80GB, 512MiB, 1.5e9."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*((?:[kmgt]i?)?b)?", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("kmgt", 1)}


def bytes_of(text: str) -> int | float | None:
    """Returns the number of bytes that a text stands for; None where it stands for none.

    Args:
        text: a number, alone or with B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB
            (powers of 1024), in upper or lower case.

    Returns:
        An integer with a unit, else a float, which may be meant as a share.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = float(found[1]), (found[2] or "").lower()
    if not unit or number == float("inf"):
        return number
    scale: int = (1024 if "i" in unit else 1000) ** _POWERS.get(unit[0], 0)
    return round(number * scale)
