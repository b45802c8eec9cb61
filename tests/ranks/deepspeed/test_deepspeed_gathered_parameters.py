"""``zero.GatheredParameters`` and ``zero.Init``: gathered parameters, bytes, changes, nested blocks, errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_deepspeed import batches, config, train
from test_deepspeed import net as small_net
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.core.comm import PeerError
from shardwise.deepspeed.zero import ZeroParamStatus
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS = 3
WIDTH, LR = 48, 0.5  # sizes are multiples of the ranks, so there is no padding
Gathered = deepspeed.zero.GatheredParameters


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


@contextmanager
def engine_of(
    stage: int, model: nn.Module | None = None, half: bool = False, live: int = 0, persist: int = 0, **zero: Any
) -> Iterator[tuple[deepspeed.DeepSpeedEngine, Any]]:
    model = net() if model is None else model
    limits = {"stage3_param_persistence_threshold": persist, "stage3_max_live_parameters": live}
    sgd = optimizer_block("SGD", lr=LR)
    engine = start(model, ds_config(stage, 2, limits | zero, optimizer=sgd, bf16={"enabled": half}))
    yield engine, model
    close(engine)


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def one_step(engine: deepspeed.DeepSpeedEngine, step: int = 0) -> float:
    x = inputs(dist.get_rank(), step).to(next(engine.parameters()).dtype)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain_step(model: nn.Module, ranks: int, step: int = 0) -> list[float]:
    """Train one step in one process on the batches of all ranks."""
    losses = [model(inputs(rank, step)).square().mean() for rank in range(ranks)]
    torch.autograd.backward([loss / ranks for loss in losses])
    with torch.no_grad():
        for param in model.parameters():
            param -= LR * param.grad  # type: ignore[operator]
            param.grad = None
    return [loss.item() for loss in losses]


def whole(params: Sequence[nn.Parameter]) -> list[bool]:
    return [not bool(param.isnan().any()) for param in params]


# ---- what is gathered


@on_ranks(RANKS)
@pytest.mark.parametrize("live", [0, *full(10**9)])
def test_loop_gathers_one_parameter_at_a_time(live: int) -> None:
    expected = dict(net().named_parameters())
    with engine_of(3, live=live) as (engine, model):
        pool = engine.session._engine.pool
        pool.peak_gathered_bytes = 0
        params = list(model.parameters())
        for name, param in model.named_parameters():
            engine.session.reset_traffic()
            with Gathered([param]):
                assert torch.equal(param.data, expected[name])
                assert param.ds_status is ZeroParamStatus.AVAILABLE
                assert whole(params) == [each is param for each in params], name
                assert pool.gathered_bytes == 4 * param.numel()
            assert not any(whole(params)) and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
            assert pool.gathered_bytes == 0
            traffic = engine.session.traffic()
            sent = traffic["all_gather"]
            assert sent == 4 * param.numel() * (RANKS - 1) // RANKS
            assert sum(traffic.values()) - sent <= 1024, traffic  # small exchanges of the ranks
        assert pool.peak_gathered_bytes == 4 * max(param.numel() for param in params)
        assert_close(engine.state_dict(), net().state_dict(), 0.0, "behind the loop")
        one_step(engine)
        expected_step = net()
        plain_step(expected_step, RANKS)
        assert_close(engine.state_dict(), expected_step.state_dict(), 1e-5, "a step behind the loop")


# ---- changes


DISK, HOST = ({"offload_param": {"device": where}, "offload_optimizer": {"device": where}} for where in ("nvme", "cpu"))
BEFORE, OTHER = [(1, {}), (3, {}), (3, DISK)], [(0, {}), (2, {}), (3, HOST)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "half"),
    [
        *((*each, True) for each in BEFORE),
        *full(*((*each, False) for each in BEFORE), *((*each, half) for each in OTHER for half in (False, True))),
    ],
)
def test_changes_of_the_modifier_rank_are_trained(stage: int, zero: dict[str, Any], half: bool, tmp_path: Path) -> None:
    zero = {key: value | {"nvme_path": str(tmp_path)} for key, value in zero.items()}
    rank, dtype = dist.get_rank(), torch.bfloat16 if half else torch.float32
    expected = net()
    with engine_of(stage, half=half, **zero) as (engine, model):
        before = engine.state_dict()
        with Gathered([model[2].weight], modifier_rank=1), torch.no_grad():
            if rank == 1:
                model[2].weight[3:5].fill_(0.25)
            elif rank == 0:
                model[2].weight.zero_()  # changes of another rank are lost
        before["2.weight"][3:5] = 0.25
        # Unchanged masters stay unrounded, also on ranks that received values of the modifier rank.
        assert_close(engine.state_dict(), before, 0.0, "a change of one parameter")
        with Gathered(model.parameters()):
            shown = {name: param.detach().float() for name, param in model.named_parameters()}
            assert all(torch.equal(value, before[name].to(dtype).float()) for name, value in shown.items())
        loss = one_step(engine)
        state = engine.state_dict()
    expected.load_state_dict(before)
    losses = plain_step(expected, dist.get_world_size())
    rtol = 2e-2 if half else 1e-5
    assert abs(loss - losses[rank]) <= rtol * losses[rank]
    assert_close(state, expected.state_dict(), rtol, "training goes on with it")


@on_ranks(2)
def test_changes_without_a_modifier_rank_are_lost() -> None:
    with engine_of(3) as (engine, model):
        with Gathered([model[0].bias]), torch.no_grad():
            model[0].bias.add_(1.0)
        assert_close(engine.state_dict(), net().state_dict(), 0.0, "changes without a modifier_rank")
        for modifier in (None, 0):
            refused = pytest.raises(RuntimeError, match=r"^0.weight \(96, 48\) was written to")
            with refused, Gathered([model[0].bias], modifier_rank=modifier):
                with torch.no_grad():
                    model[0].weight.zero_()
                engine(inputs(0))
        with pytest.raises(RuntimeError, match="inside gathered"), Gathered([model[0].bias]):
            loss = engine(inputs(0)).square().mean()
            engine.backward(loss)
            engine.step()
        engine.zero_grad()
        assert_close(engine.state_dict(), net().state_dict(), 0.0, "what was refused")
        one_step(engine)


# ---- nested blocks


@on_ranks(2)
def test_nested_blocks() -> None:
    rank = dist.get_rank()
    with engine_of(3) as (engine, model):
        a, b, c, d = params = list(model.parameters())
        engine.session.reset_traffic()
        with Gathered([a, b]):
            with Gathered([b, c], modifier_rank=0):
                assert whole(params) == [True, True, True, False]
                if rank == 0:
                    b.data.fill_(2.0)
                with Gathered([]):
                    pass
            assert whole(params) == [True, True, False, False]
            assert bool((b == 2.0).all())
            with Gathered(model):
                assert all(whole(params))
            assert whole(params) == [True, True, False, False]
        assert not any(whole(params))
        # Inner blocks do not gather what an outer block has gathered.
        once = 4 * (a.numel() + b.numel() + 2 * c.numel() + d.numel())
        assert engine.session.traffic()["all_gather"] == once // dist.get_world_size() * (dist.get_world_size() - 1)
        first, second = Gathered([a, b]), Gathered([b, c])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert whole(params) == [False, True, True, False]
        second.__exit__(None, None, None)
        assert not any(whole(params))
        with Gathered([a], modifier_rank=1):
            with Gathered([a]):
                pass
            if rank == 1:
                a.data.fill_(-1.0)
        expected = net().state_dict()
        expected["0.bias"].fill_(2.0)
        expected["0.weight"].fill_(-1.0)
        assert_close(engine.state_dict(), expected, 0.0, "blocks inside each other")
        for wrong in (ArithmeticError, KeyboardInterrupt):
            with pytest.raises(wrong), Gathered([a, b], modifier_rank=0):
                b.data.zero_()
                raise wrong
            assert not any(whole(params))
        assert_close(engine.state_dict(), expected, 0.0, "a block that failed")
        one_step(engine)


# -- ``zero.Init``


@on_ranks(2)
def test_initialize_inside_zero_init() -> None:
    rank = dist.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = small_net()
        engine = deepspeed.initialize(model=model, config=config(3))[0]
        other = small_net()
        with Gathered(model.parameters()):
            assert torch.equal(model[0].bias.cpu(), small_net()[0].bias)  # type: ignore[index]
    assert all(p.is_meta for p in other.parameters())
    with Gathered(model.parameters()), torch.no_grad():
        model[0].bias.add_(1.0)  # type: ignore[index]
    with Gathered(model.parameters()):
        assert torch.equal(model[0].bias.cpu(), small_net()[0].bias)  # type: ignore[index]
    assert_close(engine.state_dict(), small_net().state_dict(), 0.0, "initialized inside zero.Init")
    ranks = torch.zeros(2, device=engine.device)
    deepspeed.comm.all_gather_into_tensor(ranks, torch.tensor([float(rank)], device=engine.device))
    assert ranks.tolist() == list(range(2))
    train(engine, batches(1), rank)
    close(engine)


class Written(nn.Module):
    """A model whose constructor writes to its parameters, as models for zero.Init do."""

    def __init__(self, written: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.empty(6))
        with Gathered([self.first.weight, self.scale], modifier_rank=0), torch.no_grad():
            self.first.weight[1:3].mul_(written)
            self.first.weight[0] = torch.randn(5)
            self.scale[:4].fill_(written)
            self.scale[4:] = self.second.bias[:2]
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)) * self.scale[:3])


@on_ranks(2)
def test_constructor_writes_parameters_inside_zero_init() -> None:
    torch.manual_seed(3)
    plain = Written(1).state_dict()
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = Written(dist.get_rank() + 1)
    assert model.last.weight.is_meta and not model.scale.is_meta
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    # The values of rank 0 are those of plain torch, and so are the random numbers after them.
    assert_close(engine.state_dict(), plain, 0.0, "parameters that a constructor wrote to")
    close(engine)


@on_ranks(2)
def test_failed_block_of_the_modifier_rank_raises_on_all_ranks() -> None:
    with deepspeed.zero.Init():
        model = small_net()
    error = "what rank 0 cannot give"
    told = [error, f"no changes were broadcast: rank 0: TypeError: {error}$"][dist.get_rank()]
    with pytest.raises((TypeError, PeerError), match=told), Gathered(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            raise TypeError(error)
    dist.barrier()  # the process group still works


@on_ranks(2)
@pytest.mark.parametrize("second", [4, 5, 0])
def test_gathered_parameters_without_an_engine(second: int) -> None:
    with deepspeed.zero.Init():
        if second:
            model: nn.Module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, second, bias=False))
        else:  # copies of a layer, as nn.TransformerEncoder makes them
            layer = nn.Linear(3, 4, bias=False)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers  # type: ignore[arg-type]
    params = list(model.parameters())
    order = params if dist.get_rank() == 0 else [*reversed(params), params[0]]
    with Gathered(order, modifier_rank=0), torch.no_grad():
        for number, param in enumerate(params, 1):
            param.fill_(number)
    assert [param.unique().tolist() for param in params] == [[1.0], [2.0]]
    engine = deepspeed.initialize(model=model, config=ds_config(3))[0]
    assert [value.unique().tolist() for value in engine.state_dict().values()] == [[1.0], [2.0]]
    engine.destroy()


@on_ranks(2)
def test_different_parameters_on_ranks_are_refused() -> None:
    with deepspeed.zero.Init():
        params = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)).parameters())
    rank = dist.get_rank()
    for own, words in (
        (params[: 4 - rank], "parameter 3 is on rank 0 and not on rank 1"),
        (params[rank : rank + 2], r"shape of parameter 0 is '\(4,\)' on rank 1 and '\(4, 3\)' on rank 0"),
    ):
        with pytest.raises(ValueError, match=words), Gathered(own, modifier_rank=0):
            pass
