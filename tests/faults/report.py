"""Counts of a part of the fault campaign, and what was lost."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """Counts and losses; ``lost`` is empty if everything is right, and each entry names the trial and the loss."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{what} {count}" for what, count in self.counts.items())
        lines = [f"{self.name}: {counts}; lost {len(self.lost)}"]
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join([*lines, *(f"  LOST {each}" for each in self.lost)])
