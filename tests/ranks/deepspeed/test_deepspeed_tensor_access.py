"""``safe_get_*`` and ``safe_set_*`` at every stage and tier, and training after a change, against plain PyTorch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.deepspeed import utils
from shardwise.deepspeed.parameter_attributes import ZeroParamStatus
from tests.support.ds_setup import ds_config, optimizer_block, start
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full

RANKS, MICRO = 2, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(torch.tanh(self.first(x)))).square().mean()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(MICRO, 5, generator=torch.Generator().manual_seed(7 * step + rank))


class Pair:
    """An engine, and the same model trained with plain PyTorch in this process."""

    def __init__(self, zero: dict[str, Any], **changes: Any) -> None:
        torch.manual_seed(0)
        self.plain = Model()
        model = copy.deepcopy(self.plain)
        self.adam = torch.optim.AdamW([p for p in self.plain.parameters() if p.requires_grad], 1e-2, weight_decay=0.0)
        stage, more = zero["stage"], {key: value for key, value in zero.items() if key != "stage"}
        config = ds_config(stage, MICRO, more, optimizer=optimizer_block("Adam", lr=1e-2), **changes)
        self.engine = start(model, config)
        self.model, self.steps = model, 0
        self.params = list(zip(model.parameters(), self.plain.parameters(), strict=True))

    def backward(self) -> None:
        self.engine.backward(self.engine(data(self.steps, dist.get_rank())))
        for rank in range(RANKS):
            (self.plain(data(self.steps, rank)) / RANKS).backward()

    def step(self) -> None:
        self.engine.step()
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1

    def same(self) -> None:
        """Compare parameters and optimizer state with plain PyTorch."""
        for param, plain in self.params:
            found = utils.safe_get_full_fp32_param(param)
            if not plain.requires_grad:
                assert found is None and utils.safe_get_full_optimizer_state(param, "exp_avg") is None
                continue
            torch.testing.assert_close(found, plain.detach(), **CLOSE)
            for key in ("exp_avg", "exp_avg_sq"):
                found = utils.safe_get_full_optimizer_state(param, key)
                torch.testing.assert_close(found, self.adam.state[plain][key], **CLOSE)
            assert utils.safe_get_full_optimizer_state(param, "step").item() == self.steps

    def same_gradients(self) -> None:
        for param, plain in self.params:
            found = utils.safe_get_full_grad(param)
            if plain.grad is None:
                assert found is None
            else:
                torch.testing.assert_close(found, plain.grad, **CLOSE)


@torch.no_grad()
def set_whole(pair: Pair) -> None:
    """Replace values and state of some parameters in both models."""
    (weight, plain_weight), (bias, plain_bias), (second, plain_second) = pair.params[:3]
    utils.safe_set_full_fp32_param(weight, plain_weight * 1.5)
    plain_weight.mul_(1.5)
    for param, plain, key, factor in ((bias, plain_bias, "exp_avg", -2.0), (second, plain_second, "exp_avg_sq", 3.0)):
        state = pair.adam.state[plain][key]
        utils.safe_set_full_optimizer_state(param, state * factor, key)
        state.mul_(factor)


@torch.no_grad()
def set_parts(pair: Pair) -> None:
    """Change a parameter and its state through this rank's part; the parts of all ranks cover it."""
    weight, plain = pair.params[0]
    part = utils.safe_get_local_fp32_param(weight)
    counts = everywhere(part.numel())
    assert sum(counts) == weight.numel() or counts == [weight.numel()] * RANKS
    utils.safe_set_local_fp32_param(weight, part - 0.25)
    plain.sub_(0.25)
    utils.safe_set_local_optimizer_state(weight, utils.safe_get_local_optimizer_state(weight, "exp_avg") * 2, "exp_avg")
    pair.adam.state[plain]["exp_avg"].mul_(2)


@torch.no_grad()
def set_gradients(pair: Pair) -> None:
    (weight, plain_weight), (bias, plain_bias), (second, plain_second) = pair.params[:3]
    utils.safe_set_full_grad(weight, plain_weight.grad * 2 + 1)
    plain_weight.grad.mul_(2).add_(1)
    utils.safe_set_local_grad(bias, utils.safe_get_local_grad(bias) - 1)
    plain_bias.grad.sub_(1)
    utils.safe_update_full_grad_vectorized([second, pair.params[3][0]], lambda grad, param: grad * 0.5)
    plain_second.grad.mul_(0.5)


