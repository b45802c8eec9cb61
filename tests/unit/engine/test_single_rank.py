"""Tests of training on one rank: it equals plain torch bit for bit, and wrappers share ``training`` with the model."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import shardwise
from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.plan import replicated, zero
from shardwise.session import build
from shardwise.testing import assert_close

PASSES, STEPS = 2, 3


def made() -> nn.Module:
    """Return a model with one parameter that only some passes use and one that no pass uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 3))
    model.register_parameter("now_and_then", nn.Parameter(torch.ones(3)))
    model.register_parameter("never", nn.Parameter(torch.ones(5)))
    return model


def loss(model: nn.Module, x: torch.Tensor, apart: bool, run: object = None) -> torch.Tensor:
    out = (run or model)(x)  # type: ignore[operator]
    return (out * model.now_and_then if apart else out).float().square().mean()  # type: ignore[no-any-return]


def batches() -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(4, 6) for _ in range(PASSES)] for _ in range(STEPS)]


def adam(params: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)  # type: ignore[arg-type]


def plain(half: torch.dtype, passes: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in plain torch, with accumulated 16-bit gradients and fp32 master weights."""
    model = made()
    masters = [param.detach().clone() for param in model.parameters()]
    model.to(half)
    optimizer, norms = adam(masters), []
    for step in batches():
        for number, x in enumerate(step[:passes]):
            loss(model, x.to(half), number == 0).backward()  # type: ignore[no-untyped-call]
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        total = torch.cat([m.grad.flatten() for m in masters if m.grad is not None]).double()
        norms.append(total.norm().item())
        optimizer.step()
        for master, param in zip(masters, model.parameters(), strict=True):
            param.data.copy_(master)
        model.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["one pass", "two passes", "no_sync", "read between", "changed"])
def test_training_matches_a_plain_loop_bit_for_bit(half: torch.dtype | None, stage: int, how: str) -> None:
    passes = 1 if how == "one pass" else 2
    if how == "no_sync" and stage > 1:
        pytest.skip("these reduce in every pass")
    expected, norms = plain(half or torch.float32, passes)
    model, plan = made(), zero(stage, half) if stage else replicated(half)  # type: ignore[arg-type]
    with closing(build(model, adam(model.parameters()), plan, device=torch.device("cpu"))) as session:
        optimizer: Any = session.optimizer
        for step, norm in zip(batches(), norms, strict=True):
            for number, x in enumerate(step[:passes]):
                last = number == passes - 1
                with session.no_sync() if how == "no_sync" and not last else nullcontext():
                    session.backward(loss(model, x, number == 0, session.module))
                if how == "read between":
                    assert model[0].weight.grad is not None and float(model[0].weight.grad.norm()) > 0
            if how == "changed":
                model[0].weight.grad.mul_(1.0)
            optimizer.step()
            assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-5)
            optimizer.zero_grad()
        with session._engine.values.gathered():
            for name, param in model.named_parameters():
                assert torch.equal(param, expected[name]), name
        session.backward(loss(model, batches()[0][0], True, session.module))
        norm = optimizer.clip_grad_by_norm(1e-3)
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-5) and norm > 1e-3


ADAM = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "gradient_clipping": 0.0}


def made_wrapper() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)).eval()


def wrapped_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def boosted(plugin: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: Booster(plugin=plugin).boost(model, wrapped_adam(model))[0]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard": lambda model: shardwise.shard(model, wrapped_adam(model), device="cpu").module,
    "gemini": boosted(GeminiPlugin(precision="fp32")),
    "zero2": boosted(LowLevelZeroPlugin(stage=2, precision="fp32")),
    "ddp": boosted(TorchDDPPlugin()),
    "deepspeed": lambda model: deepspeed.initialize(model=model, config=ADAM)[0],
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_has_the_training_mode_of_the_model(name: str) -> None:
    model = made_wrapper()
    wrapper = WRAPPERS[name](model)
    assert not wrapper.training
    assert wrapper.train() is wrapper and wrapper.training and all(each.training for each in model.modules())
    model.eval()
    assert not wrapper.training


def test_update_bn_matches_plain_torch() -> None:
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(each)) for each in range(3)]
    expected, model = made_wrapper(), made_wrapper()
    session = shardwise.shard(model, wrapped_adam(model), device="cpu")
    for each in (expected, session.module):
        update_bn(batches, each)
        each(batches[0])
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), 0.0, "statistics")
    session.close()
