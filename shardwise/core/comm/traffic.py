"""Counts of what a rank sends, by kind of operation."""

from __future__ import annotations

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "send")


class Traffic:
    """Bytes that this rank sends to others, and operations, by kind.

    Every backend is counted with the bytes that an optimal algorithm sends, so that the same step counts the same
    everywhere. With N ranks and a full buffer of B bytes: all-gather and reduce-scatter (N-1)/N B, all-reduce
    2 (N-1)/N B (Patarasuk and Yuan 2009), broadcast its size at the source and nothing elsewhere, exchange
    (N-1) times the own message, send its size. Through shared memory the count is of bytes that cross between ranks.

    Attributes:
        bytes: kind -> bytes sent since the last reset.
        calls: kind -> operations started since the last reset.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.calls: dict[str, int] = dict.fromkeys(KINDS, 0)

    def add(self, kind: str, sent_bytes: int) -> None:
        """Count one operation of ``kind`` (an entry of :data:`KINDS`) that sends ``sent_bytes``."""
        self.bytes[kind] += sent_bytes
        self.calls[kind] += 1

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes.update(dict.fromkeys(KINDS, 0))
        self.calls.update(dict.fromkeys(KINDS, 0))
