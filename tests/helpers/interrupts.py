"""Ctrl-C at every point in turn: where a signal could raise ``KeyboardInterrupt`` in the modules that are watched."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

__all__ = ["Interrupts"]

CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION")
"""Python looks for signals after these."""
BEGINS = dis.opmap["RESUME"]
"""With this a function begins, and a generator goes on; Python looks for signals there as well."""
TOOL = 4
"""One of the numbers that ``sys.monitoring`` leaves to anybody."""


class Interrupts:
    """Counts the points in ``modules`` where an interrupt could come, and raises at one of them.

    Only the thread that calls :meth:`run` is interrupted, as by a signal.

    Attributes:
        passed: how many points the last run came to.
        where: file, line and function of the point at which it raised.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        modules = list(modules)
        self._files = {module.__file__ for module in modules}
        self._codes = {code for module in modules for code in _codes_of(vars(module).values(), module.__file__)}
        self._points: dict[CodeType, frozenset[int]] = {}
        self._at: int | None = None
        self._thread = 0
        self.passed = 0
        self.where = ""

    def run(self, act: Callable[[], Any], at: int | None = None) -> bool:
        """Call ``act`` and raise at point ``at`` (from 0; ``None``: nowhere). Whether it came out as the interrupt."""
        self._at, self.passed, self.where = at, 0, ""
        try:
            with self._monitored() if sys.version_info >= (3, 12) else self._traced():
                act()
        except KeyboardInterrupt:
            return True
        return False

    @contextmanager
    def _traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        # A generator that is closed or thrown into is entered where it waited: Python looks for no signal there.
        if frame.f_code.co_code[frame.f_lasti] == BEGINS:
            self._reach(frame.f_code, frame.f_lasti)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in self._points_of(frame.f_code):
            self._reach(frame.f_code, frame.f_lasti)
        return self._follow

    # From 3.12 on a trace function sees the opcodes of a function at the earliest when it is called again.
    @contextmanager
    def _monitored(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        events = monitoring.events
        begins = events.PY_START | events.PY_RESUME
        callbacks = {events.PY_START: self._reach, events.PY_RESUME: self._reach, events.INSTRUCTION: self._pass}
        self._thread = threading.get_ident()
        monitoring.use_tool_id(TOOL, "interrupts")
        try:
            for event, callback in callbacks.items():
                monitoring.register_callback(TOOL, event, callback)
            for code in self._codes:
                monitoring.set_local_events(TOOL, code, begins | events.INSTRUCTION)
            yield
        finally:
            for code in self._codes:
                monitoring.set_local_events(TOOL, code, 0)
            for event in callbacks:
                monitoring.register_callback(TOOL, event, None)
            monitoring.free_tool_id(TOOL)

    def _pass(self, code: CodeType, offset: int) -> None:
        if offset in self._points_of(code):
            self._reach(code, offset)

    def _points_of(self, code: CodeType) -> frozenset[int]:
        if code not in self._points:
            self._points[code] = _after_calls(code)
        return self._points[code]

    def _reach(self, code: CodeType, offset: int) -> None:
        if self._thread not in (0, threading.get_ident()):
            return
        self.passed += 1
        if self._at is not None and self.passed == self._at + 1:
            line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
            self.where = f"{code.co_filename.rpartition('/')[2]}:{line} {code.co_qualname}"
            raise KeyboardInterrupt


def _after_calls(code: CodeType) -> frozenset[int]:
    """Where Python looks for signals: after calls, and where a loop has jumped back to.

    A signal is raised as of the call itself, here as of what follows it. Where the two have different handlers, as at
    the end of ``with lock: return f()``, raising would skip the end of a block, which no signal can: no point.
    """
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "JUMP_BACKWARD"}
    pairs = itertools.pairwise(dis.get_instructions(code))
    table: Any = dis.Bytecode(code)
    handlers = [(one.start, one.end, one.target) for one in table.exception_entries]

    def handler(offset: int) -> int | None:
        return next((target for start, end, target in handlers if start <= offset < end), None)

    after_calls = {
        after.offset for one, after in pairs if one.opname in CALLS and handler(one.offset) == handler(after.offset)
    }
    return frozenset(found | after_calls)


def _codes_of(values: Iterable[Any], file: str | None) -> Iterator[CodeType]:
    """The code of functions, of classes' methods and of what is made inside them, as far as it is from a file."""
    for value in values:
        if isinstance(value, CodeType):
            if value.co_filename == file:
                yield value
                yield from _codes_of(value.co_consts, file)
        elif isinstance(value, FunctionType):
            yield from _codes_of([value.__code__, vars(value).get("__wrapped__")], file)
        elif isinstance(value, type) and sys.modules[value.__module__].__dict__.get("__file__") == file:
            yield from _codes_of(vars(value).values(), file)
        elif isinstance(value, staticmethod | classmethod):
            yield from _codes_of([value.__func__], file)
        elif isinstance(value, property):
            yield from _codes_of([value.fget, value.fset], file)
        elif isinstance(value, functools.cached_property):
            yield from _codes_of([value.func], file)
