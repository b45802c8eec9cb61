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
from torch import nn

import shardwise.deepspeed as deepspeed
from tests.launcher_variables import without_launcher
from tests.support.ds_setup import close, start
from tests.support.launching import SECONDS, forked
from tests.support.launching import start as start_process
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS = 2


@on_ranks(RANKS)
def test_collectives_by_hand() -> None:
    comm = importlib.import_module("shardwise.deepspeed.comm")
    rank = comm.get_rank()
    one, part, mine, both = torch.ones(1) * (rank + 1), torch.empty(1), torch.empty(1), torch.zeros(RANKS)
    log = {"prof": False, "log_name": "x", "debug": "y"}
    comm.all_reduce(one)
    comm.scatter(mine, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
    comm.reduce_scatter_tensor(part, tensor=torch.tensor([1.0, 2.0]) * (rank + 1), **log)
    comm.all_gather_into_tensor(both, tensor=torch.tensor(float(rank)), **log)
    assert (one.item(), mine.item(), part.item(), both.tolist()) == (3.0, 5.0 + rank, [3.0, 6.0][rank], [0.0, 1.0])
    comm.all_to_all_single(both, tensor=torch.tensor([10.0, 20.0]) + rank, **log)
    assert both.tolist() == [10.0 * (rank + 1), 10.0 * (rank + 1) + 1.0]
    comm.monitored_barrier()
    group = comm.new_group([1])
    if rank == 1:
        assert comm.get_global_rank(group, 0) == 1 and comm.get_all_ranks_from_group(group) == [1]
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == comm.get_all_ranks_from_group() == [0, 1]


@on_ranks(RANKS)
def test_groups_of_an_engine() -> None:
    groups, rank = importlib.import_module("shardwise.deepspeed.utils.groups"), torch.distributed.get_rank()
    engine = start(nn.Linear(2, 2), {"train_micro_batch_size_per_gpu": 1})
    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (rank, RANKS)
    assert (groups.get_tensor_model_parallel_src_rank(), groups.get_sequence_parallel_rank()) == (rank, 0)
    close(engine)


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
    ranks = [start_process(forked(meets, rank, given, variables)) for rank in range(2)]
    for each in ranks:
        each.join(SECONDS)
    assert [each.exitcode for each in ranks] == [0, 0]
