"""Ctrl-C at every point in turn: where a signal could raise ``KeyboardInterrupt`` in the modules that are watched."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

__all__ = ["Interrupts"]

CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION")
"""Python looks for signals after these, and when a function begins."""


class Interrupts:
    """Counts the points in ``modules`` where an interrupt could come, and raises at one of them.

    Only the thread that calls :meth:`run` is interrupted, as by a signal.

    Attributes:
        passed: how many points the last run came to.
        where: file, line and function of the point at which it raised.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._points: dict[CodeType, frozenset[int]] = {}
        self._at: int | None = None
        self.passed = 0
        self.where = ""

    def run(self, act: Callable[[], Any], at: int | None = None) -> bool:
        """Call ``act`` and raise at point ``at`` (from 0; ``None``: nowhere). Whether it came out as the interrupt."""
        self._at, self.passed, self.where = at, 0, ""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _enter(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if frame.f_code not in self._points:
            self._points[frame.f_code] = _after_calls(frame.f_code)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._reach(frame)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in self._points[frame.f_code]:
            self._reach(frame)
        return self._follow

    def _reach(self, frame: FrameType) -> None:
        self.passed += 1
        if self._at is not None and self.passed == self._at + 1:
            sys.settrace(None)
            code = frame.f_code
            self.where = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_qualname}"
            raise KeyboardInterrupt


def _after_calls(code: CodeType) -> frozenset[int]:
    """Where Python looks for signals: after calls, and where a loop has jumped back to."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "JUMP_BACKWARD"}
    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(found | {after.offset for one, after in pairs if one.opname in CALLS})
