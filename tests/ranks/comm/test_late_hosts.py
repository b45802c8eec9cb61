"""How often ranks of two hosts wait for the wire: in a meeting, a reduction and a step, two ranks on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.testing.hosts import TwoHosts

HERE = Path(__file__).parent
WAY_S = 0.15
SETTLE_S = 10.5
"""TCP may send by the shortest trip of the last ten seconds."""
WAYS = {"a meeting": 1, "a longer meeting": 1, "a reduce_scatter": 1, "an all_reduce": 2, "a step": 4}
"""Ways of the wire, two of which are a trip: parameters are asked for and come; two meetings."""


@pytest.mark.skipif(TwoHosts.why_not(late=True) is not None, reason=str(TwoHosts.why_not(late=True)))
def test_ways_of_the_wire(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    program = [str(HERE / "late_hosts_program.py"), str(tmp_path), str(WAY_S)]
    with TwoHosts(delay_s=1e-4) as hosts:
        where = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts.names[0]}", "--master-port=29579"]
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        runs = [hosts.start(host, [*command, f"--node-rank={host}", *program], env, **output) for host in (0, 1)]
        until = time.monotonic() + 120.0
        while len(list(tmp_path.glob("ready*"))) < 4 and time.monotonic() < until and runs[0].poll() is None:
            time.sleep(0.1)
        hosts.change(WAY_S, None)
        time.sleep(SETTLE_S)
        (tmp_path / "late").touch()
        told = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(told)
    seconds: dict[str, float] = json.loads(next(line for line in told[0].splitlines() if line.startswith("{")))
    ways = {what: found / WAY_S for what, found in seconds.items()}
    assert ways.keys() == WAYS.keys()
    for what, found in ways.items():
        # Not less: it is a wire. What the machine needs besides is less than the way that would be one more.
        assert WAYS[what] - 0.05 < found < WAYS[what] + 0.9, ways
