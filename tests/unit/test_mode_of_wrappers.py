"""What stands for a model has its mode: a program that reads it, to put it back later, reads the model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import shardwise
from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.testing import assert_close

ADAM = {"optimizer": {"type": "Adam"}, "gradient_clipping": 0.0}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)).eval()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def engine(model: nn.Module) -> nn.Module:
    return deepspeed.initialize(model=model, config={"train_batch_size": 1, **ADAM})[0]


def boosted(plugin: object) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        return Booster(plugin=plugin).boost(model, adam(model))[0]  # type: ignore[arg-type]

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard": lambda model: shardwise.shard(model, adam(model), device="cpu").module,
    "gemini": boosted(GeminiPlugin(precision="fp32")),
    "zero2": boosted(LowLevelZeroPlugin(stage=2, precision="fp32")),
    "ddp": boosted(TorchDDPPlugin()),
    "deepspeed": engine,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_has_the_mode_of_the_model(name: str) -> None:
    model = made()
    wrapper = WRAPPERS[name](model)
    assert not wrapper.training
    assert wrapper.train() is wrapper and wrapper.training and all(each.training for each in model.modules())
    model.eval()
    assert not wrapper.training


def test_statistics_that_torch_renews_leave_the_mode_as_in_plain_torch() -> None:
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(each)) for each in range(3)]
    expected, model = made(), made()
    session = shardwise.shard(model, adam(model), device="cpu")
    for each in (expected, session.module):
        update_bn(batches, each)
        each(batches[0])
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), 0.0, "statistics")
    session.close()
