"""Former name of :mod:`shardwise.core.base.warnings`."""

from __future__ import annotations

from shardwise.core.base.warnings import called_by, warn_user

__all__ = ["called_by", "warn_user"]
