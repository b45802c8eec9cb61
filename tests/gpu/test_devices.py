"""Tests of the choice of a device and of training when the model's device is not the current one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.counting import no_current_device
from gpu.on_device import Stack, device_of_rank, one_step, rows_of, session_of
from gpu.test_tiers import HOST, tiered
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]
PLANS = {
    "device": zero(3, torch.bfloat16),
    "zero2": zero(2, torch.bfloat16),
    "state_host": tiered(zero(3, torch.bfloat16), (0.0, 0.0), (1.0, 0.0), None),
    "all_host": tiered(zero(3, torch.bfloat16), *HOST, None).but(prefetch=2),
    "early": tiered(zero(3, torch.bfloat16), *HOST, None).but(update="backward"),
    "declared": tiered(zero(3), *HOST, None).but(device_capacity_bytes=2**30),
}


def losses(plan: Plan, device_name: str, current: int) -> list[float]:
    """Return the losses of five steps with the model on one device while another is current."""
    device_of_rank("cuda")
    torch.cuda.set_device(current)
    device, found = torch.device(device_name), []
    with session_of(plan, device, Stack(512, 6)) as session:
        rows = rows_of(512, 1, device, 64)
        with no_current_device():
            for _ in range(5):
                torch.cuda._sleep(5_000_000)
                found.append(float(one_step(session, rows)))
        assert torch.cuda.current_device() == current, "training has changed the current device"
    return found


@pytest.mark.gpus(1)
@pytest.mark.parametrize("plan", PLANS)
def test_streams_belong_to_the_models_device(one_rank: RankPool, plan: str) -> None:
    """With one GPU only the use of an implicit device can be detected: each stream must be requested for a device."""
    (found,) = one_rank.run(losses, PLANS[plan], "cuda:0", 0, timeout=120.0)
    assert found[-1] < found[0]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("plan", PLANS)
def test_training_while_another_device_is_current(one_rank: RankPool, plan: str) -> None:
    there, here = (one_rank.run(losses, PLANS[plan], f"cuda:{at}", 0, timeout=120.0)[0] for at in (1, 0))
    assert there == here and there[-1] < there[0]


TRAIN = str(Path(__file__).with_name("train_one_gpu.py"))
CHOOSE = "from shardwise.core.mesh import default_device; print(default_device())"
NO_WARNING = "import warnings; from shardwise.core.mesh import default_device; warnings.simplefilter('error'); {}"
"""Warnings become errors after all imports, since torch may warn while it is imported."""
Variables = dict[str, str]


def started(code: list[str], environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Run a fresh process and return the words that it printed, and its stderr."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))  # for scripts as well
    how: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": 100}
    done = subprocess.run([sys.executable, *code], cwd=ROOT, env={**kept, **environment}, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(), done.stderr


def launched(rank: int, ranks: int, visible: str | None) -> Variables:
    """Return a launcher's variables for one of ``ranks`` processes on a host."""
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return {name: str(value) for name, value in facts.items()} | seen


@pytest.mark.gpus(1)
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_one_visible_gpu_for_each_rank(rank: int) -> None:
    """As with Slurm's ``--gpus-per-task=1`` and MIG: each of eight local ranks sees only its own GPU, as number 0."""
    words, _ = started(["-c", CHOOSE], launched(rank, 8, "0"))
    assert words[-1] == "cuda:0"


@pytest.mark.gpus(1)
def test_gpu_is_used_or_the_reason_is_printed() -> None:
    """A single process uses the GPU. Eight ranks that all see the same GPU do not, and print the reason."""
    words, _ = started(["-c", CHOOSE], {})
    assert words[-1] == "cuda:0"
    words, said = started(["-c", CHOOSE], launched(0, 8, None))
    assert words[-1].startswith("cuda") or "GPU" in said or "CUDA" in said, said


@pytest.mark.gpus(1)
@pytest.mark.parametrize("given", ["auto", "cuda", "cuda:0"])
def test_one_process_trains_on_its_gpu(given: str) -> None:
    """With and without a launcher, and for each name of the GPU."""
    for environment in ({}, launched(0, 1, None) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587"}):
        words, said = started([TRAIN, given], environment)
        assert words[-3] == "cuda", said
        assert float(words[-1]) < float(words[-2])


def test_torchrun_with_one_process(device_type: str) -> None:
    """init_distributed chooses NCCL and the GPU."""
    # Without an address ranks use the host's name, which may not resolve on a machine without a network.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
    words, said = started([*torchrun, TRAIN, device_type], {})
    assert words[-4:-2] == (["nccl", "cuda"] if device_type == "cuda" else ["gloo", "cpu"]), said
    assert float(words[-1]) < float(words[-2])


def test_without_a_gpu_the_cpu_is_used() -> None:
    """If no GPU is visible, the CPU is used without a warning, with and without a launcher."""
    for environment in ({"CUDA_VISIBLE_DEVICES": ""}, launched(3, 8, "")):
        words, _ = started(["-c", NO_WARNING.format(CHOOSE)], environment)
        assert words[-1] == "cpu"
