"""Two hosts whose names stand for 127.0.1.1 in their own /etc/hosts, as Debian writes it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher_variables import without_launcher
from tests.support.hosts import ADDRESSES, WIRE, TwoHosts

PROGRAM = """
import torch
import torch.distributed as dist
from shardwise.core.mesh import init_distributed

try:
    init_distributed("cpu")
except ValueError as error:
    print("refused:", error)
else:
    sum = torch.ones(1)
    dist.all_reduce(sum)
    print("met:", sum.item())
"""


@pytest.mark.full
@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
def test_names_that_stand_for_a_loopback_address_are_refused_until_an_interface_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    common = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0]}
    inherited = without_launcher(os.environ)
    inherited.pop("GLOO_SOCKET_IFNAME", None)
    said, folder = dict[str, list[str]](), shlex.quote(str(tmp_path))
    with TwoHosts() as hosts:
        for port, named in enumerate(["", WIRE], 29631):
            runs = []
            for host, name in enumerate(hosts.names):
                names = tmp_path / name
                names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n", "utf-8")
                script = f'mount --bind {shlex.quote(str(names))} /etc/hosts && exec "$0" program.py'
                env = {**inherited, **common, "RANK": str(host), "MASTER_PORT": str(port)}
                env |= {"GLOO_SOCKET_IFNAME": named} if named else {}
                out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                runs.append(hosts.start(host, ["sh", "-c", f"cd {folder} && {script}", sys.executable], env, **out))
            said[named] = [run.communicate(timeout=200)[0] for run in runs]
    for text in said[""]:
        assert "refused: rank 0 on host-a would advertise 127.0.1.1" in text, text
        assert "set GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME, too) to the network interface" in text
        assert f"host-a has {WIRE}; host-b has {WIRE}" in text
    assert all("met: 2.0" in text for text in said[WIRE]), said[WIRE]
