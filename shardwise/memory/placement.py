"""Which chunk is at home where: a pure function of sizes and shares.

Source: ZeRO-Infinity's per-tensor placement (arXiv 2104.07857, section 5) and Gemini's offload fractions, chosen per
chunk. The chunks of a tier are spread evenly over the model, so that transfers are spread evenly over a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.memory.tier import Tier
from shardwise.plan import TierPlan

__all__ = ["Home", "assign_homes"]


@dataclass(frozen=True)
class Home:
    """The tiers of one chunk: of its parameter shard, of its masters and optimizer state, of its reduced gradient."""

    param: Tier
    state: Tier

    @property
    def grad(self) -> Tier:
        """Gradients wait where their update reads them; for a state on disk that is the host."""
        return Tier.DEVICE if self.state is Tier.DEVICE else Tier.HOST


def _spread(sizes: Sequence[int], share: float) -> list[bool]:
    """Choose about ``share`` of the total, evenly over the sequence; 0 chooses nothing and 1 everything."""
    chosen, seen, taken = [], 0, 0
    for size in sizes:
        seen += size
        # Rounded to the nearest size; the small term keeps a share of 1.0, summed in floating point, at everything.
        take = share > 0.0 and taken + size / 2 <= share * seen * (1 + 1e-9)
        chosen.append(take)
        taken += size if take else 0
    return chosen


def _tiers(sizes: Sequence[int], host: float, disk: float) -> list[Tier]:
    away = _spread(sizes, min(host + disk, 1.0))
    on_disk = iter(_spread([s for s, gone in zip(sizes, away, strict=True) if gone], disk / (host + disk or 1.0)))
    return [(Tier.DISK if next(on_disk) else Tier.HOST) if gone else Tier.DEVICE for gone in away]


def assign_homes(sizes: Sequence[int], fixed: Sequence[bool], plan: TierPlan) -> list[Home]:
    """The home of every chunk.

    Args:
        sizes: bytes of each chunk's parameters, in model order.
        fixed: chunks whose parameters always stay on the device.
        plan: the shares; under ``plan.auto`` parameters, gradients and state start on the host, whatever the shares.
    """
    if plan.auto is not None:
        return [Home(Tier.DEVICE if stays else Tier.HOST, Tier.HOST) for stays in fixed]
    params = _tiers(sizes, plan.param_host_fraction, plan.param_disk_fraction)
    states = _tiers(sizes, plan.state_host_fraction, plan.state_disk_fraction)
    return [
        Home(Tier.DEVICE if stays else param, state) for stays, param, state in zip(fixed, params, states, strict=True)
    ]
