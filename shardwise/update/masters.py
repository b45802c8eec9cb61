"""Changes that a program makes to parameters with separate masters are what the next update starts from, as in torch.

Where the whole array stays on the device a parameter can be written to at any time (``zero_``, ``clamp_``, weights of
a moving average), also through ``.data``, where no counter tells. The update would start from the master and undo it.
So this rank's part is summed up in blocks after every update and again before the next. Two such sums cost a few
percent of an update. Where they differ the new values go into the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.chunk.chunk import Chunk
from shardwise.chunk.layout import ChunkSpec
from shardwise.update.states import ChunkState

__all__ = ["MasterEdits", "take_over"]

BLOCK = 128
"""Words of eight bytes that are summed up to one."""
PART = 1 << 22
"""Elements that are taken over at a time, to bound what that needs; whole blocks of what is rounded together."""
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""What is shown where a master, in the shard's dtype, has these values, from the beginning of a block on."""


class MasterEdits:
    """Watches the chunks that stay on the device and have masters elsewhere.

    Args:
        chunks: all of one model.
        states: masters, by chunk index.
        rounding: how each is rounded, where it is.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        states: Mapping[int, ChunkState],
        rounding: Callable[[ChunkSpec], Rounded | None],
    ) -> None:
        self._rounding = rounding
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
                take_over(chunk, chunk.shard, master, self._rounding(chunk.spec))
            self._sums[chunk.spec.index] = _sums(chunk.shard)


def take_over(chunk: Chunk, shard: torch.Tensor, kept: torch.Tensor | None, rounded: Rounded | None) -> None:
    """Changed values go into the master; what was not changed keeps the precision that the shard does not have.

    Args:
        chunk: whose they are.
        shard: what the program has left.
        kept: the master, or the shard itself where another one is shown.
        rounded: what ``kept`` shows, where that is rounded in blocks.
    """
    if kept is None:
        return
    here = [chunk.overlap(slot) for slot in chunk.spec.slots] if rounded is not None else []
    spans = [(start - chunk.shard_start, end - chunk.shard_start) for start, end in here if start < end]
    for first in range(0, len(shard), PART):
        part = kept[first : first + PART]
        values = shard[first : first + PART].to(part.device)
        shows = part.to(values.dtype)
        shown = shows if rounded is None else rounded(shows)
        same = (values == shown) | (values.isnan() & shown.isnan())  # a block with an infinite number is all NaN
        part.copy_(torch.where(same, part, values.to(part.dtype)))
        if rounded is None:
            continue
        for start, end in spans:
            at = slice(max(start - first, 0), max(end - first, 0))
            same[at] = same[at].all()
        _show_as_written(values, part, ~same, rounded)


# [Note: Written to what is rounded]
# A weight that is set to zero may be so small that it had been rounded to that: it does not differ from what is shown.
# Where larger ones of its block are set to zero with it the block's scale shrinks, and it would come back. So in
# parameters that were written to, what can be shown as it was written is shown so. Scales are powers of two: where one
# shrinks all that the block has shown can still be shown, and what would show something else is taken over. Where it
# grows masters round to what is nearest, and are kept; and so are all of parameters that nobody has written to.
def _show_as_written(values: torch.Tensor, part: torch.Tensor, written: torch.Tensor, rounded: Rounded) -> None:
    possible = (rounded(values) == values) & written
    while True:
        differs = possible & (rounded(part.to(values.dtype)) != values)
        if not differs.any():
            return
        part.copy_(torch.where(differs, values.to(part.dtype), part))
        possible &= ~differs


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
