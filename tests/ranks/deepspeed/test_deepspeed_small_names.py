"""What DeepSpeed's own programs and tests ask of an engine and its surroundings besides training."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import run_ranks


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(self.embedding(x))
        return value


def start(**changes: object) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        **changes,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=Embedded(), config=config)[0]


def skipped_steps(root: str) -> list[bool]:
    """Whether the optimizer says that there was an overflow, after each step."""
    engine = start(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    found = [engine.optimizer.overflow]
    for factor in (1.0, float("inf"), 1.0):
        engine.backward(engine(torch.arange(3)).float().square().mean() * factor)
        engine.step()
        found.append(engine.optimizer.overflow)
    assert engine.skipped_steps == 1
    for nowhere in (None, ""):
        with pytest.raises(ValueError, match=f"save_dir={nowhere!r}: give the directory"):
            engine.save_checkpoint(nowhere)  # type: ignore[arg-type]
    assert engine.sparse_tensor_module_names == set()
    engine.destroy()
    engine.session.mesh.close()
    engine = start(sparse_gradients=True)
    assert engine.sparse_tensor_module_names == {"embedding.weight"}
    engine.destroy()
    engine.session.mesh.close()
    return found


def test_what_is_asked_of_an_engine(tmp_path: Path) -> None:
    for found in run_ranks(2, skipped_steps, str(tmp_path)):
        assert found == [False, False, True, False]


def passes_that_stay(stage: int) -> str:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=nn.Linear(3, 3), config=config)[0]
    try:
        with engine.no_sync():
            return "nothing is exchanged"
    except AssertionError as error:  # as DeepSpeed has it
        assert isinstance(error, ValueError)
        return str(error)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_where_there_are_no_whole_gradients(stage: int) -> None:
    found = set(run_ranks(2, passes_that_stay, stage))
    told = f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}: no_sync()"
    assert found == {"nothing is exchanged"} if stage < 2 else all(each.startswith(told) for each in found)


def test_a_launched_process_meets_the_others_in_zero_init(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        import torch, torch.distributed as dist
        import shardwise.deepspeed as deepspeed
        assert not dist.is_initialized()
        with deepspeed.zero.Init(enabled=False):
            assert not dist.is_initialized()
        with deepspeed.zero.Init():
            assert dist.is_initialized() and dist.get_world_size() == 1
        dist.destroy_process_group()
        print("met")
    """
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    assert "met" in subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout


def test_processes_of_a_host_are_its_devices_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != "cpu":
        pytest.skip("there is a GPU")
    assert accelerator.device_count() == 1
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert accelerator.device_count() == 4
