"""The launchers of Lightning's processes (popen, spawn, torchrun): all end with the same weights.

A new interpreter takes 7 s of a core to import Lightning, so by default none is started: the script runs in a fork of
the rank pool's server, which has imported it, and so do the ranks of torchrun's agent and the command with which popen
starts the second rank.

``examples/lightning_strategies.py`` runs unchanged on ranks with torchrun's environment.
"""

import contextlib
import io
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning_program
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tests.support.lightning_setup  # noqa: F401  has the server import Lightning
from shardwise.testing import run_ranks
from tests.launcher_variables import without_launcher
from tests.support.launching import Forked, fork_rank, forked, printed, start
from tests.support.sets import campaign, full

PROGRAM = lightning_program.__file__
SECONDS = 120.0
LAUNCHERS = ["popen", "torchrun", "spawn"]
SET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def method(how: str) -> str:
    return "spawn" if how == "spawn" else "popen"


def _forked(command: list[str], env: dict[str, str], cwd: str | None) -> Forked:
    """Run Lightning's command for another rank in a fork, with the same arguments and environment."""
    assert command[0] == sys.executable and command[1] == PROGRAM and cwd is None, (command, cwd)
    return fork_rank(command[1:], env)


def _program(directory: str, how: str) -> None:
    os.setsid()  # all its processes can be ended together
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
    "launchers", [LAUNCHERS[:1], *full(LAUNCHERS[:2]), *campaign(LAUNCHERS)], ids=["one", "two", "all"]
)
def test_popen_spawn_and_torchrun_give_the_same_weights(tmp_path: Path, launchers: list[str]) -> None:
    """After spawned training the main process has the trained model, and writes the weights."""
    running = {}
    for how in launchers:
        (tmp_path / how).mkdir()
        running[how] = start(forked(_program, str(tmp_path / how), how))

    try:
        results = {}
        for how in launchers:
            running[how].join(SECONDS)
            assert running[how].exitcode == 0, (tmp_path / how / "output").read_text("utf-8", "replace")
            results[how] = torch.load(tmp_path / how / "result.pt", weights_only=True)
        for how, result in results.items():
            assert result["loss"] < 0.6, (how, result["loss"])
            for name, value in results[launchers[0]]["state"].items():
                assert torch.equal(value, result["state"][name]), (how, name)
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_strategies.py"
RANKS = 2


def _run(strategy: str, folder: str) -> str:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    launched |= {"TORCHELASTIC_RUN_ID": "example", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    arguments = ["--strategy", strategy, "--directory", folder, "--epochs", "2"]
    with (
        mock.patch.dict(os.environ, launched),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
    ):
        return printed(EXAMPLE, *arguments)[0]


@pytest.mark.parametrize("strategy", [*campaign("colossalai", "deepspeed"), "ddp_fully_sharded"])
def test_example_learns_under_each_strategy_and_leaves_one_checkpoint(strategy: str, tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, _run, strategy, str(tmp_path))
    found = re.search(rf"{strategy}: validation loss (\S+) -> (\S+); rank 0 keeps (\d+) of (\d+) bytes", first)
    assert found is not None, first
    before, after, kept, whole = map(float, found.groups())
    assert after < before and 0.5 * whole <= kept < 0.55 * whole
    (left,) = tmp_path.iterdir()
    assert left.is_dir() and left.name in first
    assert strategy not in second
