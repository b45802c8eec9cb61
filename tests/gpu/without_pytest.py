"""The part of pytest that the tests in this folder use, for machines where it is not installed.

:func:`install` puts a module of that name in its place; :func:`run` collects and runs. Fixtures (also of a session,
with parameters, with ``yield``), ``parametrize``, ``gpus`` and ``approx`` mean what they do there; nothing else is
here, and asking for it is an AttributeError that says so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpu.choice import Choice
from gpu.records import Records

__all__ = ["collect", "install", "run"]


@dataclass(frozen=True)
class _Mark:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        vars(function).setdefault("marks", []).append(self)
        return function


class _Marks:
    def __getattr__(self, name: str) -> Callable[..., _Mark]:
        return lambda *args, **kwargs: _Mark(name, args, kwargs)


@dataclass(frozen=True)
class _Fixture:
    make: Callable[..., Any]
    scope: str
    params: tuple[Any, ...]
    ids: tuple[str, ...]


def _fixture(scope: str = "function", params: Sequence[Any] = (), ids: Sequence[str] = ()) -> Any:
    return lambda make: _Fixture(make, scope, tuple(params), tuple(ids) or tuple(map(str, params)))


class _Approx:
    """Equal within ``rel`` of what is expected (1e-6) or 1e-12; never to NaN."""

    def __init__(self, expected: Any, rel: float = 1e-6) -> None:
        self.expected, self.rel = expected, rel

    def __eq__(self, found: object) -> bool:
        return _close(found, self.expected, self.rel)

    def __repr__(self) -> str:
        return f"{self.expected!r} within {self.rel:g} of it"


def _close(found: Any, expected: Any, rel: float) -> bool:
    if isinstance(expected, Mapping):
        same = isinstance(found, Mapping) and found.keys() == expected.keys()
        return same and all(_close(found[key], value, rel) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        same = isinstance(found, list | tuple) and len(found) == len(expected)
        return same and all(_close(f, e, rel) for f, e in zip(found, expected, strict=True))
    if expected is None or isinstance(expected, str | bool) or found is None:
        return bool(found == expected)
    if math.isinf(expected) or math.isinf(found):
        return bool(found == expected)
    return bool(abs(found - expected) <= max(rel * abs(expected), 1e-12))


class _PytestHere(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"pytest.{name}: not among what tests/gpu/without_pytest.py has; add it there, or install pytest"
        )


def install() -> None:
    """``import pytest`` gives this from here on."""
    module = _PytestHere("pytest")
    for name, value in {"mark": _Marks(), "fixture": _fixture, "approx": _Approx}.items():
        setattr(module, name, value)
    sys.modules["pytest"] = module


class _Config:
    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def getoption(self, name: str, default: str = "") -> str:
        return self._device_type if name == "--gpu-device" else default


@dataclass(frozen=True)
class _Request:
    config: _Config
    param: Any
    getfixturevalue: Callable[[str], Any]


@dataclass
class _Case:
    """One call of one test: what ``parametrize`` gave, and which parameter of which fixture."""

    name: str
    function: Callable[..., Any]
    values: dict[str, Any]
    params: dict[str, Any]
    marks: list[_Mark]


def _label(value: Any, index: int, name: str) -> str:
    plain = value is None or isinstance(value, str | int | float | bool)
    return str(value) if plain else f"{name}{index}"


def _rows(mark: _Mark) -> list[tuple[str, dict[str, Any]]]:
    """What one ``parametrize`` gives, with ids."""
    names = mark.args[0] if not isinstance(mark.args[0], str) else [n.strip() for n in mark.args[0].split(",")]
    rows = list(mark.args[1])
    ids = mark.kwargs.get("ids")
    found = []
    for index, row in enumerate(rows):
        values = dict(zip(names, row, strict=True)) if len(names) > 1 else {names[0]: row}
        if ids is None:
            text = "-".join(_label(value, index, name) for name, value in values.items())
        elif callable(ids):
            text = "-".join(str(ids(value)) for value in values.values())
        else:
            text = str(ids[index])
        found.append((text, values))
    return found


@dataclass
class _Runner:
    device_type: str
    fixtures: dict[str, _Fixture]
    session: dict[str, Any] = field(default_factory=dict)
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def cases(self, name: str, function: Callable[..., Any]) -> Iterator[_Case]:
        """Every combination; the parameters nearest to the function vary slowest, as in pytest."""
        marks: list[_Mark] = vars(function).get("marks", [])
        choices: list[list[tuple[str, dict[str, Any], dict[str, Any]]]] = []
        for fixture in self._needed(function):
            made = self.fixtures.get(fixture)
            if made is not None and made.params:
                pairs = zip(made.ids, made.params, strict=True)
                choices.append([(text, {}, {fixture: param}) for text, param in pairs])
        for mark in marks:
            if mark.name == "parametrize":
                choices.append([(text, values, {}) for text, values in _rows(mark)])
        for combination in itertools.product(*choices):
            label = "-".join(text for text, _, _ in combination)
            values = {k: v for _, given, _ in combination for k, v in given.items()}
            params = {k: v for _, _, given in combination for k, v in given.items()}
            yield _Case(f"{name}[{label}]" if label else name, function, values, params, marks)

    def _needed(self, function: Callable[..., Any]) -> list[str]:
        """Fixtures that ``function`` asks for, directly or not."""
        found: list[str] = []
        for name in inspect.signature(function).parameters:
            if name in self.fixtures and name not in found:
                found += [name, *(n for n in self._needed(self.fixtures[name].make) if n not in found)]
        return found

    def call(self, case: _Case) -> None:
        """Run one test with its fixtures."""
        with contextlib.ExitStack() as ends:
            made: dict[str, Any] = {}
            names = inspect.signature(case.function).parameters
            values = {n: case.values[n] if n in case.values else self._value(n, case, made, ends) for n in names}
            case.function(**values)

    def _value(self, name: str, case: _Case, made: dict[str, Any], ends: contextlib.ExitStack) -> Any:
        if name == "tmp_path":
            return Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="gpu-test-")))
        if name == "request":
            raise LookupError("request belongs to fixtures")
        fixture = self.fixtures[name]
        kept, until = (self.session, self.ends) if fixture.scope == "session" else (made, ends)
        if name not in kept:
            ask = _Request(
                _Config(self.device_type), case.params.get(name), lambda other: self._value(other, case, made, ends)
            )
            needed = inspect.signature(fixture.make).parameters
            given = {n: ask if n == "request" else self._value(n, case, made, ends) for n in needed}
            value = fixture.make(**given)
            if inspect.isgenerator(value):
                generator = value
                value = next(generator)
                until.callback(lambda: next(generator, None))
            kept[name] = value
        return kept[name]


def collect(file: Path, device_type: str) -> tuple[_Runner, list[_Case]]:
    """The tests of one file, and what runs them."""
    conftest, module = (importlib.import_module(f"gpu.{name}") for name in ("conftest", file.stem))
    fixtures = {n: v for m in (conftest, module) for n, v in vars(m).items() if isinstance(v, _Fixture)}
    runner = _Runner(device_type, fixtures)
    functions = [(n, f) for n, f in vars(module).items() if n.startswith("test_") and inspect.isfunction(f)]
    return runner, [case for name, function in functions for case in runner.cases(name, function)]


def run(files: Sequence[Path], device_type: str, choice: Choice, records: Records) -> None:
    """Run the tests of ``files``, of each file those of ``choice``."""
    torch.set_num_threads(1)
    for file in files:
        runner, cases = collect(file, device_type)
        with runner.ends:
            for case in choice.of(cases, lambda each: each.function.__name__):
                _run_one(runner, case, f"{file.name}::{case.name}", records)


def _run_one(runner: _Runner, case: _Case, name: str, records: Records) -> None:
    needed = [int(mark.args[0]) for mark in case.marks if mark.name == "gpus"]
    packages = [name for mark in case.marks if mark.name == "packages" for name in mark.args]
    reason = importlib.import_module("gpu.conftest").reason_to_skip(runner.device_type, needed, packages)
    if reason:
        records.end(name, "skipped", 0.0, reason)
        return
    records.begin(name)
    torch.manual_seed(0)
    began = time.monotonic()
    try:
        runner.call(case)
    except Exception:
        detail = traceback.format_exc()
        records.end(name, "failed", time.monotonic() - began, detail)
        print(f"FAILED {name}\n{detail}", flush=True)
    else:
        records.end(name, "passed", time.monotonic() - began)
        print(f"passed {name}", flush=True)