def as_plain(zero: dict[str, Any], changes: dict[str, Any]) -> None:
    pair = Pair(zero, **changes)
    first = pair.params[0][0]
    assert utils.safe_get_full_optimizer_state(first, "exp_avg") is None  # no state before the first step
    with pytest.raises(RuntimeError, match="after the first step"):
        utils.safe_set_full_optimizer_state(first, torch.zeros_like(first), "exp_avg")
    assert utils.safe_get_full_grad(first) is None
    for _ in range(2):
        pair.backward()
        pair.same_gradients()
        set_gradients(pair)
        pair.same_gradients()
        pair.step()
        pair.same()
        set_whole(pair)
        pair.same()
        set_parts(pair)
        pair.same()
    pair.backward()
    pair.step()
    pair.same()
    raises(KeyError, "exp_avg_sq", lambda: utils.safe_get_full_optimizer_state(first, "momentum"))
    raises(ValueError, r"shape \(2,\)", lambda: utils.safe_set_full_fp32_param(first, torch.zeros(2)))
    with pytest.raises(ValueError, match="requires_grad=False"):
        utils.safe_set_full_fp32_param(pair.params[-1][0], torch.zeros(3))
    pair.engine.destroy()


def masters(stage: int) -> None:
    """A set value goes to the fp32 master, and the parameter is the rounded master."""
    pair = Pair({"stage": stage}, bf16={"enabled": True})
    weight = pair.params[0][0]
    value = torch.full((7, 5), 1.0 + 2.0**-12)
    utils.safe_set_full_fp32_param(weight, value)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight.detach(), torch.ones(7, 5, dtype=torch.bfloat16))
    pair.engine.destroy()


PLACES: dict[str, list[dict[str, Any]]] = {
    "stages": [{"stage": 1}, {"stage": 3}],
    "other stages": [{"stage": 0}, {"stage": 2}],
    "optimizer on the host": [{"stage": stage, "offload_optimizer": {"device": "cpu"}} for stage in (1, 2, 3)],
    "all on the host": [{"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}],
    "all on a disk": [{"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}],
    "some stay gathered": [{"stage": 3, "stage3_param_persistence_threshold": 30}],
}


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["stages", *full(*(name for name in PLACES if name != "stages"))])
def test_tensor_access_equals_plain_torch(name: str, tmp_path: Path) -> None:
    for zero in PLACES[name]:
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        as_plain({key: nvme if value == {"device": "nvme"} else value for key, value in zero.items()}, {})
        if len(zero) == 1:
            masters(zero["stage"])


@on_ranks(RANKS)
def test_zero_init_keeps_modules_that_were_built_before() -> None:
    before = nn.Linear(5, 7)
    with deepspeed.zero.Init():
        model = nn.Sequential(before, nn.Linear(7, 3))
    assert not hasattr(before.weight, "ds_id") and hasattr(model[1].weight, "ds_id")
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        assert model[0].weight.shape == (7, 5) and model[1].weight.shape == (3, 7)


@on_ranks(RANKS)
def test_status_of_parameters() -> None:
    here, gone = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
    pair = Pair({"stage": 3})
    weight, seen = pair.params[0][0], []
    handle = pair.model.first.register_forward_hook(lambda *_: seen.append(weight.ds_status))
    assert weight.ds_status is gone
    pair.backward()
    pair.step()
    handle.remove()
    assert seen == [here] and weight.ds_status is gone
    assert all((p.ds_shape, p.ds_numel) == (q.shape, q.numel()) for p, q in pair.params)
    numbers = {p.ds_id for p, _ in pair.params}
    pair.engine.destroy()
    with deepspeed.zero.Init():
        built = nn.Linear(3, 2)
    assert len(numbers) == len(pair.params) and built.weight.ds_id not in numbers
    assert built.weight.ds_shape == (2, 3) and built.weight.ds_status is gone
    with deepspeed.zero.GatheredParameters(built.weight):
        assert built.weight.ds_status is here
    low = Pair({"stage": 2})
    assert not any(hasattr(p, "ds_id") for p, _ in low.params)
    low.engine.destroy()
