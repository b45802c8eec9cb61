"""How often ranks of two hosts wait for the wire: in a meeting, a reduction and a step, two ranks on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from launching import SECONDS, UNSET

from tests.support import hosts as hosts_module
from tests.support import wire
from tests.support.hosts import WIRE, TwoHosts

HERE = Path(__file__).parent
RANKS = 4
WAYS = {"a meeting": 1, "a longer meeting": 1, "a reduce_scatter": 1, "an all_reduce": 2, "a step": 4}
"""Ways of the wire, two of which are a trip: parameters are asked for and come; two meetings."""
ROUTE = ["10.213.7.0/24", "dev", WIRE, "congctl", "reno", "rto_min", "60s", "initcwnd", "1000", "initrwnd", "1000"]
"""TCP sends nothing twice while packets are held, and has room for all that is sent at once."""


def wait_for(folder: Path, pattern: str, runs: Sequence[subprocess.Popen[str]]) -> None:
    """Until each rank has made its file, or one has ended."""
    until = time.monotonic() + SECONDS
    while len(list(folder.glob(pattern))) < RANKS and all(run.poll() is None for run in runs):
        assert time.monotonic() < until, f"no {pattern} from each rank"
        time.sleep(0.05)


@pytest.mark.campaign
@pytest.mark.skipif(TwoHosts.why_not(late=True) is not None, reason=str(TwoHosts.why_not(late=True)))
def test_ways_of_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "rounds"
    words.write_bytes(bytes(16))
    monkeypatch.setenv("ROUNDS_FILE", str(words))
    monkeypatch.setenv("WIRE_FILE", wire.__file__)
    env = {name: value for name, value in os.environ.items() if name not in (*UNSET, "GLOO_SOCKET_IFNAME")}
    env |= {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    program = [str(HERE / "late_hosts_program.py"), str(tmp_path)]
    in_rounds = SimpleNamespace(__file__=str(HERE / "rounds_wire.py"))
    with mock.patch.object(hosts_module, "wire", in_rounds), TwoHosts(delay_s=1e-4) as hosts:
        for host in (0, 1):
            assert hosts.start(host, ["ip", "route", "change", *ROUTE]).wait(SECONDS) == 0
        where = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts.names[0]}", "--master-port=29579"]
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        runs = [hosts.start(host, [*command, f"--node-rank={host}", *program], env, **output) for host in (0, 1)]
        for file, then in (("ready", "in rounds"), ("counted", "at once")):
            wait_for(tmp_path, f"{file}*", runs)
            hosts.change(0.0, None)
            (tmp_path / then).touch()
        told = [run.communicate(timeout=SECONDS)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(told)
    found = [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    ways = {}
    for what in WAYS:
        tries = list(zip(*(of_rank[what] for of_rank in found), strict=True))
        ways[what] = min(max(end for _, end in each) - min(begin for begin, _ in each) for each in tries)
    assert ways == WAYS
