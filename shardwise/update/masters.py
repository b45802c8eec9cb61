"""Changes that a program makes to parameters with separate masters are what the next update starts from, as in torch.

Where the whole array stays on the device a parameter can be written to at any time (``zero_``, ``clamp_``, weights of
a moving average), also through ``.data``, where no counter tells. The update would start from the master and undo it.
So this rank's part is summed up in blocks after every update and again before the next. Two such sums cost a few
percent of an update. Where they differ the new values go into the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from shardwise.chunk.chunk import Chunk
from shardwise.chunk.layout import ChunkSpec
from shardwise.update.states import ChunkState

__all__ = ["MasterEdits", "take_over"]

BLOCK = 128
"""Words of eight bytes that are summed up to one."""
PART = 1 << 22
"""Elements that are taken over at a time, to bound what that needs; whole blocks of what is rounded together."""
Rounded = Callable[[ChunkSpec, torch.Tensor], torch.Tensor]


class MasterEdits:
    """Watches the chunks that stay on the device and have masters elsewhere.

    Args:
        chunks: all of one model.
        states: masters, by chunk index.
        rounded: what a shard is where its master has these values in the shard's dtype.
    """

    def __init__(self, chunks: Sequence[Chunk], states: Mapping[int, ChunkState], rounded: Rounded) -> None:
        self._rounded = rounded
        self._watched = {c.spec.index: (c, states[c.spec.index]) for c in chunks if c.spec.index in states}
        self._sums: dict[int, torch.Tensor] = {}

    def _separate(self, optimizer: int | None) -> list[tuple[Chunk, ChunkState]]:
        found = [(c, s) for c, s in self._watched.values() if c.resident and s.dtype is not None]
        return [(c, s) for c, s in found if optimizer is None or c.spec.optimizer == optimizer]

    def note(self, optimizer: int | None = None) -> None:
        """The parameters of an optimizer (of all) are what their masters say."""
        for chunk, _ in self._separate(optimizer):
            self._sums[chunk.spec.index] = _sums(chunk.shard)

    def changed(self, optimizer: int | None = None) -> list[Chunk]:
        """Chunks whose part on this rank was changed since."""
        pairs = [(chunk, self._sums.get(chunk.spec.index)) for chunk, _ in self._separate(optimizer)]
        known = [(chunk, sums) for chunk, sums in pairs if sums is not None]
        if not known:
            return []
        # One answer for all chunks: on a GPU each would hold up the host.
        differ = torch.stack([(_sums(chunk.shard) != sums).any() for chunk, sums in known]).tolist()
        return [chunk for (chunk, _), differs in zip(known, differ, strict=True) if differs]

    @torch.no_grad()
    def take(self, optimizer: int | None = None) -> None:
        """Take changes over into the masters, this rank its part; what was not changed keeps its precision.

        Raises:
            RuntimeError: the masters are on a disk, which needs all ranks.
        """
        for chunk in self.changed(optimizer):
            state = self._watched[chunk.spec.index][1]
            if state.on_disk:
                raise RuntimeError(
                    f"parameters of chunk {chunk.spec.index} ({chunk.shard_numel} elements) were written to, but "
                    "their masters are on a disk: make changes inside `with model.gathered(write_back=True)` of what "
                    "boost/build returned"
                )
            with state.opened(write=True) as master:
                take_over(chunk.shard, master, partial(self._rounded, chunk.spec))
            self._sums[chunk.spec.index] = _sums(chunk.shard)


def take_over(
    shard: torch.Tensor, master: torch.Tensor | None, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Changed values go into the master; what was not changed keeps the precision that the shard does not have."""
    if master is None:
        return
    for own, part in zip(torch.split(shard, PART), torch.split(master, PART), strict=True):
        values = own.to(part.device)
        same = values == rounded(part.to(values.dtype))
        part.copy_(torch.where(same, part, values.to(part.dtype)))


def _sums(shard: torch.Tensor) -> torch.Tensor:
    """The sum of each block of its bits, and one of what is left over, each element by its place.

    Only where whole words of one block change places nothing shows.
    """
    words = 8 // shard.itemsize
    aligned = shard.storage_offset() % words == 0
    whole = shard.numel() // (words * BLOCK) * words * BLOCK if aligned else 0
    with torch.no_grad():
        rest = shard[whole:].view(_INTEGERS[shard.itemsize])
        # Odd factors: no change of a single element can vanish in 64 bits.
        places = 2 * torch.arange(rest.numel(), device=rest.device) + 1  # also where nothing is left over
        last = (rest * places).sum().view(1)
        return torch.cat([shard[:whole].view(torch.int64).view(-1, BLOCK).sum(1), last]) if whole else last


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
