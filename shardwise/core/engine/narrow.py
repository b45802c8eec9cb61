"""Which chunks of a model travel in fewer bits, and over which groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwise.core.comm import FORMATS, CompressedGroup, Group, compressed
from shardwise.core.deferred.record import DeferredParameter
from shardwise.core.shards.layout import ChunkSpec, Layout
from shardwise.plan import Plan

__all__ = ["Narrow", "trained"]

PLAIN = nn.Parameter, DeferredParameter


# [Note: Rounded parameters]
# Where parameters travel in 8 bits all ranks compute with the same model, whatever carries it.
# * What an optimizer trains: a shard is on every rank what its peers get of it, its owner's copy as well. It is rounded
#   where it is published, from its master, which is not (master_dtype): a block may have parameters that a step has
#   not updated, and what was rounded with another scale is not what its master rounds to. States and files are made of
#   masters.
# * What is frozen has no master. Its shard stays as it is, so that states and files have what was loaded, and each
#   gather brings it rounded, this rank's own part too (Group.brought). Arrays that stay are whole from the beginning,
#   and never travel. Numbers that cannot be written so (integers, fp64), and those of parameters of a class of its own,
#   whose bits may be packed weights under the name of floating-point ones, travel as they are, and so does their chunk.
# * What is trained by nobody and not frozen travels as it is.
# * A secondary shard is some neighbours' shards as they arrived, which are written in the same blocks once more.
class Narrow:
    """Of one model.

    Args:
        layout: of its parameters.
        params: these.
        plan: what is asked for.
        shard: the ranks that share it.
        among: those that share secondary shards.
        resident: which chunks stay whole on the device, so that a frozen one never travels.

    Attributes:
        trained: over which shards travel that an optimizer trains; ``shard`` where nothing is rounded.
        left: indices of frozen parameters of a class of their own, which travel as they are, and their chunks with
            them.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        plan: Plan,
        shard: Group,
        among: Group | None,
        resident: Callable[[ChunkSpec], bool],
    ) -> None:
        weights, frozen = plan.comm.weights, plan.comm.compress_frozen
        self._shard, self._among = shard, among
        self.trained = shard if weights is None else compressed(shard, FORMATS[weights][0])
        self._frozen = shard if frozen is None else compressed(shard, FORMATS[frozen][0], on_the_way=True)
        own = dict[int, list[int]]()
        if frozen is not None and shard.size > 1:
            for spec in layout.chunks:
                if not spec.trainable and not resident(spec) and FORMATS[frozen][0].takes(spec.dtype):
                    own[spec.index] = [slot.param for slot in spec.slots if type(params[slot.param]) not in PLAIN]
        self._on_the_way = frozenset(index for index, others in own.items() if not others)
        self.left = [param for others in own.values() for param in others]

    def rounds(self, spec: ChunkSpec) -> bool:
        """Whether the chunk's shards are rounded by their owners, before they travel."""
        return self.trained is not self._shard and trained(spec)

    def rounds_on_the_way(self, spec: ChunkSpec) -> bool:
        """Whether gathers of the chunk bring something else than its shards."""
        return spec.index in self._on_the_way

    def over(self, spec: ChunkSpec) -> Group | None:
        """The group that carries its shards in fewer bits; ``None``: they travel as they are."""
        if self.rounds_on_the_way(spec):
            return self._frozen
        return self.trained if self.rounds(spec) else None

    def over_few(self, spec: ChunkSpec) -> Group | None:
        """The same for its secondary shards."""
        over, few = self.over(spec), self._among
        if few is None or not isinstance(over, CompressedGroup):
            return None
        return compressed(few, over.format, rows=over.size // few.size)

    def rounding(self, spec: ChunkSpec) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes of a master's values, in the shard's dtype and from the beginning of a block on, the shard's;
        ``None``: they are the same."""
        return self.trained.rounded if self.rounds(spec) else None


def trained(spec: ChunkSpec) -> bool:
    """Whether an optimizer updates the chunk."""
    return spec.trainable and spec.optimizer >= 0
