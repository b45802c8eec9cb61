"""Errors between ranks."""

from __future__ import annotations

UNREACHED = (
    "Where ranks are on several hosts, set GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME, too) on every rank to the "
    "network interface by which they reach each other, and let the firewall pass connections between them"
)
"""Advice for connections that could not be made."""


class PeerError(RuntimeError):
    """A rank of the group died, left, failed, timed out, or runs another operation. The message names it.

    Examples:
        >>> try:
        ...     session.optimizer.step()
        ... except shardwise.PeerError as error:
        ...     print(f"stopped, since {error}")
    """
