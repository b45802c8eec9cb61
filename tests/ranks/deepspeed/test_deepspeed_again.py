"""``initialize`` of a model that has an engine, or had one: training goes on from its weights, and what is asked about
parameters is answered for the newer one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close
from tests.support.ds_setup import ds_config, optimizer_block
from tests.support.on_ranks import on_ranks
from tests.support.sets import full


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
    return ds_config(stage, 2, optimizer=optimizer_block("AdamW", lr=1e-2), bf16={"enabled": half})


def train(engine: deepspeed.DeepSpeedEngine, first: int) -> dict[str, Tensor]:
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        engine.backward(engine(torch.randint(7, (2, 3), generator=generator)))
        engine.step()
    return engine.state_dict()


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "already has an engine" in str(each.message)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("stages", "half"), [*full(((1, 1), True)), ((2, 3), False), *full(((3, 3), True)), ((3, 0), False)]
)
def test_a_model_that_has_an_engine(stages: tuple[int, int], half: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Net()
        first = deepspeed.initialize(model=model, config=config(stages[0], half))[0]
        weights = train(first, 0)
        engine = deepspeed.initialize(model=model, config=config(stages[1], half))[0]
        assert engine.module is model and first.session.closed
        assert_close(engine.state_dict(), weights, 0.0, "the first one's weights, unrounded")
        assert model.head.weight is model.embed.weight and not model.inner.bias.requires_grad
        trained = train(engine, 2)
        engine.destroy()
        other = Net()
        other.load_state_dict(weights)
        expected = deepspeed.initialize(model=other, config=config(stages[1], half))[0]
        assert_close(trained, train(expected, 2), 0.0, "as an engine that is made of these weights")
        expected.destroy()
        if stages[1] < 3:  # whose parameters stay readable; no word, since the other had ended
            deepspeed.initialize(model=other, config=config(stages[0], half))[0].destroy()
    assert len(texts(caught)) == (dist.get_rank() == 0)
    begin = "initialize() of a Net that already has an engine: that engine and its"
    assert all(text.startswith(begin) for text in texts(caught))
