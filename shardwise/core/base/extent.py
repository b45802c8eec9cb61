"""Former home of functions of :mod:`shardwise.core.base.tensors`."""

from __future__ import annotations

from shardwise.core.base.tensors import extent

__all__ = ["extent"]
