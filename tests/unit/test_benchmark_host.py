"""The benchmark of the host's time runs, and counts what a step calls."""

from __future__ import annotations

import subprocess
import sys


def test_every_system_takes_steps() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host"]
    given = ["--ranks", "2", "--blocks", "2", "--rounds", "1"]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    calls = {row[3].strip(): int(row[6]) for row in rows}
    assert list(calls) == ["the model alone", "shardwise zero3", "torch FSDP2"]
    assert calls["the model alone"] < min(calls["shardwise zero3"], calls["torch FSDP2"])
