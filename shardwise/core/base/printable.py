"""Former home of functions of :mod:`shardwise.core.base.validate`."""

from __future__ import annotations

from shardwise.core.base.validate import class_name, in_a_line, printable

__all__ = ["class_name", "in_a_line", "printable"]
