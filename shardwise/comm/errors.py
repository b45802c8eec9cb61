"""What goes wrong between ranks."""

from __future__ import annotations

__all__ = ["PeerError"]


class PeerError(RuntimeError):
    """A rank of the group died, left, failed, fell behind for too long or runs another operation. It is named."""
