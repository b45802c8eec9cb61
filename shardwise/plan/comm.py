"""How bytes travel: the part of a plan about the exchange between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.core.base.checked import MOST_BYTES, number, require, switch, whole

__all__ = ["MOST_DIVISOR", "CommPlan"]

MOST_DIVISOR = 2.0**32
MOST_SECONDS = 315_360_000.0
BLOCKS = ("fp8", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """How bytes travel.

    Attributes:
        overlap: reduce during backward and gather ahead; ``False`` does the same work in sequence.
        shared_memory: exchange through shared memory between CPU ranks of one host; ``None`` chooses by itself.
        same_order: ``None`` (or ``True``): gathers that need every rank are issued in program order, so all ranks have
            to run the same modules in the same order; ranks that differ end in an error before anything is updated.
            ``False``: they agree before each gather, for models whose ranks take different branches. Between CPU ranks
            of one host, which read shared memory, gathers need neither. There those from a disk and of secondary
            shards, and everywhere those under a declared capacity, are always agreed on.
        wait_timeout_s: seconds that a rank waits within a pass for a peer that does not come, before it raises an error
            that says what each rank is doing. The first meeting of a pass, and calls such as saving and loading, wait
            as long as the process group does: one rank may work alone before it comes.
        gather_on_use: after a step, parameters that stay gathered are renewed in the background and waited for at their
            first use by a module. Until then they show this rank's part as it is after the step, the others' parts as
            before it: read and change them inside ``gathered()``. ``False``: they are renewed by ``step()``.
        sync_init: every rank starts from rank 0's parameters and buffers (DDP does the same).
        predivide: gradients are divided by it before their sum over ranks, and by what is left of their number after.
        compress: ``"fp8"``: parameters that are trained, gradients, and activations between ranks that hold one model
            travel in 8 bits (:mod:`shardwise.core.comm.block_formats`); masters are kept apart and never rounded so.
        compress_weights: ``"fp8"``, ``"int8"`` or ``"int4"``, for parameters that are trained alone (qwZ of ZeRO++);
            ``None``: as ``compress`` says.
        compress_gradients: the same for gradients (qgZ), each of which is rounded once and summed in fp32.
        compress_frozen: the same for parameters that are frozen when the model is sharded (MixZ++), as they are
            gathered; each rank keeps its share as it is, and ``None``, or no number that can be written so: as it is.
        exchange_bytes: what exchange buffers of gradients may take at stages 2 and 3 beyond two for each class of chunk
            sizes, so that more reductions are under way; ``None``: 16 MiB between hosts without GPUs and without a
            declared capacity, where a reduction is a trip of the wire, and none elsewhere.
    """

    overlap: bool
    shared_memory: bool | None
    gather_on_use: bool
    sync_init: bool
    same_order: bool | None = None
    wait_timeout_s: float = 60.0
    predivide: float = 1.0
    compress: Literal["fp8"] | None = None
    compress_weights: Literal["fp8", "int8", "int4"] | None = None
    compress_gradients: Literal["fp8", "int8", "int4"] | None = None
    exchange_bytes: int | None = None
    compress_frozen: Literal["fp8", "int8", "int4"] | None = None

    def __post_init__(self) -> None:
        number("predivide", self.predivide, f"[{1 / MOST_DIVISOR!r}, {MOST_DIVISOR!r}]", "a divisor > 0, at most 2**32")
        number("wait_timeout_s", self.wait_timeout_s, f"(0, {MOST_SECONDS!r}]", "seconds > 0, at most ten years")
        for name in ("overlap", "gather_on_use", "sync_init"):
            switch(name, getattr(self, name))
        for name in ("shared_memory", "same_order"):
            if getattr(self, name) is not None:
                switch(name, getattr(self, name))
        if self.exchange_bytes is not None:
            whole("exchange_bytes", self.exchange_bytes, 0, MOST_BYTES, "bytes, or None,")
        require(self.compress in (None, "fp8"), f"compress={self.compress!r}: give 'fp8' or None")
        for name in ("compress_weights", "compress_gradients", "compress_frozen"):
            value = getattr(self, name)
            require(value in (None, *BLOCKS), f"{name}={value!r}: give one of {', '.join(map(repr, BLOCKS))}, or None")

    @property
    def weights(self) -> str | None:
        """In which numbers trained parameters travel; ``None``: in their own."""
        return self.compress_weights or self.compress

    @property
    def gradients(self) -> str | None:
        """The same of gradients."""
        return self.compress_gradients or self.compress

    @property
    def compressed(self) -> str:
        """What is said of these two in messages; empty where both travel as they are."""
        fields = ("compress", "compress_weights", "compress_gradients")
        told = [f"{name}={getattr(self, name)!r}" for name in fields if getattr(self, name) is not None]
        return ", ".join(told)
