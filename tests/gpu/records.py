"""What became of each test, in a file that is complete after every one of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

LONGEST_DETAIL = 2000


class Records:
    """Outcomes by test. Rewritten as JSON at ``path`` whenever a test begins or ends, so that a run that is killed
    says how far it came and where it was.

    Args:
        path: the file, or ``None`` for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._running = ""
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        """By test, the end of what it printed."""
        self.skipped: Counter[str] = Counter()
        """How many, by reason."""
        self.seconds: dict[str, float] = {}

    def begin(self, test: str) -> None:
        """``test`` is the one to blame if nothing more is written."""
        self._running = test
        self._write()

    def end(self, test: str, outcome: str, seconds: float, detail: str = "") -> None:
        """``outcome``: ``"passed"``, ``"failed"`` (with what it printed) or ``"skipped"`` (with the reason)."""
        self._running = ""
        self.seconds[test] = round(seconds, 2)
        if outcome == "failed":
            self.failed[test] = detail[-LONGEST_DETAIL:]
        elif outcome == "skipped":
            self.skipped[detail] += 1
        else:
            self.passed.append(test)
        self._write()

    @property
    def line(self) -> str:
        """What one says of the run, the failures first."""
        counts = [(len(self.failed), "failed"), (sum(self.skipped.values()), "skipped"), (len(self.passed), "passed")]
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "no test"

    def _write(self) -> None:
        if self._path is None:
            return
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:5]
        data = {
            "line": self.line,
            "failed": self.failed,
            "running": self._running,
            "skipped": dict(self.skipped),
            "passed": len(self.passed),
            "slowest": dict(slowest),
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(data), "utf-8")
        os.replace(partial, self._path)
