"""Sequence parallelism: ranks that hold parts of the same sequences, and see whole ones in attention alone.

What enters a model's body is divided, and what leaves it is put together (``sharing``); in between attention exchanges
heads (``heads``) or passes keys and values around (``ring``). Nothing here knows of optimizers or engines, to which
these ranks are data-parallel ones, nor reads the environment or makes groups.
"""

from shardwise.core.parallel.sequence.axis import SequenceAxis
from shardwise.core.parallel.sequence.requirements import SequenceBody, known_sequences, register_sequence, required
from shardwise.core.parallel.sequence.sharing import Sequences, share_sequences

__all__ = [
    "SequenceAxis",
    "SequenceBody",
    "Sequences",
    "known_sequences",
    "register_sequence",
    "required",
    "share_sequences",
]
