"""Former home of functions of :mod:`shardwise.core.base.tensors`."""

from __future__ import annotations

from shardwise.core.base.tensors import ordinary_tensors

__all__ = ["ordinary_tensors"]
