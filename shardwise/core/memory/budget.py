"""How much model data may be on the device when: pure arithmetic on a memory trace.

Source: Gemini's ``auto`` placement (``warmup_non_model_data_ratio``, ``steady_cuda_cap_ratio``) and its
``gpu_margin_mem_ratio``, with the meaning that ColossalAI 0.5 gives them. All sizes are in bytes, all ratios in [0, 1].
"""

from __future__ import annotations

from shardwise.core.memory.trace.stats import MemStats

__all__ = ["margin_bytes", "model_budget_bytes"]


def _check(capacity_bytes: int, **ratios: float) -> None:
    if capacity_bytes < 0:
        raise ValueError(f"capacity_bytes={capacity_bytes}: give the device's memory in bytes, 0 or more")
    for name, ratio in ratios.items():
        if not 0 <= ratio <= 1:  # NaN fails this too
            raise ValueError(f"{name}={ratio}: give a share between 0 and 1")


def model_budget_bytes(
    stats: MemStats | None,
    position: int,
    *,
    capacity_bytes: int,
    warmup_non_model_ratio: float,
    steady_capacity_ratio: float,
) -> int:
    """Bytes of model data that may be on the device from this use of a unit to the next.

    Args:
        stats: the trace of a step; None before there is one.
        position: of the use in the step (see :class:`MemStats`). A position that the trace does not have, such as -1
            where the order of use has changed since, gets what is right for the worst moment of the trace.
        capacity_bytes: of the device.
        warmup_non_model_ratio: share of it that is kept free of model data before there is a trace.
        steady_capacity_ratio: share of it that may be used at all afterwards.

    Returns:
        0 or more; 0 where the rest alone takes it all.
    """
    _check(
        capacity_bytes,
        warmup_non_model_ratio=warmup_non_model_ratio,
        steady_capacity_ratio=steady_capacity_ratio,
    )
    if stats is None:
        return int(capacity_bytes * (1 - warmup_non_model_ratio))
    intervals = stats.interval_bytes
    rest = intervals[position] if 0 <= position < len(intervals) else max(intervals, default=0)
    return max(int(capacity_bytes * steady_capacity_ratio) - rest, 0)


def margin_bytes(
    stats: MemStats,
    *,
    capacity_bytes: int,
    steady_capacity_ratio: float,
    margin_ratio: float,
    needed_bytes: int | None = None,
) -> int:
    """Bytes of optimizer state that may move to the device for good after the first step (``gpu_margin_mem_ratio``).

    That is ``margin_ratio`` of what remains at the tightest moment of the whole step: ``steady_capacity_ratio`` of the
    capacity, less non-model data, less ``needed_bytes`` of model data (None: what the traced step held at that moment).
    """
    _check(capacity_bytes, steady_capacity_ratio=steady_capacity_ratio, margin_ratio=margin_ratio)
    usable = int(capacity_bytes * steady_capacity_ratio)
    held = (m.non_model_bytes + (m.model_bytes if needed_bytes is None else needed_bytes) for m in stats.moments)
    return max(int(margin_ratio * (usable - max(held, default=needed_bytes or 0))), 0)
