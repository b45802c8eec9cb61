"""Validation of arguments, and values in error messages: for plans, front-ends and the command line.

NaN is never accepted, ``True`` is not a number and ``1`` is not a boolean, infinity is accepted only if it has a
meaning, and sizes that no machine has are rejected. Every error names the argument, its value and valid values.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple

MOST_NUMEL = 2**42
"""Elements of a tensor: 8 TiB in 16 bits."""
MOST_BYTES = 2**62
MOST_COUNT = 2**31 - 1
"""Steps, ranks, samples, buffers and the like."""
MOST_RANKS = 2**12
"""Ranks that one host starts."""
MOST_STEP = 2**53
"""The largest integer that is exact in every JSON implementation."""
MOST_SEED = 2**63 - 1
"""The largest seed that torch's generators accept, with room to add an epoch or a rank."""
MOST_NAMES = 6
"""Names that a message lists."""
MOST_SCALE = 2.0**126
"""The largest loss scale: fp32 can hold it and double it once."""
LONG = 200  # bits


class Names(NamedTuple):
    """Names of the sharded objects in error messages. Each interface gives its own.

    Attributes:
        module: the sharded module, which has full states and ``gathered()``.
        step: the call that updates the parameters.
        save: a call that saves or returns the full state.
    """

    module: str
    step: str
    save: str


SESSION = Names("session.module", "session.optimizer.step()", "session.checkpoints.save(directory)")


class UnknownModelError(ValueError, NotImplementedError):
    """No description of how to shard, divide or cut this model is known. The message says how to give one.

    It is also a ``NotImplementedError``, which programs written for ColossalAI expect of a model without a policy.
    """


def short_repr(value: object) -> str:
    """Return ``value`` for an error message, in one line of 80 characters at most."""
    if isinstance(value, int) and value.bit_length() > LONG:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} and more"
    return f"{' '.join(map(str.strip, repr(value).splitlines())):.80}"


def printable(text: str) -> str:
    """Return ``text`` with escapes for all characters that are not printable, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def in_a_line(name: str) -> str:
    """Return ``name`` for a message of one line: as :func:`printable`, with line ends escaped too."""
    return printable(name).replace("\n", "\\n")


def class_name(kind: type) -> str:
    """Return the full name of a class, as in settings: ``"torch.nn.modules.linear.Linear"``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """Return a hint for an error about an unknown ``name``: the nearest of the ``known`` with the same first or last
    letter, or else ``otherwise``. Case does not count."""
    name, by_lower = name.lower(), {each.lower(): each for each in known}
    near = [n for n in difflib.get_close_matches(name, by_lower, 3, cutoff) if n[0] == name[0] or n[-1] == name[-1]]
    return f"did you mean {by_lower[near[0]]!r}?" if near else otherwise


