"""The ways in which Lightning's processes start; they end with the same weights.

An interpreter of its own has Lightning after 7 s of a core, so by default none is started: the script itself runs in a
fork of the server behind the rank pool, which has imported all of it, and so do the ranks of torchrun's agent and the
command with which popen starts the second rank. The campaign starts whole scripts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_program
import pytest
import torch
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tests.support.lightning_setup  # noqa: F401  has the server import Lightning
from tests.launcher_variables import without_launcher
from tests.support.launching import Forked, fork_rank, forked, start
from tests.support.sets import campaign, full

PROGRAM = lightning_program.__file__
SECONDS = 120.0
RENDEZVOUS = ["--standalone", "--local-addr=127.0.0.1"]  # a machine's own name may have no address
COMMANDS = {
    "popen": [sys.executable, PROGRAM],
    "spawn": [sys.executable, PROGRAM],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, "--nproc-per-node=2", PROGRAM],
}
SET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def method(how: str) -> str:
    return "spawn" if how == "spawn" else "popen"


def check(directory: Path, ways: list[str], outputs: Callable[[str], tuple[Any, str]]) -> None:
    results = {}
    for how in ways:
        code, output = outputs(how)
        assert code == 0, f"{how}:\n{output}"
        results[how] = torch.load(directory / how / "result.pt", weights_only=True)
    for how, result in results.items():
        assert result["loss"] < 0.6, (how, result["loss"])
        for name, value in results[ways[0]]["state"].items():
            assert torch.equal(value, result["state"][name]), (how, name)


# ---- from a process that has imported everything


def _forked(command: list[str], env: dict[str, str], cwd: str | None) -> Forked:
    """Lightning's command for another rank, in a fork: same arguments, same environment."""
    assert command[0] == sys.executable and command[1] == PROGRAM and cwd is None, (command, cwd)
    return fork_rank(command[1:], env)


def _program(directory: str, how: str) -> None:
    os.setsid()  # all that it starts can be ended together
    with open(f"{directory}/output", "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]
    os.environ |= SET
    sys.argv = [PROGRAM, directory, method(how)]  # of the processes that popen starts
    subprocess_script.subprocess = SimpleNamespace(Popen=_forked)
    if how == "torchrun":
        where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
        config = LaunchConfig(1, 1, 2, start_method="fork", **where)  # type: ignore[arg-type]
        elastic_launch(config, lightning_program.main)(directory, "popen")
    else:
        lightning_program.main(directory, method(how))


@pytest.mark.parametrize(
    "launchers", [["popen"], *full(["popen", "torchrun"]), *campaign(list(COMMANDS))], ids=["one", "two", "all"]
)
def test_popen_spawn_and_torchruns_agent_give_the_same_weights(tmp_path: Path, launchers: list[str]) -> None:
    """After spawned training the main process has the trained model: it writes the weights."""
    running = {}
    for how in launchers:
        (tmp_path / how).mkdir()
        running[how] = start(forked(_program, str(tmp_path / how), how))

    def ended(how: str) -> tuple[Any, str]:
        running[how].join(SECONDS)
        return running[how].exitcode, (tmp_path / how / "output").read_text("utf-8", "replace")

    try:
        check(tmp_path, launchers, ended)
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


# ---- whole scripts


@pytest.mark.campaign
def test_scripts_give_the_same_weights_under_every_launcher(tmp_path: Path) -> None:
    environment = without_launcher(os.environ) | SET
    running = {}
    for how, command in COMMANDS.items():
        (tmp_path / how).mkdir()
        running[how] = subprocess.Popen(
            [*command, str(tmp_path / how), method(how)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def ended(how: str) -> tuple[Any, str]:
        output, _ = running[how].communicate(timeout=SECONDS)
        return running[how].returncode, output

    check(tmp_path, list(COMMANDS), ended)
