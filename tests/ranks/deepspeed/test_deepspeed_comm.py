"""``deepspeed.comm`` and the groups of ranks: what each collective gives, by hand."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SECONDS, forked, start
from sets import full
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import run_ranks
from tests.launcher_variables import without_launcher

RANKS = 2


def collectives() -> dict[str, Any]:
    comm = importlib.import_module("shardwise.deepspeed.comm")
    rank = comm.get_rank()
    found: dict[str, Any] = {}
    one = torch.ones(1) * (rank + 1)
    comm.all_reduce(one)
    found["one"] = float(one)
    part = torch.empty(1)
    comm.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]) * (rank + 1))
    found["part"] = float(part)
    mine = torch.empty(1)
    comm.scatter(mine, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
    found["mine"] = float(mine)
    comm.monitored_barrier()
    turned = comm.new_group([1])
    if rank == 1:
        assert comm.get_global_rank(turned, 0) == 1 and comm.get_all_ranks_from_group(turned) == [1]
    found["all"] = comm.get_all_ranks_from_group(comm.get_world_group())
    assert comm.get_all_ranks_from_group() == found["all"]
    return found


def test_collectives_by_hand() -> None:
    for rank, found in enumerate(run_ranks(RANKS, collectives)):
        assert found == {
            "one": 3.0,
            "part": [3.0, 6.0][rank],
            "mine": [5.0, 6.0][rank],
            "all": [0, 1],
        }


def groups_of_an_engine() -> tuple[Any, ...]:
    groups = importlib.import_module("shardwise.deepspeed.utils.groups")
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})[0]
    found = (
        groups.get_data_parallel_rank(),
        groups.get_data_parallel_world_size(),
        groups.get_tensor_model_parallel_src_rank(),
        groups.get_sequence_parallel_rank(),
    )
    engine.destroy()
    engine.session.mesh.close()
    return found


def test_groups_of_an_engine() -> None:
    assert run_ranks(RANKS, groups_of_an_engine) == [(rank, RANKS, rank, 0) for rank in range(RANKS)]


def meets(rank: int, given: dict[str, Any], variables: dict[str, str]) -> None:
    """A process of its own that no launcher has started."""
    comm = importlib.import_module("shardwise.deepspeed.comm")
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]
    os.environ.update(variables)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), rank=rank, world_size=2, **given)
    total = torch.ones(1) * (1 + comm.get_rank())
    comm.all_reduce(total)
    raise SystemExit(0 if (comm.get_rank(), comm.get_world_size(), float(total)) == (rank, 2, 3.0) else 3)


@pytest.mark.parametrize("how", [*full("a file"), "the variables of torch"])
def test_ranks_that_are_given_meet(how: str, tmp_path: Path) -> None:
    given, variables = {"init_method": f"file://{tmp_path}/meet"}, dict[str, str]()
    if how != "a file":
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            given, variables = {}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    ranks = [start(forked(meets, rank, given, variables)) for rank in range(2)]
    for each in ranks:
        each.join(SECONDS)
    assert [each.exitcode for each in ranks] == [0, 0]
