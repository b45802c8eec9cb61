"""Commands of the page of clusters, run as they are printed: srun, scontrol and mpirun are stand-ins on one machine."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, fences

from shardwise.core.mesh.launch import LaunchFacts
from tests.launcher_variables import without_launcher

PROGRAM = """
import json, os
known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "GLOO_", "NCCL_")
found = {name: value for name, value in os.environ.items() if name.startswith(known)}
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""
PYTHON = f'exec "{sys.executable}" -W ignore'
SRUN = """
import os, subprocess, sys
count, each = int(os.environ["TASKS"]), int(os.environ["TASKS_PER_NODE"])
nodes = count // each
common = {"SLURM_NTASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})"}
tasks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, **common, "SLURM_PROCID": str(task),
                     "SLURM_LOCALID": str(task % each), "SLURM_NODEID": str(task // each)})
    for task in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""
MPIRUN = """
import os, subprocess, sys
words, given = sys.argv[1:], {}
while words[0].startswith("-"):
    option, value, *words = words
    if option == "-x":
        given.update([value.split("=", 1)])
    else:
        assert option == "-np", option
        count = int(value)
names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
tasks = [
    subprocess.Popen(words, env={**os.environ, **given, **{f"OMPI_{name}": str(value) for name, value in
                     zip(names, (task, count, task, count))}})
    for task in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""
STAND_INS = {
    "python": f'{PYTHON} "$@"',
    "shardwise": f'{PYTHON} -m shardwise "$@"',
    "torchrun": f'{PYTHON} -m torch.distributed.run "$@"',
    "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
    "srun": f'{PYTHON} "$(dirname "$0")/srun.py" "$@"',
    "mpirun": f'{PYTHON} "$(dirname "$0")/mpirun.py" "$@"',
}
SMALLER = (("node-0", "127.0.0.1"), ("--nproc 8", "--nproc 2"), ("per-node 8", "per-node 1"), ("-np 16", "-np 2"))


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A folder with a program in it, and the environment in which commands find the stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "finetune.py").write_text(PROGRAM, "utf-8")
    for name, text in (("srun.py", SRUN), ("mpirun.py", MPIRUN)):
        (folder / name).write_text(text, "utf-8")
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        (folder / name).chmod(stat.S_IRWXU)
    inherited = without_launcher(os.environ)
    outside = {name: value for name, value in inherited.items() if not name.startswith(("GLOO_", "NCCL_"))}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return outside | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def block(first: str, number: int = 0) -> str:
    """A block of the page, for as many ranks as fit here and at a port of its own."""
    found = [fence.text for fence in fences("docs/multi-node.md") if fence.first.startswith(first)][number]
    for printed, instead in SMALLER:
        found = found.replace(printed, instead)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return found.replace("29500", str(free.getsockname()[1]))


def run(texts: list[str], cluster: dict[str, str], folder: Path, **variables: str) -> list[dict[str, str]]:
    """Run texts of a shell at the same time; what each rank's environment was, by rank."""
    shells = [
        subprocess.Popen(
            ["bash", "-e", "-c", text],
            cwd=folder,
            env=cluster | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        for text in texts
    ]
    for text, shell in zip(texts, shells, strict=True):
        said, _ = shell.communicate(timeout=300)
        assert shell.returncode == 0, f"{text}\n{said}"
    ranks = sorted(folder.glob("rank-*.json"))
    found = [json.loads(each.read_text("utf-8")) for each in ranks]
    for each in ranks:
        each.unlink()
    facts = [LaunchFacts.read(each) for each in found]
    assert [each.rank for each in facts] == list(range(len(ranks))) and len(ranks) == 2
    assert all(each.world_size == 2 and each.launched for each in facts)
    assert all(each["MASTER_ADDR"] and each["MASTER_PORT"].isdecimal() for each in found)
    return found


@pytest.mark.full
def test_one_node_and_several(cluster: dict[str, str], tmp_path: Path) -> None:
    one = block("shardwise run --nproc").replace("per-node 1", "per-node 2").splitlines()
    assert len(one) == 2
    for line in one:
        found = run([line], cluster, tmp_path)
        assert [LaunchFacts.read(each).local_rank for each in found] == [0, 1]
    run(block("torchrun --nnodes 2").splitlines(), cluster, tmp_path)
    run([block("shardwise run --nnodes 2").replace("--nproc 2", "--nproc 1")] * 2, cluster, tmp_path)


@pytest.mark.full
def test_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]"}
    found = run([block("#!/bin/bash")], cluster, tmp_path, **job, TASKS="2", TASKS_PER_NODE="1")
    assert all(each["GLOO_SOCKET_IFNAME"] == each["NCCL_SOCKET_IFNAME"] == "ib0" for each in found)
    found = run([block("#!/bin/bash", 1)], cluster, tmp_path, **job, TASKS="2", TASKS_PER_NODE="2")
    assert [each.local_rank for each in map(LaunchFacts.read, found)] == [0, 1]
    assert all(each["MASTER_ADDR"] == "127.0.0.1" and "LOCAL_RANK" not in each for each in found)


def test_mpi(cluster: dict[str, str], tmp_path: Path) -> None:
    found = run([block("mpirun")], cluster, tmp_path)
    assert [LaunchFacts.read(each).local_rank for each in found] == [0, 1]
