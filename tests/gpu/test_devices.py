"""The model's device and the current one may differ, and what a process sees of the machine's GPUs may be little."""

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
    """Five steps with the model on one device while another is the current one."""
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
def test_streams_are_those_of_the_models_device(one_rank: RankPool, plan: str) -> None:
    """One GPU is always the current one, so the library is only held to naming it wherever it asks for a stream."""
    (found,) = one_rank.run(losses, PLANS[plan], "cuda:0", 0, timeout=120.0)
    assert found[-1] < found[0]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("plan", PLANS)
def test_another_device_is_current(one_rank: RankPool, plan: str) -> None:
    there, here = (one_rank.run(losses, PLANS[plan], f"cuda:{at}", 0, timeout=120.0)[0] for at in (1, 0))
    assert there == here and there[-1] < there[0]


TRAIN = str(Path(__file__).with_name("train_one_gpu.py"))
CHOOSE = "from shardwise.core.mesh import default_device; print(default_device())"
NO_WARNING = "import warnings; from shardwise.core.mesh import default_device; warnings.simplefilter('error'); {}"
"""After all imports: torch may have its own to say while it is imported."""
Variables = dict[str, str]


def started(code: list[str], environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Words that a fresh process printed, and what it said on stderr."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))  # of scripts too
    how: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": 100}
    done = subprocess.run([sys.executable, *code], cwd=ROOT, env={**kept, **environment}, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(), done.stderr


def launched(rank: int, ranks: int, visible: str | None) -> Variables:
    """What a launcher tells one of ``ranks`` processes of a host."""
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return {name: str(value) for name, value in facts.items()} | seen


@pytest.mark.gpus(1)
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_one_visible_gpu_for_each_rank(rank: int) -> None:
    """Slurm's ``--gpus-per-task=1`` and MIG: eight local ranks, and each sees its own GPU alone, as number 0."""
    words, _ = started(["-c", CHOOSE], launched(rank, 8, "0"))
    assert words[-1] == "cuda:0"


@pytest.mark.gpus(1)
def test_a_gpu_is_used_or_the_process_says_why_not() -> None:
    """A program that starts by itself takes it. Eight ranks that all see it may not, but then they say so."""
    words, _ = started(["-c", CHOOSE], {})
    assert words[-1] == "cuda:0"
    words, said = started(["-c", CHOOSE], launched(0, 8, None))
    assert words[-1].startswith("cuda") or "GPU" in said or "CUDA" in said, said


@pytest.mark.gpus(1)
@pytest.mark.parametrize("given", ["auto", "cuda", "cuda:0"])
def test_one_process_trains_on_its_gpu(given: str) -> None:
    """However it is started and however the GPU is named."""
    for environment in ({}, launched(0, 1, None) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587"}):
        words, said = started([TRAIN, given], environment)
        assert words[-3] == "cuda", said
        assert float(words[-1]) < float(words[-2])


def test_torchrun_with_one_process(device_type: str) -> None:
    """init_distributed chooses NCCL and the GPU."""
    # Without an address ranks are given the host's name, which nothing may resolve where there is no network.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
    words, said = started([*torchrun, TRAIN, device_type], {})
    assert words[-4:-2] == (["nccl", "cuda"] if device_type == "cuda" else ["gloo", "cpu"]), said
    assert float(words[-1]) < float(words[-2])


def test_without_a_gpu_the_cpu_is_taken() -> None:
    """Where none is visible there is nothing to warn of, whatever the launcher started."""
    for environment in ({"CUDA_VISIBLE_DEVICES": ""}, launched(3, 8, "")):
        words, _ = started(["-c", NO_WARNING.format(CHOOSE)], environment)
        assert words[-1] == "cpu"
