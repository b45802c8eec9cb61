"""Sizes in bytes as text, and classes of similar sizes that can share memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.core.base.validate import MOST_BYTES, integer

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
FACTORS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{middle}B": (1024 if middle else 1000) ** power
    for power, letter in enumerate("KMGTP", start=1)
    for middle in ("", "i")
}
BY_LOWER_CASE = {unit.lower(): factor for unit, factor in FACTORS.items()}


def parse_size(text: str) -> int:
    """Return a size with a unit in bytes, rounded down.

    Args:
        text: a number with KiB, MiB, GiB and so on (powers of 1024), with KB, MB, GB and so on (powers of 1000), or
            without a unit.

    Raises:
        ValueError: another text, less than one byte, or more than any machine has.

    Examples:
        >>> shardwise.parse_size("1.5 GiB")
        1610612736
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", text.strip().lower())
    factor = BY_LOWER_CASE.get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{text!r} is not a size; give a number of bytes, or one with a unit such as 64MiB, 1.5GiB, 24GB"
        )
    # Whole numbers stay exact beyond 2^53.
    size = int(match[1]) * factor if match[1].isdecimal() else math.floor(float(match[1]) * factor)
    if size > MOST_BYTES:
        raise ValueError(f"{text[:80]!r} is more than {size_text(MOST_BYTES)}; give a size that a machine can have")
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte; give a positive size such as 64MiB")
    return size


def device_bytes(device_memory: int | str | None) -> int | None:
    """Return a ``device_memory`` argument in bytes; ``None`` means no limit.

    Raises:
        ValueError: less than one byte, or a text that is not a size.
    """
    if device_memory is None:
        return None
    if not isinstance(device_memory, str):
        return integer("device_memory", device_memory, 1, MOST_BYTES, "bytes, or a text such as '64MiB',")
    try:
        return parse_size(device_memory)
    except ValueError as error:
        raise ValueError(f"device_memory={device_memory!r:.80}: {error}") from None


def size_text(size_bytes: float) -> str:
    """Return a number of bytes as text with at most four digits, never rounded up to 1024 of a unit.

    Args:
        size_bytes: the number of bytes.

    Examples:
        >>> shardwise.size_text(1536)
        '1.5 KiB'
    """
    value, unit = float(size_bytes), 0
    while abs(value) >= 999.95 and unit < len(BINARY) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{value:.0f} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    shown = f"{value:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {BINARY[unit]}"


def size_classes(sizes: Sequence[int]) -> list[list[int]]:
    """Return indices into ``sizes``, largest first, in classes of sizes above half of the largest."""
    classes: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        if not classes or 2 * sizes[place] <= sizes[classes[-1][0]]:
            classes.append([])
        classes[-1].append(place)
    return classes
