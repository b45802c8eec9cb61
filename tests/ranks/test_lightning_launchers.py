"""The three ways in which Lightning's processes start, each once; they end with the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = str(Path(__file__).with_name("lightning_program.py"))
COMMANDS = {
    "popen": [sys.executable, PROGRAM],
    "spawn": [sys.executable, PROGRAM],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM],
}


def start(directory: Path, how: str) -> subprocess.Popen[str]:
    directory.mkdir()
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    method = "spawn" if how == "spawn" else "popen"
    command = [*COMMANDS[how], str(directory), method]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def check(directory: Path, ways: list[str]) -> None:
    results = {}
    running = {how: start(directory / how, how) for how in ways}
    for how, process in running.items():
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, f"{how}:\n{output}"
        results[how] = torch.load(directory / how / "result.pt", weights_only=True)
    for how, result in results.items():
        assert result["loss"] < 0.6, (how, result["loss"])
        for name, value in results["popen"]["state"].items():
            assert torch.equal(value, result["state"][name]), (how, name)


def test_script_that_starts_its_own_ranks(tmp_path: Path) -> None:
    check(tmp_path, ["popen"])


@pytest.mark.campaign
def test_every_launcher_gives_the_same_weights(tmp_path: Path) -> None:
    check(tmp_path, list(COMMANDS))
