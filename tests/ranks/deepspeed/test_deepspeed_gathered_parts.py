"""``zero.GatheredParameters`` gathers what it was given and nothing else: values, bytes, blocks inside each other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.deepspeed.zero import ZeroParamStatus
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS = 3
WIDTH, LR = 48, 0.5  # sizes that divide by the ranks and need no padding
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
    """All ranks' batches in one process."""
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
def test_a_loop_gathers_each_parameter_once(live: int) -> None:
    expected = dict(net().named_parameters())
    with engine_of(3, live=live) as (engine, model):
        pool = engine.session.engine.pool
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
            assert sum(traffic.values()) - sent <= 1024, traffic  # what ranks tell each other besides
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
def test_a_change_of_one_parameter_is_trained(stage: int, zero: dict[str, Any], half: bool, tmp_path: Path) -> None:
    zero = {key: value | {"nvme_path": str(tmp_path)} for key, value in zero.items()}
    rank, dtype = dist.get_rank(), torch.bfloat16 if half else torch.float32
    expected = net()
    with engine_of(stage, half=half, **zero) as (engine, model):
        before = engine.state_dict()
        with Gathered([model[2].weight], modifier_rank=1), torch.no_grad():
            if rank == 1:
                model[2].weight[3:5].fill_(0.25)
            elif rank == 0:
                model[2].weight.zero_()  # another rank's changes are lost
        before["2.weight"][3:5] = 0.25
        # Masters keep what was not changed unrounded, on ranks that have shown the modifier's values.
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


# ---- blocks inside each other, and inside of passes


@on_ranks(2)
def test_blocks_inside_each_other() -> None:
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
        # Of what an outer block has the inner ones gather nothing.
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
