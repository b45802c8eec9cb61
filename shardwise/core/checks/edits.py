"""Errors for changes of sharded parameters that would be lost.

A parameter shows memory of the engine: the gathered array, or one NaN where it is not gathered. ``param.data = x``
takes it away from there, which its address tells. What is written to a gathered copy ends with the copy, and what is
written to a NaN goes nowhere: the version counter tells, or the NaN itself (torch lets ``zero_`` and ``fill_`` write
to expanded memory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.core.base.device import Later, runs_ahead
from shardwise.core.shards.chunk import Chunk, absent_value, is_absent

__all__ = ["Edits"]


# [Note: Where a write to a parameter shows]
# * ``param.data = x``: the parameter's address is not where the engine put it (Chunk.misplaced).
# * In place, through the parameter: its version counter, which views of it share (Chunk.written).
# * Through ``.data`` of an absent parameter: its NaN is a number then. Each has one of its own, in one tensor for all
#   of a dtype, so that a single look tells. In steps and states.
# * Through ``.data`` of a gathered one: nothing tells, and it is lost.
# This is checked in passes, steps and states. A write that is found is dropped together with all gathered copies, so
# that no part of it stays.
class Edits:
    """Watches the parameters of ``chunks``.

    Args:
        chunks: all of one model, set up.
        name_of: what to call a parameter, by its index in the layout.
        drop: ends gathered copies.
    """

    def __init__(self, chunks: Sequence[Chunk], name_of: Callable[[int], str], drop: Callable[[], None]) -> None:
        self._chunks, self._name_of, self._drop = chunks, name_of, drop
        self._transient = [chunk for chunk in chunks if not chunk.resident]
        self._params = [param for chunk in chunks for param in chunk.params]
        self._dtypes = [chunk.spec.dtype for chunk in chunks for _ in chunk.params]
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self._asked: list[Later] = []
        for dtype in dict.fromkeys(chunk.spec.dtype for chunk in self._transient):
            own = [chunk for chunk in self._transient if chunk.spec.dtype is dtype]
            slots = [len(c.spec.slots) for c in own]
            nothing = torch.full((sum(slots),), absent_value(dtype), dtype=dtype, device=own[0].device)
            for chunk, part in zip(own, torch.split(nothing, slots), strict=True):
                chunk.use_absent(part)
            self._absent[dtype] = nothing
        self.accept()

    def accept(self, among: Sequence[Chunk] | None = None) -> None:
        """Accept the present values (of these chunks); later writes are noticed."""
        for chunk in self._chunks if among is None else among:
            chunk.note_versions()
            chunk.lost = None

    def check_placed(self) -> None:
        """Check that every parameter is where the engine put it, with the data that the engine gave it.

        Raises:
            RuntimeError: one is not; it is named, and all are put back.
        """
        for chunk in () if self._all_placed() else self._chunks:
            wrong = chunk.misplaced()
            if wrong is not None:
                param = chunk.params[wrong]
                # Read before it is put back, which changes what it tells.
                found = f"now {param.dtype} of shape {tuple(param.shape)} on {param.device}"
                self._put_back()
                raise RuntimeError(
                    f"{self._name(chunk, wrong)} ({found}) was moved, cast or given other data after the model was "
                    "sharded, which is dropped; do that before boost/build, write to it inside `with "
                    "model.gathered(write_back=True)` of what boost/build returned, or load a state"
                )

    def check_absent(self) -> None:
        """Check that nothing was written to the placeholders of parameters that are not gathered.

        Raises:
            RuntimeError: it was; as :meth:`check_written`. On a GPU, of the last time that this was called, so that the
                host does not wait.
        """
        if self._changed():
            where = next(c for c in self._transient if not all(map(_is_untouched, c.absent)))
            self._refuse_write(where, next(i for i, each in enumerate(where.absent) if not _is_untouched(each)))

    def _all_placed(self) -> bool:
        """Whether each parameter is where its chunk has put it; not so while a chunk is moving some of them."""
        # Three lists for the whole model, which are compared in C: chunk by chunk takes five times as long.
        expected = [address for chunk in self._chunks for address in chunk.addresses]
        placed = [param.data_ptr() for param in self._params] == expected
        return placed and [param.dtype for param in self._params] == self._dtypes

    def _changed(self) -> bool:
        """Whether something was written to what stands for absent parameters."""
        asked, self._asked = self._asked, []
        if not any(runs_ahead(values.device) for values in self._absent.values()):
            return not all(bool(is_absent(values).all()) for values in self._absent.values())
        self._asked = [Later(is_absent(values).all()) for values in self._absent.values()]
        return not all(later.value() for later in asked)

    def check_written(self, writable: Callable[[int], bool]) -> None:
        """Check that nothing was written to a parameter that would be lost.

        Args:
            writable: units whose parameters may be written to now.

        Raises:
            RuntimeError: it was; the parameter is named, and the write is dropped.
        """
        for chunk in self._transient:
            wrong = chunk.lost if chunk.lost is not None else chunk.written()
            if wrong is not None and not writable(chunk.spec.unit):
                self._refuse_write(chunk, wrong)

    def _refuse_write(self, chunk: Chunk, slot: int) -> None:
        name = self._name(chunk, slot)
        self._put_back()
        raise RuntimeError(
            f"{name} {tuple(chunk.spec.slots[slot].shape)} was written to, or given other data, where that is lost: "
            "each rank keeps a shard, and modules see a temporary copy. Change it inside `with "
            "model.gathered(write_back=True)` of what boost/build returned; if a module does so in its forward pass "
            "(nn.Embedding(max_norm=...), codebooks), keep the values in a buffer, or choose a stage that keeps "
            "parameters gathered (ZeRO-1 or 2). The write was dropped"
        )

    def _put_back(self) -> None:
        # Copies first: they end with what was written to them, and are gathered again.
        self._drop()
        self._asked = []
        for dtype, values in self._absent.items():
            values.fill_(absent_value(dtype))
        for chunk in self._chunks:
            chunk.put_back()
        self.accept()

    def _name(self, chunk: Chunk, slot: int) -> str:
        return self._name_of(chunk.spec.slots[slot].param)


def _is_untouched(value: torch.Tensor) -> bool:
    return not value.numel() or bool(is_absent(value.flatten()[0]))
