"""A few ranks killed at random moments of saves; ``make faults`` kills many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from tests.faults.kills import campaign
found = campaign(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
print(json.dumps({"lost": found.lost, **found.counts}))
"""


def run(count: int, seed: int, directory: Path) -> dict[str, object]:
    """In a process of its own: ranks are forked, which needs a process without torch's threads."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(count), str(seed), str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    found = run(10, 20, tmp_path)
    assert found["lost"] == [], found
    assert found["kills"] == 10 and int(str(found["saves"])) > 10, found
