"""What the published arguments of sequence parallelism mean: over which ranks, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core.base.checked import shown, whole
from shardwise.plan import SequencePlan

__all__ = ["MODES", "SequenceArguments"]

MODES = ("split_gather", "ring", "all_to_all", "ring_attn")


@dataclass(frozen=True, kw_only=True)
class SequenceArguments:
    """As they are published, but for ``mode=None``, which is ``"all_to_all"`` with ``sp_size > 1`` and otherwise
    ``"split_gather"``.

    Attributes:
        enabled: ``enable_sequence_parallelism``.
        mode: ``sequence_parallelism_mode``.
        overlap: ``enable_sequence_overlap``.
        tp_size, sp_size, inner_ring_size: as published.
        parallel_output: logits stay cut by the sequence, where the model's own loss allows it.

    Raises:
        ValueError: what is given does not go together.
    """

    enabled: bool
    mode: str | None = None
    overlap: bool = False
    tp_size: int
    sp_size: int | None = None
    inner_ring_size: int | None = None
    parallel_output: bool = True

    def __post_init__(self) -> None:
        if self.mode not in (None, *MODES):
            raise ValueError(f"sequence_parallelism_mode={shown(self.mode)}: give None or one of {MODES}")
        for name in ("sp_size", "inner_ring_size"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1, what="a number of ranks, or None,")
        if not self.enabled:
            if self.sp_size not in (None, 1) or self.overlap:
                raise ValueError(
                    f"sp_size={self.sp_size}, enable_sequence_overlap={self.overlap} with "
                    "enable_sequence_parallelism=False: leave them None and False, or give True"
                )
            return
        if self.in_layers and self.tp_size == 1:
            instead = "sp_size > 1" if self.mode is None else "sequence_parallelism_mode='all_to_all' and sp_size > 1"
            raise ValueError(
                f"sequence_parallelism_mode={self.mode!r} with tp_size={self.tp_size}, sp_size={self.sp_size}: "
                f"{self.chosen!r} is over the ranks of tp_size, so give tp_size > 1; or {instead}"
            )
        if self.chosen == "ring_attn" and self.inner_ring_size is not None and self.sp % self.inner_ring_size:
            raise ValueError(f"inner_ring_size={self.inner_ring_size}: give a number that divides sp_size={self.sp}")

    @property
    def chosen(self) -> str:
        """The mode that is meant."""
        return self.mode or ("all_to_all" if (self.sp_size or 1) > 1 else "split_gather")

    @property
    def in_layers(self) -> bool:
        """Whether it is over the ranks of ``tp_size``."""
        return self.enabled and self.chosen in ("split_gather", "ring")

    @property
    def sp(self) -> int:
        """Data-parallel ranks that see parts of the same sequences."""
        return 1 if not self.enabled or self.in_layers else self.sp_size or 1

    @property
    def between_layers(self) -> Literal["split_gather"] | None:
        """Of :class:`~shardwise.plan.TensorPlan`."""
        return "split_gather" if self.in_layers else None

    @property
    def plan(self) -> SequencePlan:
        """Of attention over whole sequences."""
        if self.sp == 1:
            return SequencePlan()
        return SequencePlan(
            mode="ring_attn" if self.chosen == "ring_attn" else "all_to_all",
            inner_ring=self.inner_ring_size if self.chosen == "ring_attn" else None,
            parallel_output=self.parallel_output,
        )

    def vain(self) -> dict[str, Any]:
        """The arguments that mean nothing beside the others, by reason."""
        if not self.enabled:
            return {"for enable_sequence_parallelism=True only": ("sequence_parallelism_mode", "inner_ring_size")}
        if self.in_layers:
            return {
                f"{self.chosen!r} is over the ranks of tp_size": ("sp_size", "inner_ring_size"),
            }
        found: dict[str, Any] = {f"{self.chosen!r} has nothing of that kind": ("enable_sequence_overlap",)}
        if self.sp == 1:
            found["sp_size is 1"] = ("enable_sequence_parallelism", "sequence_parallelism_mode", "inner_ring_size")
        elif self.chosen != "ring_attn":
            found["for sequence_parallelism_mode='ring_attn' only"] = ("inner_ring_size",)
        return found
