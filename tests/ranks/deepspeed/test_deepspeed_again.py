"""``initialize`` of a model that has an engine: that one ends, and training goes on from its weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks


class Net(nn.Module):
    """Tied weights, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.inner, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("offset", torch.arange(6.0))

    def forward(self, tokens: Tensor) -> Tensor:
        inside = torch.tanh(self.inner(self.embed(tokens)) + self.offset.to(self.inner.weight.dtype))
        return self.head(inside).float().logsumexp(-1).mean()  # type: ignore[no-any-return]


def config(stage: int, half: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": half},
    }


def train(engine: deepspeed.DeepSpeedEngine, first: int) -> dict[str, Tensor]:
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        engine.backward(engine(torch.randint(7, (2, 3), generator=generator)))
        engine.step()
    state: dict[str, Tensor] = engine.state_dict()
    return state


def again(stages: tuple[int, int], half: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Net()
        first = deepspeed.initialize(model=model, config=config(stages[0], half))[0]
        weights = train(first, 0)
        engine = deepspeed.initialize(model=model, config=config(stages[1], half))[0]
        assert engine.module is model and first.session.closed
        assert_close(engine.state_dict(), weights, 0.0, "the first one's weights, unrounded")
        assert model.head.weight is model.embed.weight and not model.inner.bias.requires_grad
        found = train(engine, 2)
        engine.destroy()
        other = Net()
        other.load_state_dict(weights)
        expected = deepspeed.initialize(model=other, config=config(stages[1], half))[0]
        assert_close(found, train(expected, 2), 0.0, "as an engine that is made of these weights")
        expected.destroy()
        if stages[1] < 3:  # whose parameters stay readable; no word, since the other had ended
            deepspeed.initialize(model=other, config=config(stages[0], half))[0].destroy()
    return [str(each.message) for each in caught if "another engine" in str(each.message)]


@pytest.mark.parametrize(("stages", "half"), [((1, 1), True), ((2, 3), False), ((3, 3), True), ((3, 0), False)])
def test_a_model_that_has_an_engine(stages: tuple[int, int], half: bool) -> None:
    told, nothing = run_ranks(2, again, stages, half)
    assert nothing == [] and len(told) == 1
    assert told[0].startswith("initialize of a Net that another engine has: that engine ends here")
