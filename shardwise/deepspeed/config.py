"""Reading of a DeepSpeed configuration: each key is used, reported as ignored, or an error."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.validate import did_you_mean, short_repr
from shardwise.core.base.warnings import warn_user
from shardwise.deepspeed.schema import ALIASES, BLOCKS, KEYS, NAMES_ELSEWHERE, ConfigBlock, Key, known_names

Source = Mapping[str, Any] | str | os.PathLike[str]
AUTO = "auto"
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_TEXTS = {"true": True, "false": False}


@dataclass
class Report:
    """The keys of a configuration that are used or ignored, by dotted path.

    Attributes:
        used: keys with an effect, or that ask for the default behavior.
        ignored: keys without effect, and the reason.
        notes: further remarks for the user.
    """

    used: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def use(self, path: str) -> None:
        """Report a key as used.

        Args:
            path: its dotted path.
        """
        if path not in self.used:
            self.used.append(path)

    def ignore(self, path: str, reason: str) -> None:
        """Report a key as ignored, even if it was reported as used before.

        Args:
            path: its dotted path.
            reason: why it has no effect.
        """
        if path in self.used:
            self.used.remove(path)
        self.ignored[path] = reason

    def note(self, text: str) -> None:
        """Add a remark.

        Args:
            text: a sentence.
        """
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        ignored = [f"{path} is ignored: {reason}" for path, reason in self.ignored.items()]
        return "\n".join([*ignored, *self.notes])

    def warn(self) -> None:
        """Emit one warning about ignored keys and notes, if there are any."""
        if self.ignored or self.notes:
            warn_user(f"DeepSpeed configuration:\n{self}")


@dataclass(frozen=True)
class Settings:
    """A validated configuration.

    Attributes:
        values: given values by canonical dotted path; see :mod:`shardwise.deepspeed.schema` for defaults and units.
        sections: given blocks, including empty ones.
        findings: the report of the keys.
    """

    values: Mapping[str, Any]
    sections: frozenset[str]
    findings: Report

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path, KEYS[path].default)

    def has(self, path: str) -> bool:
        """Return whether the configuration has a value for ``path``."""
        return path in self.values

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self["zero_optimization.stage"])


@dataclass(frozen=True)
class Batch:
    """``train == micro * accumulation * ranks``, in samples."""

    train: int
    micro: int
    accumulation: int


def load_config(config: Source) -> dict[str, Any]:
    """Return a copy of a configuration as nested dictionaries. The caller's dict is never changed.

    Raises:
        FileNotFoundError, TypeError, ValueError: ``config`` is neither a dict nor a file with one JSON or Hjson object.
    """
    if isinstance(config, Mapping):
        return {str(name): _copy(value) for name, value in config.items()}
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"config={config!r:.80}: give a dict, or the path of a JSON file")
    path = Path(config)
    try:
        tree = _parsed(path.read_text("utf-8"))
    except OSError as error:
        raise FileNotFoundError(
            f"config={str(config)!r:.200} cannot be read ({error.strerror}); give a dict or a JSON file's path"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: its blocks are nested too deeply to be read") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}; give a file with one JSON object, {{...}}")
    return tree


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or of an Hjson text if the package hjson is installed.

    Raises:
        ValueError: the configuration is neither, or a block has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        try:
            import hjson
        except ImportError:
            raise ValueError(f"it is not JSON: {error}. Install the package hjson if it is Hjson") from None
        return hjson.loads(text.lstrip("\ufeff"), object_pairs_hook=_pairs)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} occurs twice in one block of the configuration; remove one of them")
        result[name] = value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _copy(inner) for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_config(config: Source) -> Settings:
    """Read and check a configuration, without changing it.

    A key that is ``"auto"`` gets its documented default; parameters of optimizers and schedulers have none.

    Args:
        config: a dict, or the path of a JSON or Hjson file.

    Raises:
        ValueError: an unknown key (the error names the nearest known one), a value out of range, ``"auto"`` without a
            default, or keys that contradict each other.
        NotImplementedError: a key asks for something that is not available.
        FileNotFoundError, TypeError: ``config`` is not a configuration.
    """
    reader = _Reader()
    reader.read(load_config(config), "")
    values = reader.values
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        raise ValueError(f"fp16.enabled={values['fp16.enabled']} and bf16.enabled=True: enable one of them")
    return Settings(values, frozenset(reader.sections), reader.findings)


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sections: set[str] = set()
        self.findings = Report()

    def read(self, tree: Mapping[str, Any], section: str) -> None:
        for name, value in tree.items():
            if name.startswith(("_", "//", "#")):
                continue  # a comment in JSON
            if not section and "." in name:  # TRL writes fractions for the bucket sizes of its reference model
                self.findings.ignore(name, "DeepSpeed reads no key with a dot in it; give it inside of its block")
                continue
            path = f"{section}.{name}" if section else name
            canonical = ALIASES.get(path, path)
            if canonical != path and canonical.rpartition(".")[2] in tree:
                raise ValueError(f"{path}={short_repr(value)} and {canonical} mean the same; give one of them")
            if canonical == "zero_optimization" and isinstance(value, bool):
                self.findings.note(f"zero_optimization={value} is an old form of stage {int(value)}")
                value = {"stage": int(value)}
            # an older boolean key, which is a block now
            if path.startswith("zero_optimization.cpu_offload") and canonical != path:
                self.findings.note(f"Config parameter {path} is deprecated: give {canonical}={{'device': 'cpu'}}")
                self.findings.use(path)
                on = value not in (None, AUTO) and _convert(path, Key("bool", False), value)
                value = {"device": "cpu"} if on else None
            if canonical in BLOCKS:
                self._block(path, BLOCKS[canonical], value)
            elif canonical in KEYS:
                self._value(path, canonical, value)
            elif any(key.startswith(f"{canonical}.") for key in KEYS):
                self._section(path, canonical, value)
            else:
                raise ValueError(_unknown(path, value, section, known_names(section)))

    def _section(self, path: str, canonical: str, value: Any) -> None:
        if value is None or value is False or value == AUTO:
            return
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{path}={short_repr(value)}: give a block, {{...}}, with {', '.join(known_names(canonical))}"
            )
        self.sections.add(canonical)
        self.read(value, canonical)

    def _block(self, path: str, block: ConfigBlock, value: Any) -> None:
        inner = value if isinstance(value, Mapping) else {}
        if not isinstance(value, Mapping):
            on = _is_on(value, block.off)
        elif block.switch is not None:
            on = _is_on(inner.get(block.switch), block.off)
        else:
            on = any(_is_on(each) for each in inner.values())
        if not on:
            self.findings.use(path)
        elif block.role == "refused":
            raise NotImplementedError(f"{path}={short_repr(value)} is not available; {block.reason}")
        else:
            self.findings.ignore(path, block.reason)

    def _value(self, path: str, canonical: str, value: Any) -> None:
        key = KEYS[canonical]
        if value == AUTO and canonical in ("optimizer.type", "scheduler.type"):
            raise ValueError(f"{path}={value!r} has no default; name one")
        if value is None or value == AUTO:
            self.findings.use(path)
            return
        if canonical == "zero_optimization.stage" and isinstance(value, bool):
            value = int(value)
        value = self._parameters(path, value) if key.kind == "map" else _convert(path, key, value)
        if key.role == "used" or value in key.exact:
            self.findings.use(path)
        elif key.role == "refused":
            raise NotImplementedError(f"{path}={short_repr(value)} is not available; {key.reason}")
        else:
            self.findings.ignore(path, key.reason)
        self.values[canonical] = value
        if canonical == "zero_optimization.stage" and value > 3:
            raise ValueError(f"zero_optimization.stage={value}: give 0, 1, 2 or 3")
        if canonical.endswith("offload_optimizer.ratio") and value > 1:
            raise ValueError(f"{path}={value}: give a fraction in [0, 1]")

    def _parameters(self, path: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}={short_repr(value)}: give a block, {{...}}")
        result = {}
        for name, inner in value.items():
            full = f"{path}.{name}"
            if inner == AUTO:
                inner = _DERIVED.get(full, AUTO)
            if inner == AUTO:
                raise ValueError(f"{full}='auto' has no default; give a value")
            for each in inner if isinstance(inner, list) else [inner]:
                if not math.isfinite(_number(each) or 0.0):
                    raise ValueError(f"{full}={short_repr(inner)}: give finite numbers")
            result[name] = [_plain(each) for each in inner] if isinstance(inner, list) else _plain(inner)
        return result


_DERIVED = {
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": None,  # the optimizer's rate, even if the schedule has its own default
}


def _is_on(value: Any, off: Any = None) -> bool:
    if isinstance(value, str):
        return value.lower() not in ("", AUTO, "false")
    return value if isinstance(value, bool) else value not in (None, 0, off, [], {})


def _unknown(path: str, value: Any, section: str, names: Iterable[str]) -> str:
    name = path.rpartition(".")[2]
    message = f"{path}={short_repr(value)} is not a key of the DeepSpeed configuration"
    if name in NAMES_ELSEWHERE:
        return f"{message}; did you mean {NAMES_ELSEWHERE[name]!r}?"
    inside = [key for key in [*KEYS, *ALIASES] if key.rpartition(".")[2] == name]
    if inside:
        return f"{message}; {name!r} belongs in {inside[0].rpartition('.')[0] or 'the top level'!r}"
    by_name = {key.rpartition(".")[2]: key for key in KEYS}
    known = f"known keys{f' of {section!r}' if section else ''}: {', '.join(names)}"
    hint = did_you_mean(name, names, known)
    for each in difflib.get_close_matches(name, by_name, 1, 0.85):  # perhaps a key of another section
        hint = did_you_mean(name, names, f"did you mean {by_name[each]!r}?", 0.85)
    return f"{message}; {hint}"


def _plain(value: Any) -> Any:
    """Return the number or truth value that a text means; other values are unchanged."""
    number = _number(value) if isinstance(value, str) else None
    return _TEXTS.get(str(value).lower(), value) if number is None else int(number) if number.is_integer() else number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _convert(path: str, key: Key, value: Any) -> Any:
    """Return ``value`` converted to the key's type. Numbers may be strings, and integers may be written as 5e8."""
    if key.kind in ("int", "float"):
        number = _number(value)
        if number == math.inf and path == "steps_per_print" and (isinstance(value, float) or value == "inf"):
            return None  # accelerate's value for "never"
        if number is not None and math.isinf(number):
            raise ValueError(f"{path}={short_repr(value)}: give a finite number")
        if number is None or math.isnan(number) or not (number.is_integer() or key.kind == "float"):
            raise ValueError(
                f"{path}={short_repr(value)}: give {'a whole number' if key.kind == 'int' else 'a number'}"
            )
        if key.minimum is not None and number < key.minimum:
            raise ValueError(f"{path}={short_repr(value)}: give a finite number >= {key.minimum:g}")
        if number > key.maximum:
            raise ValueError(f"{path}={short_repr(value)}: give a number <= {key.maximum:g}")
        if key.kind == "float":
            return number
        return value if isinstance(value, int) else int(number)
    if key.kind == "bool":
        if isinstance(value, str) and value.lower() in _TEXTS:
            return _TEXTS[value.lower()]
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise ValueError(f"{path}={short_repr(value)}: give true or false")
    if key.kind == "dtype":
        name = str(value).lower().removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"{path}={short_repr(value)}: give 'fp32', 'fp16' or 'bf16'")
        return DTYPES[name]
    if key.kind == "list":
        return list(value) if isinstance(value, list | tuple) else value
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{path}={short_repr(value)}: give a string")
    text = os.fspath(value)
    for choice in key.choices:
        if text.lower() == choice.lower():
            return choice
    if key.choices:
        raise ValueError(f"{path}={text!r:.80}: give one of {', '.join(map(repr, key.choices))}")
    return text


