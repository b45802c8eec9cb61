"""16-bit masters: Adam steps in fp32 and rounds once, with moments in fp32 or in the dtype of the masters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.testing import PlainRecipe, assert_close, train_plain
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

RANKS, STEPS, LR, DECAY = 2, 6, 3e-2, 0.1
BLOCKS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    "bf16": ({"bf16": {"bf16_master_weights_and_grads": True}}, torch.bfloat16, torch.float32),
    "bf16 moments": (
        {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        torch.bfloat16,
        torch.bfloat16,
    ),
    "fp16": ({"fp16": {"fp16_master_weights_and_grads": True, "loss_scale": 8.0}}, torch.float16, torch.float32),
}
"""Configurations, with the dtypes of masters and moments."""


class Net(nn.Module):
    """A product of weights and inputs: gradients are exact sums of halves with any kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight * x).float().sum() + (self.bias * y).float().sum()


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 7), (9,)))  # type: ignore[return-value]


def adam(model: nn.Module, moments: torch.dtype) -> torch.optim.Optimizer:
    cls, wide = deepspeed.ops.adam.DeepSpeedCPUAdam, moments == torch.float32
    return cls(model.parameters(), lr=LR, weight_decay=DECAY, fp32_optimizer_states=wide)


def plain(master: torch.dtype, moments: torch.dtype) -> dict[str, Tensor]:
    """Train in one process with an optimizer that tests/unit/optim compares with the formula."""
    batches = [[[batch(step, rank, master) for rank in range(RANKS)]] for step in range(STEPS)]
    recipe = PlainRecipe(masters=False)
    run = train_plain(lambda: Net().to(master), lambda m, b: m(*b), lambda m: adam(m, moments), batches, recipe)
    return {name: value.float() for name, value in run.parameters[-1].items()}


QUICK = [("bf16", 0), ("fp16", 1), ("bf16 moments", 2), ("bf16", 3)]


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("block", "stage"),
    [*QUICK, *full(*((block, stage) for block in BLOCKS for stage in range(4) if (block, stage) not in QUICK))],
)
def test_steps_equal_fp32_steps_rounded_once(block: str, stage: int) -> None:
    """Stages 1 and 3 offload the optimizer; stages 2 and 3 get DeepSpeedCPUAdam from the program."""
    more, dtype, moments = BLOCKS[block]
    config = ds_config(
        stage,
        zero={"offload_optimizer": {"device": "cpu"}} if stage % 2 else None,
        optimizer=optimizer_block("Adam", lr=LR, weight_decay=DECAY),
        **{name: {"enabled": True, **inner} for name, inner in more.items()},
    )
    model, optimizer = Net(), None
    if stage > 1:
        optimizer = adam(model, moments)
    engine = start(model, config, optimizer=optimizer)
    for step in range(STEPS):
        if step == 3:  # a load keeps the dtype and bits of the moments
            state = engine.optimizer.state_dict()
            engine.optimizer.load_state_dict(state)
        engine.backward(engine(*batch(step, dist.get_rank(), dtype)))
        engine.step()
    kinds = {each[key].dtype for each in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    assert kinds <= {moments}
    expected = plain(dtype, moments)
    found = {name: value.float() for name, value in close(engine).items()}
    assert_close(found, expected, 1e-6, block)
    other = torch.bfloat16 if moments == torch.float32 else torch.float32
    moved = [float((value - expected[name]).abs().max()) for name, value in plain(dtype, other).items()]
    assert dtype is torch.float16 or max(moved) > 5e-4, "moments of another dtype would show"


def test_fp32_moments_with_bf16_optimizer_states_are_refused() -> None:
    """The error is an AssertionError, as in DeepSpeed, and nothing is sharded."""
    model = Net()
    block = {"enabled": True, **BLOCKS["bf16 moments"][0]["bf16"]}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "bf16": block}
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters())
    with pytest.raises(AssertionError, match="give it fp32_optimizer_states=False") as caught:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert isinstance(caught.value, ValueError) and model.weight.dtype is torch.float32
