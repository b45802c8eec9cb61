"""The one file that a run on a GPU leaves: facts of the machine, and for each part what it found. Needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Facts", "Outcome", "Results", "ResultsError"]

FORMAT = 1


class ResultsError(ValueError):
    """The file is none, or of another machine."""


@dataclass(frozen=True)
class Facts:
    """What the figures are of.

    Attributes:
        device: name of the GPU, or of the processor in a stand-in.
        device_bytes, host_bytes, disk_bytes: what is free on the device (0 in a stand-in), the host and the disk.
        gpus: how many are visible.
        torch, python: versions.
        stand_in: there is no GPU: tiny models on the CPU, whose figures mean nothing but that everything runs.
    """

    device: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    gpus: int
    torch: str
    python: str
    stand_in: bool


@dataclass
class Outcome:
    """One part.

    Attributes:
        command: as a shell takes it.
        seconds: how long it ran, all tries together.
        figures: what it measured; ``line`` in it is what one says of it.
        error: why it failed; empty where it did not.
        skipped: why it was not run.
        cut: how often a call ended while it ran: by its own limit, or by whatever killed it.
        date, commit: of when it ended.
    """

    command: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    cut: int = 0
    date: str = ""
    commit: str = ""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run."""
        return bool(self.date)


class Results:
    """All outcomes by name, in order; written whole after each change.

    Raises:
        ResultsError: ``path`` holds something else, or the results of another device or torch.
    """

    def __init__(self, path: Path, facts: Facts, fresh: bool) -> None:
        self.path, self.facts = path, facts
        self.outcomes: dict[str, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not fresh:
            self._read()

    @classmethod
    def load(cls, path: Path) -> Results:
        """What is at ``path``, whatever machine it is of."""
        try:
            facts = Facts(**json.loads(path.read_text())["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}: not the results of a run ({error})") from error
        return cls(path, facts, fresh=False)

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text())
            facts = Facts(**data["facts"])
            outcomes = {name: Outcome(**fields) for name, fields in data["parts"].items()}
            known = data["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(
                f"{self.path}: not the results of a run ({error}); give --fresh to replace it"
            ) from error
        if not known:
            raise ResultsError(f"{self.path}: format {data['format']}, not {FORMAT}; give --fresh to replace it")
        for name in ("device", "torch", "stand_in"):
            then, now = getattr(facts, name), getattr(self.facts, name)
            if then != now:
                raise ResultsError(
                    f"{self.path}: {name} was {then!r} and is {now!r}; give --fresh to start anew, or another --json"
                )
        self.outcomes = outcomes

    def put(self, name: str, outcome: Outcome) -> None:
        """Keep it, on the disk too."""
        self.outcomes[name] = outcome
        data = {
            "format": FORMAT,
            "facts": asdict(self.facts),
            "seconds": round(self.seconds, 1),
            "parts": {each: asdict(found) for each, found in self.outcomes.items()},
        }
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(data, indent=1))
        os.replace(partial, self.path)

    @property
    def seconds(self) -> float:
        """Of all parts so far."""
        return sum(outcome.seconds for outcome in self.outcomes.values())
