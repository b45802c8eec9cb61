"""What programs for ColossalAI and Lightning ask for that is not here: the error says what to do, and that works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise.fabric
import shardwise.lightning
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.deepspeed.logs import LOG


def test_masters_of_a_boosted_optimizer_and_a_model_that_is_to_leave_its_device() -> None:
    torch.manual_seed(0)
    own = nn.Linear(3, 2)
    before = own.weight.detach().clone()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert not hasattr(optimizer, "_param_store")
    # Masters begin with the model's own values, not with rounded ones.
    one = booster.plugin.session(model).one(own.weight)
    assert own.weight.dtype is torch.bfloat16 and not torch.equal(own.weight.float(), before)
    assert torch.equal(one.value(), before) and torch.equal(one.value(own=True), before.flatten())
    assert torch.equal(model.state_dict()["weight"], before)
    assert model.to("cpu") is model
    with pytest.raises(RuntimeError, match=r"cannot become .*param_host_fraction=1.0.*offload='host'"):
        model.to("meta")
    booster.plugin.session(model).close()


@pytest.mark.parametrize("package", [shardwise.lightning, shardwise.fabric])
@pytest.mark.parametrize("name", ["deepspeed_engine", "_deepspeed_engine"])
def test_the_engine_of_a_strategy(package: object, name: str) -> None:
    level = LOG.level
    try:
        strategy = package.DeepSpeedStrategy(stage=2)  # type: ignore[attr-defined]
    finally:
        LOG.setLevel(level)  # Fabric's sets it
    assert not hasattr(strategy, name)
    with pytest.raises(AttributeError, match=r"strategy\.session.*get_grad_norm.*checkpoints\.save"):
        getattr(strategy, name)
