"""The JSON state of a checkpoint has the form that its readers rely on, checked before anything is changed.

What docs/checkpoint-format.md says of each entry, no more: values that only the user's own objects read are not looked
into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.core.checkpoint.bounds import checked_tree
from shardwise.core.checkpoint.source import CheckpointDamage

__all__ = ["check_state"]

MOST_VALUES = 1 << 26


def check_state(state: object, where: object) -> None:
    """Whether ``state`` is the state of a checkpoint, as far as it says anything.

    Raises:
        CheckpointDamage: an entry has another form; it is named.
    """
    if not isinstance(state, Mapping):
        raise CheckpointDamage(f"{where}: its state is a {type(state).__name__} and not an object; load another copy")
    checked_tree(state, MOST_VALUES, f"{where}: its state")
    for key, value in state.items():
        if not _is_text(key):
            raise CheckpointDamage(f"{where}: its state has the key {key!r:.80}; load another copy")
        test = _FORMS.get(key)
        if test is not None and not test(value):
            raise CheckpointDamage(f"{where}: {key} of its state is {_shown(value)}; load another copy")


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__} of another form"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**63)


def _texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(key) and _is_text(each) for key, each in value.items())


def _by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(key) for key in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_places(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**31 for each in value)


def _scaler(value: object) -> bool:
    if value is None:
        return True
    keys = ("scale", "overflows", "good_steps")
    numbers = _by_name(value) and all(type(value.get(key)) in (int, float) for key in keys)  # type: ignore[attr-defined]
    return numbers and 0 < value["scale"] < float("inf") and all(0 <= value[k] < 2**63 for k in keys[1:])  # type: ignore[index]


def _optimizer(value: object) -> bool:
    if not _by_name(value):
        return False
    entry: Mapping[str, Any] = value  # type: ignore[assignment]
    groups, keys, small = entry.get("groups", []), entry.get("keys", []), entry.get("small", {})
    return (
        _is_text(entry.get("class", ""))
        and isinstance(groups, list)
        and all(_group(group) for group in groups)
        and isinstance(keys, list)
        and all(_is_text(key) for key in keys)
        and _by_name(small)
        and all(_by_name(each) for each in small.values())
    )


def _group(value: object) -> bool:
    if not _by_name(value):
        return False
    entry: Mapping[str, Any] = value  # type: ignore[assignment]
    params = entry.get("params")
    return isinstance(params, list) and all(_is_text(name) for name in params)


_FORMS: dict[str, Callable[[object], bool]] = {
    "step": _is_count,
    "updates": _is_count,
    "aliases": _texts,
    "compute_dtype": _texts,
    "optimizers": lambda value: isinstance(value, list) and all(_optimizer(each) for each in value),
    "scaler": _scaler,
    "lr_schedulers": _is_list,
    "lr_scheduler_classes": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "rng": _is_list,
    "data_position": _is_list,
    "data_rank": _is_places,
    "world": _by_name,
    "buffers": lambda value: isinstance(value, list) and all(_texts(each) for each in value),
    "extra": _by_name,
    "config": _by_name,
    "generation_config": _by_name,
    "vocabulary": lambda value: (
        _by_name(value)
        and _is_count(value.get("size"))  # type: ignore[attr-defined]
        and isinstance(names := value.get("embeddings"), list)  # type: ignore[attr-defined]
        and all(map(_is_text, names))
    ),
    "adapters": lambda value: _by_name(value) and all(_by_name(each) for each in value.values()),  # type: ignore[attr-defined]
}
