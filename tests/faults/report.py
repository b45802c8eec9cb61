"""What a part of the fault campaign counted, and what it found lost."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """``lost`` is empty where everything is as it should be; each entry says what happened in which trial."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{what} {count}" for what, count in self.counts.items())
        lines = [f"{self.name}: {counts}; lost {len(self.lost)}"]
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join([*lines, *(f"  LOST {each}" for each in self.lost)])
