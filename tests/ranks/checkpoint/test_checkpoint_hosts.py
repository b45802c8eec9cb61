"""Two hosts: a folder that only one of them has, and a host that is lost while both train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.testing.hosts import ADDRESSES, TwoHosts

TRAINS = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import shardwise

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
session = shardwise.shard(model, torch.optim.AdamW(model.parameters()), stage=3)

def step():
    session.backward(session.module(torch.ones(2, 8) * (rank + 1)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()
"""
SAVES = """
step()
for act in (session.checkpoints.save, session.checkpoints.load):
    try:
        act(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("done", flush=True)
step()
print("trains on", sorted(os.listdir(sys.argv[1])), flush=True)
"""
GOES_ON = """
step()
print("trains", flush=True)
try:
    while True:
        step()
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.stdout.flush()
    os._exit(0)
"""

pytestmark = pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))


def started(hosts: TwoHosts, program: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """A rank on each host, as a scheduler starts them."""
    runs = []
    common = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29651"}
    for host in (0, 1):
        env = {**os.environ, **common, "RANK": str(host)}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        runs.append(hosts.start(host, [sys.executable, "-u", "-c", TRAINS + program, *arguments], env, **out))
    return runs


def test_a_folder_that_only_one_host_has_is_named_and_training_goes_on(tmp_path: Path) -> None:
    with TwoHosts(apart=tmp_path) as hosts:
        said = [run.communicate(timeout=200)[0] for run in started(hosts, SAVES, str(tmp_path), "120")]
    for text in said:
        assert "CheckpointError rank 1 could not write its part" in text, text
        assert "is not there on this rank's host (host-b): give a directory on storage that all hosts share" in text
        assert "FileNotFoundError" in text and "no checkpoint in" in text
        assert "trains on []" in text


def test_a_lost_host_is_an_error_on_each_within_the_time_out() -> None:
    with TwoHosts() as hosts:
        runs = started(hosts, GOES_ON, "none", "10")
        for run in runs:
            assert run.stdout is not None
            while "trains" not in (line := run.stdout.readline()):
                assert line, "it ended"
        hosts.cut()
        said = [run.communicate(timeout=100)[0] for run in runs]
    for rank, text in enumerate(said):
        assert "PeerError" in text and f"rank {1 - rank}" in text, text
