"""What somebody gave, checked in one place: by plans, by every front-end, on the command line.

No NaN passes, ``True`` is no number and ``1`` no switch, infinity is taken only where it means something, and a size
that no machine has is a slip of the keyboard. Every error has the argument's name and value, and what to give.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

__all__ = [
    "MOST_BYTES",
    "MOST_COUNT",
    "MOST_NUMEL",
    "MOST_RANKS",
    "MOST_SCALE",
    "MOST_SEED",
    "MOST_STEP",
    "UnknownModelError",
    "as_kind",
    "as_mapping",
    "as_params",
    "as_path",
    "as_tensor",
    "number",
    "refuse",
    "require",
    "share",
    "shown",
    "switch",
    "whole",
]

MOST_NUMEL = 2**42
"""Elements: 8 TiB in 16 bits."""
MOST_BYTES = 2**62
MOST_COUNT = 2**31 - 1
"""Of steps, ranks, samples, buffers and the like."""
MOST_RANKS = 2**12
"""That one host starts."""
MOST_STEP = 2**53
"""What JSON holds exactly everywhere."""
MOST_SEED = 2**63 - 1
"""What torch's generators take, with room to add an epoch or a rank to it."""
MOST_SCALE = 2.0**126
"""Of a loss scale: what fp32 can hold, and grow once more."""
LONG = 200  # bits


class UnknownModelError(ValueError, NotImplementedError):
    """A model that nothing is known of: how it is cut, divided into stages, or its sequences are. The message says how
    to describe it.

    It is a ``NotImplementedError`` as well, which programs written for ColossalAI expect of a model without a policy.
    """


def shown(value: object) -> str:
    """A value as an error message has it, whatever it is."""
    if isinstance(value, int) and value.bit_length() > LONG:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} and more"
    return f"{value!r:.80}"


def require(condition: bool, message: str) -> None:
    """Raises:
    ValueError: ``condition`` is false; ``message`` has the value and what to give.
    """
    if not condition:
        raise ValueError(message)


def whole(
    name: str,
    value: object,
    least: int = 0,
    most: int = MOST_COUNT,
    what: str = "a whole number",
    floats: bool = False,
) -> int:
    """``value``, a whole number from ``least`` to ``most``.

    Args:
        name: of the argument.
        value: what was given for it.
        least, most: bounds, which are taken.
        what: what the number counts, for the message.
        floats: take 8.0 for 8, as where people write 5e8.

    Raises:
        TypeError: it is something else, ``True`` and fractions included.
        ValueError: it is out of range.
    """
    if floats and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        kind = "" if what == "a whole number" else ", a whole number"
        raise TypeError(f"{name}={shown(value)}: give {what} >= {least}{kind}")
    found = int(value)
    if found < least:
        raise ValueError(f"{name}={shown(found)}: give {what} >= {least}")
    if found > most:
        raise ValueError(f"{name}={shown(found)}: give {what} <= {most}")
    return found


def number(name: str, value: object, within: str, what: str = "") -> float:
    """``value``, a finite number in an interval.

    Args:
        name: of the argument.
        value: what was given for it.
        within: the interval as it is written: ``"[0, 1]"``, ``"(0, inf)"``; ``"inf]"`` takes infinity.
        what: what to give, for the message; by default a number within the bounds.

    Raises:
        TypeError: it is no number; ``True`` is none.
        ValueError: it is NaN, or outside.
    """
    what = what or f"a number {_words(within)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown(value)}: give {what}")
    low, high = map(float, within[1:-1].split(","))
    try:
        found = float(value)
    except OverflowError:
        found = math.inf if value > 0.0 else -math.inf  # type: ignore[operator]  # a whole number beyond all floats
    above = found >= low if within[0] == "[" else found > low
    below = found <= high if within[-1] == "]" else found < high
    if not (above and below):  # both are False for NaN
        raise ValueError(f"{name}={shown(value)}: give {what}")
    return found


def _words(within: str) -> str:
    low, high = map(float, within[1:-1].split(","))
    if within == "(-inf, inf)":
        return "that is finite"
    words = [] if low == -math.inf else [f"{'>=' if within[0] == '[' else '>'} {low:g}"]
    if high != math.inf:
        words.append(f"{'<=' if within[-1] == ']' else '<'} {high:g}")
    return " and ".join(words) + (", or math.inf" if within.endswith("inf]") else "")


def share(name: str, value: object) -> float:
    """``value``, in [0, 1].

    Raises:
        TypeError, ValueError: see :func:`number`.
    """
    return number(name, value, "[0, 1]", "a share in [0, 1]")


def as_path(name: str, value: object, what: str = "a path") -> str:
    """``value``, a path as text.

    Raises:
        TypeError: it is none; ``what`` is what to give.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(found := os.fspath(value), str):
        raise TypeError(f"{name}={shown(value)}: give {what}, as str or pathlib.Path")
    return found


def as_kind(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raises:
    TypeError: ``value`` is not of ``kind``; ``what`` is what to give.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}={shown(value)}: give {what}")


def as_params(value: Any) -> Any:
    """``value``, what an optimizer takes for its parameters.

    Raises:
        TypeError: it cannot be iterated over.
    """
    as_kind("params", value, Iterable, "parameters such as model.parameters(), or groups of them")
    return value


def as_mapping(name: str, value: object, what: str) -> Mapping[Any, Any]:
    """``value``, a dict or the like.

    Raises:
        TypeError: it is none; ``what`` is what to give.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={shown(value)}: give {what}")
    return value


def as_tensor(name: str, value: object, what: str) -> None:
    """Raises:
    TypeError: ``value`` is nothing that a backward pass can begin from; ``what`` is what to give.
    """
    if not hasattr(value, "requires_grad") or not hasattr(value, "dtype"):
        raise TypeError(f"{name}={shown(value)}: give {what}")


def refuse(argument: str, value: object, instead: str) -> None:
    """Raises:
    NotImplementedError: naming the argument, its value and what to do.
    """
    raise NotImplementedError(f"{argument}={value!r} is not available yet; {instead}")


def switch(name: str, value: object) -> bool:
    """``value``, True or False.

    Raises:
        TypeError: it is something else; ``"false"`` would be true, and so would 2.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)}: give True or False")
    return value
