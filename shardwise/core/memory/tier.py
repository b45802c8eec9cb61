"""The tiers of memory for model data, and the tier of each chunk: a pure function of sizes and fractions.

Source: ZeRO-Infinity's per-tensor placement (arXiv 2104.07857, section 5) and Gemini's offload fractions, chosen per
chunk. The chunks of a tier are spread evenly over the model, so that transfers are spread evenly over a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shardwise.plan import TierPlan

NOTICEABLE = 0.1
"""A fraction that is missed by more than this is worth a warning."""


class Tier(Enum):
    """A tier of memory, from fast and small to slow and large. On a CPU, the device is an accounted part of host
    memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Home:
    """The tiers of one chunk: of its parameter shard, of its masters and optimizer state, and of its gradient shard."""

    param: Tier
    state: Tier

    @property
    def grad(self) -> Tier:
        """The tier of the gradient shard, from which the update reads it; the host if the state is on disk."""
        return Tier.DEVICE if self.state is Tier.DEVICE else Tier.HOST

    @property
    def on_disk(self) -> bool:
        """Whether any part of the chunk is on a disk."""
        return Tier.DISK in (self.param, self.state)


def _spread(sizes: Sequence[int], share: float) -> list[bool]:
    """Choose about ``share`` of the total size, evenly over the sequence; 0 chooses nothing and 1 everything."""
    chosen, seen, total = [], 0, 0
    for size in sizes:
        seen += size
        # Rounded to the nearest size; the small term ensures that a share of 1.0, summed in floating point, chooses
        # all.
        take = share > 0.0 and size > 0 and total + size / 2 <= share * seen * (1 + 1e-9)
        chosen.append(take)
        total += size if take else 0
    return chosen


def _tiers(sizes: Sequence[int], host: float, disk: float) -> list[Tier]:
    away = _spread(sizes, min(host + disk, 1.0))
    on_disk = iter(_spread([s for s, gone in zip(sizes, away, strict=True) if gone], disk / (host + disk or 1.0)))
    return [(Tier.DISK if next(on_disk) else Tier.HOST) if gone else Tier.DEVICE for gone in away]


def assign_homes(
    sizes: Sequence[int], fixed: Sequence[bool], plan: TierPlan, trainable: Sequence[bool] | None = None
) -> list[Home]:
    """Return the tiers of every chunk.

    Args:
        sizes: bytes of each chunk's parameters, in model order.
        fixed: whether a chunk's parameters always stay on the device.
        plan: the fractions; under ``plan.auto`` parameters, gradients and state start on the host.
        trainable: whether a chunk has state and gradients, which the state fractions refer to; ``None``: all.
    """
    if plan.auto is not None:
        return [Home(Tier.DEVICE if stays else Tier.HOST, Tier.HOST) for stays in fixed]
    params = _tiers(sizes, plan.param_host_fraction, plan.param_disk_fraction)
    with_state = _with_state(sizes, trainable)
    states = _tiers(with_state, plan.state_host_fraction, plan.state_disk_fraction)
    return [
        Home(Tier.DEVICE if stays else param, state) for stays, param, state in zip(fixed, params, states, strict=True)
    ]


def _with_state(sizes: Sequence[int], trainable: Sequence[bool] | None) -> Sequence[int]:
    return sizes if trainable is None else [s if some else 0 for s, some in zip(sizes, trainable, strict=True)]


def missed_shares(
    sizes: Sequence[int], homes: Sequence[Home], plan: TierPlan, trainable: Sequence[bool] | None = None
) -> list[str]:
    """Return a line for each fraction of the plan that whole chunks miss by more than a tenth of the total.

    Args:
        sizes, trainable: the arguments of :func:`assign_homes`, which returned ``homes``.
    """
    if plan.auto is not None:
        return []
    lines = []
    for kind, weights in (("param", sizes), ("state", _with_state(sizes, trainable))):
        total = sum(weights)
        for tier in (Tier.HOST, Tier.DISK):
            name = f"{kind}_{tier.value}_fraction"
            share, places = getattr(plan, name), [getattr(home, kind) for home in homes]
            actual = sum(w for w, place in zip(weights, places, strict=True) if place is tier) / max(total, 1)
            if total and 0.0 < share < 1.0 and abs(actual - share) > NOTICEABLE:
                count = sum(w > 0 for w in weights)
                lines.append(
                    f"{name}={share:g}, but the actual fraction is {actual:.2g}: whole chunks are placed, and there "
                    f"are {count}. To come closer, make them smaller (min_chunk_size_m, reduce_bucket_size_in_m, or "
                    "chunk_numel of a packing)"
                )
    return lines