def batch_of(settings: Settings, ranks: int) -> Batch | None:
    """Return the batch sizes. Missing sizes are derived as in DeepSpeed. Return ``None`` if no size is given.

    Raises:
        ValueError: their product for ``ranks`` ranks is not ``train_batch_size``.
    """
    train, micro = settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]
    accumulation = settings["gradient_accumulation_steps"]
    if train is None:
        return None if micro is None else Batch(micro * (accumulation or 1) * ranks, micro, accumulation or 1)
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    chosen = {name: size for name, size in sizes.items() if size is not None}
    least = math.prod(chosen.values()) * ranks
    if train % least or (len(chosen) == 2 and train != least):
        product = "".join(f"{name} ({size}) x " for name, size in chosen.items()) + f"{ranks} ranks = {least}"
        raise ValueError(
            f"train_batch_size={train} is not {'' if len(chosen) == 2 else 'a multiple of '}{product}; leave it out, "
            "or give sizes that fit"
        )
    accumulation = accumulation or (train // least if micro else 1)
    micro = micro or train // (ranks * accumulation)
    return Batch(train, micro, accumulation)


# ---- errors that DeepSpeed raises by assert


class AssertedError(ValueError, AssertionError):
    """An invalid argument or call that is an ``AssertionError`` in DeepSpeed; programs may catch it as such."""
