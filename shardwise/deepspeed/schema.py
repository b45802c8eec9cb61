"""All keys of a DeepSpeed configuration by dotted path, each with its type and whether it is used, ignored or refused.

``schema.toml`` is the table; its first lines say what its columns mean.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.core.base.validate import MOST_COUNT, MOST_NUMEL, MOST_SCALE
from shardwise.plan.tiers import MOST_BLOCK_BYTES, MOST_QUEUED, MOST_THREADS

Kind = Literal["int", "float", "bool", "text", "map", "list", "dtype"]
Role = Literal["used", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
        kind: accepted type.
        default: value of an absent key, of ``null`` and of an unresolved ``"auto"``.
        role: ``used``; ``ignored`` with ``reason``; ``refused``, where ``reason`` says what to do instead.
        reason: see ``role``.
        exact: values that ask for the default behavior, so that the key is neither reported nor refused.
        minimum: smallest accepted number.
        choices: accepted strings.
        stage: the first ZeRO stage at which the key has an effect.
        maximum: largest accepted number. Thresholds and limits may be larger than any model.
    """

    kind: Kind
    default: Any
    role: Role = "used"
    reason: str = ""
    exact: tuple[Any, ...] = ()
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    stage: int = 0
    maximum: float = 2.0**63


@dataclass(frozen=True)
class ConfigBlock:
    """A block of keys with one role.

    Attributes:
        role, reason: as for :class:`Key`.
        switch: the inner key that enables it; ``None``: any inner value that is not false, null or empty.
        off: a value of the switch that disables it, in addition to false, 0 and null.
    """

    role: Role
    reason: str
    switch: str | None = "enabled"
    off: Any = None


LIMITS: dict[str, float] = {
    "count": MOST_COUNT,
    "numel": MOST_NUMEL,
    "scale": MOST_SCALE,
    "block_bytes": MOST_BLOCK_BYTES,
    "queued": MOST_QUEUED,
    "threads": MOST_THREADS,
}
"""The limits that the table names."""


def _role(entry: dict[str, Any]) -> tuple[Role, str]:
    """Take role and reason out of an entry."""
    roles: tuple[Role, ...] = ("ignored", "refused")
    return next(((role, entry.pop(role)) for role in roles if role in entry), ("used", ""))


def _key(entry: dict[str, Any]) -> Key:
    role, reason = _role(entry)
    maximum, default = entry.pop("maximum", 2.0**63), entry.pop("default", None)
    exact = (default,) if role == "refused" else tuple(entry.pop("exact", ()))
    choices = tuple(entry.pop("choices", ()))
    limit = LIMITS[maximum] if isinstance(maximum, str) else maximum
    return Key(default=default, role=role, reason=reason, exact=exact, choices=choices, maximum=limit, **entry)


def _block(entry: dict[str, Any]) -> ConfigBlock:
    role, reason = _role(entry)
    return ConfigBlock(role, reason, entry.get("switch", "enabled") or None, entry.get("off"))


_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SECTIONS: dict[str, dict[str, Key]] = {
    section: {name: _key(entry) for name, entry in keys.items()} for section, keys in _TABLE["keys"].items()
}
"""The keys of each block by its path; ``""`` is the top level."""

KEYS: dict[str, Key] = {
    f"{section}.{name}".lstrip("."): key for section, keys in SECTIONS.items() for name, key in keys.items()
}
ALIASES: dict[str, str] = _TABLE["aliases"]
"""Other names of keys and sections: short names, and names of earlier releases."""
BLOCKS: dict[str, ConfigBlock] = {name: _block(entry) for name, entry in _TABLE["blocks"].items()}
NAMES_ELSEWHERE: dict[str, str] = {name: key for key, names in _TABLE["elsewhere"].items() for name in names}
"""Keys by the names of other libraries' options."""
GETTERS: dict[str, str] = _TABLE["getters"]
"""Keys by the names of methods of DeepSpeed's engine."""
GETTER_PREFIXES: dict[str, list[str]] = _TABLE["getter_prefixes"]
"""By the prefix of a getter's name: possible prefixes of its key."""
ABSENT: dict[str, str] = {name: advice for advice, names in _TABLE["absent"].items() for name in names}
"""Attributes of DeepSpeed's engine that ours does not have, with the advice that the error gives."""


def known_names(section: str) -> list[str]:
    """Return the allowed names in ``section`` (``""``: the top level), including sections and blocks."""
    prefix = f"{section}." if section else ""
    paths = [*KEYS, *SECTIONS, *BLOCKS, *ALIASES]
    names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path != section]
    return list(dict.fromkeys(name for name in names if name and "." not in name))
