"""HybridParallelPlugin under torchrun on two hosts: two ranks on each, in network namespaces joined by a wire."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import TwoHosts

HERE = Path(__file__).parent


@pytest.mark.campaign
@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
def test_layers_are_cut_inside_a_host_and_the_rest_is_across() -> None:
    paths = [str(HERE.parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with TwoHosts() as hosts:
        where = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts.names[0]}", "--master-port=29577"]
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        program = str(HERE / "hosts_program.py")
        runs = [
            hosts.start(
                host, [*command, f"--node-rank={host}", program], env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for host in (0, 1)
        ]
        told = [run.communicate(timeout=300)[0] for run in runs]
    for host, (run, text) in enumerate(zip(runs, told, strict=True)):
        assert run.returncode == 0, text
        assert text.count(f"on host-{'ab'[host]}: equal to plain PyTorch") == 2
