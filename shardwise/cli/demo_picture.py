"""Where the bytes of the demo's training state are: followed during the run, drawn at its end."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.demo_tiers import MEMORY_MARKER
from shardwise.sizes import size_text
from shardwise.trace.picture import draw, kinds_of
from shardwise.trace.tiers_picture import draw_tiers, tiers_text

if TYPE_CHECKING:
    from shardwise.build import ShardedModule
    from shardwise.memory.ledger import DeviceMemoryError

__all__ = ["TierWatch", "held_text", "say_too_little"]

TIERS = ("device", "host", "disk")
HINT = (
    "Options of the demo for that: --offload-optim 1 --offload-params 1, a smaller --batch or --context, a smaller "
    "--size, a larger --device-memory, or --placement auto."
)


@dataclass
class TierWatch:
    """What one rank holds in each tier.

    Attributes:
        model: the sharded module.
        tiers: bytes by tier and kind, the last time it was looked at.
        losses: of every step, mean over ranks.
    """

    model: ShardedModule
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def look(self) -> list[float]:
        """Count now (best between backward and the step, when gradients are there): the most that the device held so
        far, and what is on the host and on disk."""
        report = self.model.memory()
        self.tiers = {tier: dict(report.by_tier.get(tier, {})) for tier in TIERS}
        device = report.device_peak_bytes or report.tier_bytes("device")
        return [float(device), float(report.tier_bytes("host")), float(report.tier_bytes("disk"))]

    def at_peak(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and kind, the device's at the fullest moment of the last step that was recorded."""
        stats = self.model.memory_stats()
        if stats is None or not stats.moments:
            return self.tiers
        moment = stats.moments[stats.peak_index]
        return self.tiers | {"device": {kind: size for kind, size in kinds_of(moment).items() if size}}

    def write(self, out: Path, unsharded_bytes: int) -> list[str]:
        """Write ``memory.json`` (bytes and losses), ``memory-tiers.svg`` and, where a step was recorded,
        ``memory-step.svg`` into ``out``; returns their names."""
        report, stats = self.model.memory(), self.model.memory_stats()
        facts = {
            "device_capacity_bytes": report.device_capacity_bytes,
            "device_peak_bytes": report.device_peak_bytes,
            "unsharded_bytes": unsharded_bytes,
            "tiers": self.at_peak(),
            "losses": self.losses,
        }
        title = f"Where the bytes of one rank are (an unsharded run needs {size_text(unsharded_bytes)})"
        files = {
            "memory.json": json.dumps(facts, indent=1) + "\n",
            "memory-tiers.svg": draw_tiers(self.at_peak(), self._capacities(), title),
        }
        if stats is not None:
            files["memory-step.svg"] = draw(stats, "One training step on one rank's device")
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
        return list(files)

    def text(self, width: int) -> str:
        """Bars for a terminal."""
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        return tiers_text(self.at_peak(), self._capacities(), width, ascii_only=not encoding.startswith("utf"))

    def _capacities(self) -> dict[str, int | None]:
        return {"device": self.model.memory().device_capacity_bytes}


def held_text(device: float, host: float, disk: float) -> str:
    """``device 61.2 MiB, host 130 MiB, disk 0 B``."""
    return f"device {size_text(device)}, host {size_text(host)}, disk {size_text(disk)}"


def say_too_little(out: str, problem: DeviceMemoryError) -> None:
    """Print the accounts, on the first rank that comes here."""
    try:
        os.close(os.open(Path(out, MEMORY_MARKER), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    print(f"shardwise demo: error: too little device memory: {problem}\n{HINT}", file=sys.stderr, flush=True)
