"""The benchmark of the host's time runs, and counts what a step calls."""

from __future__ import annotations

import pytest
from program_setup import python


@pytest.mark.full
def test_every_system_takes_steps() -> None:
    given = ["--ranks", "2", "--blocks", "2", "--rounds", "1"]
    done = python("-W", "ignore", "-m", "benchmarks.host", *given)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    calls = {row[3].strip(): int(row[6]) for row in rows}
    assert list(calls) == ["the model alone", "shardwise zero3", "torch FSDP2"]
    assert calls["the model alone"] < min(calls["shardwise zero3"], calls["torch FSDP2"])
