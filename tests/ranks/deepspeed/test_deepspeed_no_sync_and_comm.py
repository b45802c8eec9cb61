"""``no_sync`` and ``coalesce_grad_reduction``, ``deepspeed.comm``, and initialization of the process group."""

import copy
import importlib
import os
import socket
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from tests.launcher_variables import without_launcher
from tests.support.ds_setup import close, ds_config, start
from tests.support.launching import SECONDS, forked
from tests.support.launching import start as start_process
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full


@on_ranks(2)
@pytest.mark.parametrize("stage", [*full(0), 1, *full(2), 3])
def test_no_sync_is_refused_with_partitioned_gradients(stage: int) -> None:
    engine = start(nn.Linear(3, 3), {"train_batch_size": 2, "zero_optimization": {"stage": stage}})
    told = rf"incompatible with gradient partitioning logic of ZeRO stage {stage}: no_sync\(\)"
    refused = pytest.raises(AssertionError, match=told) if stage >= 2 else nullcontext()
    with refused as error, engine.no_sync():
        pass
    assert error is None or isinstance(error.value, ValueError)
    close(engine)


def meets_in_init(variables: dict[str, str]) -> None:
    """Enter zero.Init in a separate process with a launcher's variables."""
    os.environ.update(variables)
    warnings.simplefilter("ignore")
    assert not dist.is_initialized()
    with deepspeed.zero.Init(enabled=False):
        assert not dist.is_initialized()
    with deepspeed.zero.Init():
        assert dist.is_initialized() and dist.get_world_size() == 1
    dist.destroy_process_group()
    raise SystemExit(7)


def test_zero_init_initializes_the_process_group() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
    process = start_process(forked(meets_in_init, variables | place))
    process.join(SECONDS)
    assert process.exitcode == 7


def input_of(rank: int, micro: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro + rank))


@on_ranks()
@pytest.mark.parametrize(
    ("half", "stage", "ranks"),
    [
        *(("fp32", 0, 2), ("fp16", 1, 2), ("fp32", 0, 1)),
        *full(("fp32", 1, 2), ("fp16", 0, 2), ("bf16", 0, 2), ("bf16", 1, 2), ("bf16", 1, 1)),
    ],
)
def test_no_sync_keeps_gradients_local(half: str, stage: int, ranks: int) -> None:
    """Inside no_sync each rank has its own gradients; afterwards they are averaged, and a step uses them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    plain = [copy.deepcopy(model) for _ in range(ranks)]
    precision = {} if half == "fp32" else {half: {"enabled": True, **({"loss_scale": 4.0} if half == "fp16" else {})}}
    engine = start(model, ds_config(stage, 3, **precision))
    me, get = dist.get_rank(), deepspeed.utils.safe_get_full_grad
    limits: Any = {"rtol": 1e-6, "atol": 1e-6} if half == "fp32" else {"rtol": 3e-2, "atol": 3e-2}

    def backward(micro: int) -> None:
        engine.backward(engine(input_of(me, micro).to(model.weight.dtype)).float().square().mean())
        for rank, each in enumerate(plain):
            each(input_of(rank, micro)).square().mean().backward()

    with engine.no_sync():
        assert get(model.weight) is None
        for micro in range(2):
            backward(micro)
            torch.testing.assert_close(get(model.weight), plain[me].weight.grad, **limits)
        raises(AssertionError, r"illegal to call Engine.step\(\) inside no_sync .*: leave no_sync", engine.step)
        with pytest.raises(AssertionError, match="no_sync context manager reentry is unsupported"), engine.no_sync():
            pass
        with pytest.raises(AssertionError, match=r"leave no_sync\(\) first"), engine.coalesce_grad_reduction():
            pass
    with engine.coalesce_grad_reduction():
        with pytest.raises(AssertionError, match=r"leave coalesce_grad_reduction\(\) first"), engine.no_sync():
            pass
        backward(2)
        raises(AssertionError, r"leave coalesce_grad_reduction\(\) first", lambda: engine.step())
    mean = torch.stack([each.weight.grad for each in plain]).mean(0)  # type: ignore[misc]
    torch.testing.assert_close(get(model.weight), mean, **limits)
    assert engine.global_steps == engine.micro_steps == 0
    engine.step()
    assert engine.global_steps == 1
    torch.testing.assert_close(engine.state_dict()["weight"], plain[0].weight.detach() - 0.1 * mean, **limits)


@on_ranks(2)
@pytest.mark.parametrize("ahead", [*full(0), 50_000_000])
def test_max_live_parameters_of_0_frees_all_parameters(ahead: int) -> None:
    weights = []
    for live in (0, 1000):
        torch.manual_seed(0)
        limits = {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": ahead}
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        model[2].requires_grad_(False)
        engine = start(model, ds_config(3, 3, limits, gradient_accumulation_steps=2))
        for micro in range(6):
            engine.backward(engine(input_of(torch.distributed.get_rank(), micro)).square().mean())
            available = [param.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE for param in model.parameters()]
            assert (engine.session.memory().gathered_bytes > 0) is (live > 0)
            assert live or not any(available)
            engine.step()
        weights.append(close(engine)["4.weight"])
    assert torch.equal(*weights)


RANKS = 2


@on_ranks(RANKS)
def test_collectives_of_comm() -> None:
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


def meets(rank: int, given: dict[str, Any], variables: dict[str, str]) -> None:
    """Initialize in a separate process that no launcher started."""
    comm = importlib.import_module("shardwise.deepspeed.comm")
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]
    os.environ.update(variables)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), rank=rank, world_size=2, **given)
    total = torch.ones(1) * (1 + comm.get_rank())
    comm.all_reduce(total)
    raise SystemExit(0 if (comm.get_rank(), comm.get_world_size(), float(total)) == (rank, 2, 3.0) else 3)


@pytest.mark.parametrize("how", [*full("a file"), "the variables of torch"])
def test_init_distributed_with_given_ranks(how: str, tmp_path: Path) -> None:
    given, variables = {"init_method": f"file://{tmp_path}/meet"}, dict[str, str]()
    if how != "a file":
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            given, variables = {}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    ranks = [start_process(forked(meets, rank, given, variables)) for rank in range(2)]
    for each in ranks:
        each.join(SECONDS)
    assert [each.exitcode for each in ranks] == [0, 0]
