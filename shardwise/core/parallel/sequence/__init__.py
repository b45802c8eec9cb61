"""Sequence parallelism: ranks hold parts of the same sequences; only attention sees full sequences.

Inputs of a model's body are sharded, and its outputs are gathered (``sharing``). In between, attention exchanges heads
(``attention``) or circulates keys and values (``ring``). This package is independent of optimizers and engines, for
which these ranks are data-parallel. It neither reads the environment nor creates process groups.
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
