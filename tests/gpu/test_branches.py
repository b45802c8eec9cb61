"""Tests of ranks that take different branches through equal layers: training does not hang and matches plain torch."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu.on_device import device_of_rank, session_of
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool, assert_close

DEPTH, WIDTH, ROWS, STEPS = 8, 256, 512, 6
SECONDS = 90.0
"""Time limit, which only a deadlock reaches: six steps take less than a second."""
Way = Sequence[int]
WAYS: dict[str, tuple[Way, Way]] = {
    "another_order": (range(DEPTH), (0, 2, 1, 4, 3, 6, 5, 7)),
    "backwards": (range(DEPTH), range(DEPTH - 1, -1, -1)),
    "every_other": (range(0, DEPTH, 2), range(1, DEPTH, 2)),
    "few_and_all": ((0, 7), range(DEPTH)),
    "twice": ((0, 1, 2, 3, 0, 1, 2, 3), (4, 5, 6, 7, 7, 6, 5, 4)),
}
"""The layers that even and odd ranks use; the ranks swap them in each step."""


class Branches(nn.Module):
    """Equal layers; each call names the layers that it uses. Input and output (rows, width)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, way: Way) -> Tensor:
        for index in way:
            x = torch.tanh(self.layers[index](x))
        return x


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _loss(model: nn.Module, ways: str, step: int, rank: int, device: torch.device) -> Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    return model(rows, WAYS[ways][(rank + step) % 2]).float().square().mean()


def train(plan: Plan, ways: str, device_type: str) -> dict[str, Tensor]:
    """Train with a different branch on each rank, and return the parameters on the CPU."""
    device = device_of_rank(device_type)
    with session_of(plan, device, Branches(), sgd) as session:
        for step in range(STEPS):
            if device.type == "cuda" and dist.get_rank() == 0:
                torch.cuda._sleep(20_000_000)  # about 10 ms, by which this rank's GPU is late
            loss = _loss(session.module, ways, step, dist.get_rank(), device)
            session.backward(loss)
            session.optimizer.step()
            assert float(loss.detach()) > 0
        return {name: value.cpu() for name, value in session.module.state_dict().items()}


def plain(ways: str, ranks: int) -> dict[str, Tensor]:
    """Train the same branches in one process on the CPU."""
    model = Branches()
    optimizer = sgd(model)
    for step in range(STEPS):
        for rank in range(ranks):
            (_loss(model, ways, step, rank, torch.device("cpu")) / ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


PLANS = {
    "zero3": zero(3),
    "ahead": zero(3).but(prefetch=3),
    "budget": zero(3).but(gathered_fraction=0.4, prefetch=2),
    "zero2": zero(2),
}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_take_different_branches(two_ranks: RankPool, device_type: str, plan: str, ways: str) -> None:
    """Two GPUs use NCCL. With one GPU, two ranks share it over gloo, with the same group and streams."""
    expected = plain(ways, 2)
    for rank, found in enumerate(two_ranks.run(train, PLANS[plan], ways, device_type, timeout=SECONDS)):
        # A layer's output is a sum of 256 products, in a different order on each device.
        assert_close(found, expected, 1e-4, f"{plan} {ways} rank {rank}")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("ways", WAYS)
def test_ranks_take_different_branches_over_nccl(two_ranks: RankPool, ways: str) -> None:
    """Only NCCL can show a deadlock of the GPU's streams, which the host does not see."""
    one, other = two_ranks.run(train, zero(3, torch.bfloat16), ways, "cuda", timeout=SECONDS)
    assert_close(other, one, 0.0, ways)
