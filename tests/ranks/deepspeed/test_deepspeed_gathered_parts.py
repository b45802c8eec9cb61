"""``zero.GatheredParameters`` gathers what it was given and nothing else: values, bytes, blocks inside each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
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


@on_ranks(2)
def test_what_else_is_gathered_stays() -> None:
    """What a forward pass has left gathered stays so, and so does what is resident."""
    with engine_of(3, live=10**9, persist=WIDTH) as (engine, model):
        last = model[2].bias
        assert last.ds_persist
        with torch.no_grad():
            engine(inputs(0))
        params = list(model.parameters())
        assert all(whole(params))
        engine.session.reset_traffic()
        with Gathered([model[0].bias, last]):
            assert all(whole(params))
        assert whole(params) == [True, False, True, True]
        with torch.no_grad():
            assert torch.equal(engine(inputs(0)), net()(inputs(0)))


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


@on_ranks(2)
@pytest.mark.parametrize("stage3", [True, *full(False)], ids=["DeepSpeed", "session"])
def test_a_block_keeps_its_own_changes_alone(stage3: bool) -> None:
    """A block that keeps what is written to its parameters keeps nothing of a block around it."""
    with engine_of(3) as (engine, model):
        a, b, *_ = model.parameters()
        outer = Gathered([a]) if stage3 else engine.session.gathered([a])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with outer, torch.no_grad():
                a.data.fill_(7.0)
                if stage3:
                    with Gathered([b], modifier_rank=0):
                        b.data.fill_(2.0)
                else:
                    with engine.session.gathered([b], write_back=True):
                        b.fill_(2.0)
                        engine.state_dict()
        expected = net().state_dict()
        expected["0.bias"].fill_(2.0)
        assert_close(engine.state_dict(), expected, 0.0, "only what the inner block has")
        one_step(engine)


class Reads(nn.Module):
    """Has the weight of another layer in its forward pass, by a block around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sizes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        # Not read by name, which would gather them.
        given = [next(self.second.parameters()), list(self.first.parameters())[1]]
        with Gathered(given):
            x = torch.tanh(x) * self.second.bias  # which is gathered beside them
            self.sizes.append(sum(float(each.data.norm()) for each in given))
        return self.second(x)


@on_ranks(2)
@pytest.mark.parametrize("live", [0, *full(10**9)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_blocks_and_passes(checkpointing: bool, live: int, disk: bool, tmp_path: Path) -> None:
    # All ranks agree on the gathers of a disk.
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}} if disk else {}
    expected = Reads()
    with engine_of(3, Reads(), live=live, **zero) as (engine, model):
        if checkpointing:
            forward = model.forward
            model.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
        for step in range(2):
            loss, losses = one_step(engine, step), plain_step(expected, 2, step)
            assert abs(loss - losses[dist.get_rank()]) <= 1e-5 * loss
        times = 2 if checkpointing else 1
        assert len(model.sizes) == 2 * times
        for step, size in enumerate(model.sizes[::times]):
            assert abs(size - expected.sizes[2 * step]) <= 1e-5 * size
        assert_close(engine.state_dict(), expected.state_dict(), 1e-5, "blocks in a forward pass")
        with Gathered([model.second.weight]):
            loss = engine(inputs(dist.get_rank(), 2)).square().mean()
        engine.backward(loss)
        engine.step()
        plain_step(expected, 2, 2)
        assert_close(engine.state_dict(), expected.state_dict(), 1e-5, "a forward pass in a block")


# ---- ranks and engines


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_other_parameters_are_told(stage: int) -> None:
    told = "^the ranks disagree on which parameters to gather: 2.bias is on rank 1 and not on rank 0"
    with engine_of(stage) as (engine, model):
        one, inside = [[model[0].weight], [model[0].weight, model[2].bias]][dist.get_rank()], False
        with pytest.raises(ValueError, match=told), Gathered(one, modifier_rank=0):
            inside = True
        assert inside is (stage < 3)
        for order in (1, -1):  # a set has no order
            with Gathered(list(model.parameters())[:: order if dist.get_rank() else 1], modifier_rank=1):
                if dist.get_rank() == 1:
                    model[0].bias.data.fill_(float(order))
            assert bool((engine.state_dict()["0.bias"] == order).all())
        if stage < 3:
            with Gathered(one):  # nothing is gathered, and nothing changed
                pass
        one_step(engine)


@on_ranks(2)
def test_parameters_of_two_engines() -> None:
    with engine_of(3) as (engine, model), engine_of(3) as (other, second):
        with Gathered([model[0].bias, second[2].bias], modifier_rank=1):
            assert whole(list(model.parameters())) == [False, True, False, False]
            assert whole(list(second.parameters())) == [False, False, False, True]
            if dist.get_rank() == 1:
                model[0].bias.data.fill_(1.0)
                second[2].bias.data.fill_(2.0)
        assert not any(whole([*model.parameters(), *second.parameters()]))
        for each, name, value in ((engine, "0.bias", 1.0), (other, "2.bias", 2.0)):
            expected = net().state_dict()
            expected[name].fill_(value)
            assert_close(each.state_dict(), expected, 0.0, name)
        mine = [second[0].bias] if dist.get_rank() else [second[0].weight]
        with pytest.raises(ValueError, match="disagree on which parameters"), Gathered([model[0].bias, *mine]):
            pass
        assert not any(whole([*model.parameters(), *second.parameters()])), "the first one's block has ended"
        one_step(engine)
        one_step(other)


# ---- states


@on_ranks(2)
def test_states_in_blocks(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with engine_of(3) as (engine, model):
        engine.save_checkpoint(directory, "one")
        with Gathered(model[0].parameters()):
            own = {name: value.clone() for name, value in model[0].state_dict().items()}
            refusals: list[Callable[[], object]] = [model.state_dict, lambda: model[0].load_state_dict(own)]
            for refused in refusals:
                with pytest.raises(RuntimeError, match="of the sharded"):
                    refused()
            assert_close(engine.state_dict(), net().state_dict(), 0.0, "the engine's state, in a block")
            with pytest.raises(RuntimeError, match="inside gathered"):
                deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(model, directory)
        expected = {name.removeprefix("0."): v for name, v in net().state_dict().items() if name.startswith("0.")}
        assert_close(own, expected, 0.0, "a module's own state")
        one_step(engine)
