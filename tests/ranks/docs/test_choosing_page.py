"""The memory table of docs/choosing.md against the memory of two ranks, and the commands of docs/multi-node.md.

The commands run as printed, with scripts in the place of srun, scontrol and mpirun, on one machine.
"""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import ROOT, fences
from torch import nn

import shardwise
from shardwise.core.mesh.launch import LaunchFacts
from tests.launcher_variables import without_launcher
from tests.support.on_ranks import on_ranks

RANKS, WORDS, WIDTH = 2, 2048, 64
PAGE = Path(__file__).resolve().parents[3] / "docs" / "choosing.md"
LARGEST = WORDS * WIDTH
OTHER = ("gathered parameters", "idle arrays")
CASES = [(precision, stage, where) for precision in ("bf16", None) for stage, where in ((1, ""), (2, ""), (3, ""))]
CASES += [("bf16", 3, "host"), (None, 3, "host")]


def made() -> nn.Module:
    """Return a model whose parameters are nearly all in the embedding and the head."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS, bias=False))


def held(precision: str | None, stage: int, where: str) -> tuple[int, int, int]:
    """Return bytes in the backward pass of the second step: on the device, gathered or idle ones, and on the host."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    session = shardwise.shard(model, optimizer, stage=stage, precision=precision, offload=where or None)
    for _ in range(2):
        session.backward(session.module(torch.arange(8)).float().sum())
        memory = session.memory()
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.close()
    device, host = memory.by_tier["device"], memory.by_tier["host"].get("update scratch", 0)
    other = sum(device.get(kind, 0) for kind in OTHER)
    return memory.tier_bytes("device") - device.get("update scratch", 0), other, memory.tier_bytes("host") - host


def _bytes(cell: str, numel: int) -> float:
    return sum(int(each) * numel / (RANKS if divided else 1) for each, divided in re.findall(r"(\d+) P(/N)?", cell))


@on_ranks(RANKS)
@pytest.mark.full
def test_memory_table_equals_measured_memory() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `stage=")]
    table = {cells[0].strip(): cells[1:] for cells in rows if len(cells) == 4}
    numel = sum(param.numel() for param in made().parameters())
    for case in CASES:
        precision, stage, where = case
        device, other, host = held(*case)
        mixed, single, beside = table[f'`stage={stage}, offload="host"`' if where else f"`stage={stage}`"]
        element = 1 if precision else 2  # in units of 16 bits
        exchanged = int((re.findall(r"(\d+) bytes x the largest layer", beside) or [0])[0]) * element * LARGEST
        state = 0.0 if where else _bytes(mixed if precision else single, numel)
        # The two small layers have buffers, too, and chunks have padding.
        assert device - other == pytest.approx(state + exchanged, abs=0.04 * element * 2 * numel), case
        assert other <= (3 * 2 * element * LARGEST if stage == 3 else 0), case
        assert host == pytest.approx(_bytes(mixed, numel) if where else 0, rel=0.01, abs=1000), case


PROGRAM = """
import json, os
known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "GLOO_", "NCCL_")
found = {name: value for name, value in os.environ.items() if name.startswith(known)}
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""
PYTHON = f'exec "{sys.executable}" -W ignore'
LAUNCHER = """
import os, subprocess, sys
kind, *words = sys.argv[1:]
given, count, each = {}, int(os.environ.get("TASKS", "0")), int(os.environ.get("TASKS_PER_NODE", "1"))
while words[0].startswith("-"):  # of mpirun
    option, value, *words = words
    if option == "-x":
        given.update([value.split("=", 1)])
    else:
        assert option == "-np", option
        count = int(value)
def names(task):
    if kind == "mpirun":
        world = {"RANK": task, "SIZE": count, "LOCAL_RANK": task, "LOCAL_SIZE": count}
        return {f"OMPI_COMM_WORLD_{name}": value for name, value in world.items()}
    place = {"PROCID": task, "LOCALID": task % each, "NODEID": task // each, "NTASKS": count}
    return {f"SLURM_{name}": value for name, value in place.items()} | {
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{count // each})"}
variables = [{name: str(value) for name, value in names(task).items()} for task in range(count)]
tasks = [subprocess.Popen(words, env={**os.environ, **given, **own}) for own in variables]
sys.exit(max(task.wait() for task in tasks))
"""
STAND_INS = {
    "python": f'{PYTHON} "$@"',
    "shardwise": f'{PYTHON} -m shardwise "$@"',
    "torchrun": f'{PYTHON} -m torch.distributed.run "$@"',
    "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
    **{kind: f'{PYTHON} "$(dirname "$0")/launcher.py" {kind} "$@"' for kind in ("srun", "mpirun")},
}
SMALLER = (("node-0", "127.0.0.1"), ("--nproc 8", "--nproc 2"), ("per-node 8", "per-node 1"), ("-np 16", "-np 2"))


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Create a folder with a program; return the environment in which commands use the scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "finetune.py").write_text(PROGRAM, "utf-8")
    (folder / "launcher.py").write_text(LAUNCHER, "utf-8")
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        (folder / name).chmod(stat.S_IRWXU)
    inherited = without_launcher(os.environ)
    outside = {name: value for name, value in inherited.items() if not name.startswith(("GLOO_", "NCCL_"))}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return outside | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def block(first: str, number: int = 0) -> str:
    """Return a block of the page, changed to two ranks on this machine and to a free port."""
    found = [fence.text for fence in fences("docs/multi-node.md") if fence.first.startswith(first)][number]
    for printed, instead in SMALLER:
        found = found.replace(printed, instead)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return found.replace("29500", str(free.getsockname()[1]))


def run(texts: list[str], cluster: dict[str, str], folder: Path, **variables: str) -> list[dict[str, str]]:
    """Run shell commands at the same time; return the environment of each rank, by rank."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pipes |= {"encoding": "utf-8", "errors": "replace", "cwd": folder, "env": cluster | variables}
    shells = [subprocess.Popen(["bash", "-e", "-c", text], **pipes) for text in texts]
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
def test_torchrun_and_shardwise_run(cluster: dict[str, str], tmp_path: Path) -> None:
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