def names_text(names: Sequence[str], separator: str = ", ") -> str:
    """Return a list of names for a message: the first few, and how many more there are."""
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return separator.join([*names[:MOST_NAMES], *more])


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds. ``message`` has the value, and describes a valid
    one."""
    if not condition:
        raise ValueError(message)


def integer(
    name: str, value: object, least: int = 0, most: int = MOST_COUNT, what: str = "a whole number", floats: bool = False
) -> int:
    """Return ``value``, an integer in [``least``, ``most``].

    Args:
        name: name of the argument.
        value: the user's value.
        least, most: inclusive bounds.
        what: what the number counts, for the message.
        floats: accept 8.0 for 8, for arguments that people write as 5e8.

    Raises:
        TypeError: ``value`` is not an integer (``True`` and fractions are not).
        ValueError: the number is out of range.
    """
    if floats and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        kind = "" if what == "a whole number" else ", a whole number"
        raise TypeError(f"{name}={short_repr(value)}: give {what} >= {least}{kind}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name}={short_repr(number)}: give {what} >= {least}")
    if number > most:
        raise ValueError(f"{name}={short_repr(number)}: give {what} <= {most}")
    return number


def number(name: str, value: object, within: str, what: str = "") -> float:
    """Return ``value``, a real number in an interval.

    Args:
        name: name of the argument.
        value: the user's value.
        within: the interval as text: ``"[0, 1]"``, ``"(0, inf)"``; ``"inf]"`` accepts infinity.
        what: description of a valid value, for the message; by default a number within the bounds.

    Raises:
        TypeError: ``value`` is not a number (``True`` is not).
        ValueError: the number is NaN, or outside the interval.
    """
    what = what or f"a number {_words(within)}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={short_repr(value)}: give {what}")
    low, high = map(float, within[1:-1].split(","))
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf if value > 0.0 else -math.inf  # type: ignore[operator]  # an integer beyond all floats
    above = converted >= low if within[0] == "[" else converted > low
    below = converted <= high if within[-1] == "]" else converted < high
    if not (above and below):  # both are False for NaN
        raise ValueError(f"{name}={short_repr(value)}: give {what}")
    return converted


def _words(within: str) -> str:
    low, high = map(float, within[1:-1].split(","))
    if within == "(-inf, inf)":
        return "that is finite"
    words = [] if low == -math.inf else [f"{'>=' if within[0] == '[' else '>'} {low:g}"]
    if high != math.inf:
        words.append(f"{'<=' if within[-1] == ']' else '<'} {high:g}")
    return " and ".join(words) + (", or math.inf" if within.endswith("inf]") else "")


def fraction(name: str, value: object) -> float:
    """Return ``value``, a number in [0, 1].

    Raises:
        TypeError, ValueError: see :func:`number`.
    """
    return number(name, value, "[0, 1]", "a share in [0, 1]")


def boolean(name: str, value: object) -> bool:
    """Return ``value``, True or False.

    Raises:
        TypeError: the value is not a bool: ``"false"`` would count as true, and so would 2.
    """
    check_type(name, value, bool, "True or False")
    return bool(value)


def check_flags(settings: Any) -> None:
    """Check the fields of a dataclass that have a boolean as their default.

    Raises:
        TypeError: a value is not a boolean.
    """
    for each in fields(settings):
        if isinstance(each.default, bool):
            boolean(each.name, getattr(settings, each.name))


def as_path(name: str, value: object, what: str = "a path") -> str:
    """Return ``value``, a path, as text.

    Raises:
        TypeError: ``value`` is not a path; ``what`` is what to give.
        ValueError: ``value`` is a URL.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise TypeError(f"{name}={short_repr(value)}: give {what}, as str or pathlib.Path")
    if path.partition("/")[0][2:].endswith(":"):  # pathlib makes s3:/name of s3://name
        raise ValueError(f"{name}={short_repr(value)} is a URL: give a local path, and copy it (docs/checkpoints.md)")
    return path


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise ``TypeError`` unless ``value`` is of type ``kind``. ``what`` describes a valid value."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={short_repr(value)}: give {what}")


def check_tensor(name: str, value: object, what: str) -> None:
    """Raise ``TypeError`` unless a backward pass can begin from ``value``. ``what`` describes a valid value."""
    if not hasattr(value, "requires_grad") or not hasattr(value, "dtype"):
        raise TypeError(f"{name}={short_repr(value)}: give {what}")


def as_params(value: Any) -> Any:
    """Return ``value``, what an optimizer takes for its parameters.

    Raises:
        TypeError: the value is not iterable.
    """
    check_type("params", value, Iterable, "parameters such as model.parameters(), or groups of them")
    return value


def as_mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    """Return ``value``, a mapping.

    Raises:
        TypeError: the value is not a mapping. The message asks for ``what``.
    """
    check_type(name, value, Mapping, what)
    return value  # type: ignore[no-any-return]


def refuse(argument: str, value: object, instead: str) -> None:
    """Raise ``NotImplementedError`` that names the argument, its value and what to do instead."""
    raise NotImplementedError(f"{argument}={value!r} is not available yet; {instead}")
