"""Setup for tests in process groups: groups of four ranks, gloo by choice, training in each group, and its oracle."""

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import Activity, choose
from shardwise.testing import train_plain
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, ZeroInitContext
from tests.support.models import MODELS, make_batches
from tests.support.sharded_setup import STRATEGIES, adam

CPU = torch.device("cpu")
RANKS, STEPS = 4, 2
GROUPS = {
    "pairs": [[0, 1], [2, 3]],
    "strided": [[0, 2], [1, 3]],
    "one_and_three": [[1], [0, 2, 3]],
    "three_and_one": [[0, 1, 3], [2]],
}


def join(lists: list[list[int]], timeout_s: float = 60.0) -> tuple[int, dist.ProcessGroup]:
    """Return the number and the group of this rank's list. All ranks create all groups, as programs do."""
    made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo") for ranks in lists]
    number = next(index for index, ranks in enumerate(lists) if dist.get_rank() in ranks)
    return number, made[number]


@contextlib.contextmanager
def waits_at_most(seconds: float) -> Iterator[None]:
    """Shorten this rank's waits for its peers inside this context; their waits stay as they are.

    Use it only around the wait that has to time out: then no rank has to be in time for another one.
    """
    with mock.patch.object(Activity, "limit", lambda _self, _group: timedelta(seconds=seconds)):
        yield


@contextlib.contextmanager
def transport(gloo: bool) -> Iterator[None]:
    """Disable shared memory inside this context if ``gloo``."""
    with mock.patch.object(choose, "host_facts", dict) if gloo else contextlib.nullcontext():
        yield


def made(
    group: dist.ProcessGroup, case: str, strategy: str = "tensor", shard: bool = True, **model: Any
) -> tuple[ShardedModelV2, ShardedOptimizerV2]:
    """Return an fp32 model and its optimizer in one group."""
    chosen = STRATEGIES[strategy]()
    with ZeroInitContext("cpu", chosen, shard_param=shard, dp_process_group=group, convert_fp16=False):
        module = MODELS[case].factory()
    sharded = ShardedModelV2(module, chosen, group, group, **model)
    return sharded, ShardedOptimizerV2(sharded, adam(sharded), dp_process_group=group)


def steps_of(case: str, number: int, size: int) -> list[Any]:
    """Return a group's own batches, ``[step][micro-batch][rank]``; the second group has more of them."""
    return make_batches(MODELS[case], size, STEPS + number, 1, seed=number)


def train(model: ShardedModelV2, optimizer: ShardedOptimizerV2, case: str, steps: list[Any]) -> None:
    for step in steps:
        for micro in step:
            optimizer.backward(MODELS[case].loss(model, micro[model.session.mesh.rank]))
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def plain(case: str, number: int, size: int) -> dict[str, Tensor]:
    """Return the parameters of group ``number`` after its steps, in one process."""
    steps = steps_of(case, number, size)
    return train_plain(MODELS[case].factory, MODELS[case].loss, adam, steps).masters[-1]


# ---- a model-parallel model in two parts


class Part(nn.Module):
    """Part ``number`` of a model on two ranks, and a layer that both have."""

    def __init__(self, number: int, mark: str = "tensor_model_parallel") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.own = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            torch.manual_seed(9)
            self.common = nn.Linear(5, 3)
        for parameter in self.own.parameters():
            setattr(parameter, mark, True)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.own(inputs), self.common(inputs)


class Whole(nn.Module):
    """Both parts in one process, and the common layer once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(number).own for number in (0, 1))
        self.common = Part(0).common


def _square(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def part_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    own, common = model(batch[0].to(next(model.parameters()).dtype))
    return _square(own, batch[1]) + _square(common, batch[1])


def whole_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([_square(layer(batch[0]), batch[1]) for layer in (*model.parts, model.common)]).sum()


def part_steps() -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Return equal batches for both parts: ``[step][micro-batch][data-parallel rank]``."""
    generator = torch.Generator().manual_seed(3)

    def one() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5, generator=generator), 3 * torch.randn(4, 3, generator=generator)

    return [[[one() for _ in range(2)]] for _ in range(3)]


def of_part(whole: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the values of one part under its own names."""
    part = f"parts.{number}."
    own = {f"own.{name.removeprefix(part)}": value for name, value in whole.items() if name.startswith(part)}
    return own | {name: value for name, value in whole.items() if name.startswith("common.")}
