"""Small tiles are stepped together, and every parameter gets what it would get alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import ByNumel, Plan, zero
from shardwise.session import build
from tests.support.sets import full

WIDTHS = [3, 5, 0, 7, 2, 4]


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    for number, width in enumerate(WIDTHS):
        model.register_parameter(f"w{number}", nn.Parameter(torch.randn(width, 3)))
        model.register_parameter(f"b{number}", nn.Parameter(torch.randn(width)))

    def forward(step: int) -> torch.Tensor:
        used = [p for name, p in model.named_parameters() if step != 1 or not name.endswith("2")]
        return torch.stack([(p * (step + 1)).square().sum() for p in used if p.numel()]).sum()

    model.forward = forward
    return model


Make = Callable[[nn.Module], torch.optim.Optimizer]


def grouped(kind: type[torch.optim.Optimizer], **options: object) -> Make:
    """Weights and biases in groups of their own, as those with and without weight decay.

    Fused, as shards are stepped where torch has such a kernel: others round differently.
    """

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n[0] == kind], "lr": lr} for kind, lr in (("w", 0.1), ("b", 0.3))
        ]
        return kind(groups, **options)  # type: ignore[call-arg]

    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "AdamW": grouped(torch.optim.AdamW, fused=True),
    "AdamW, foreach": grouped(torch.optim.AdamW, foreach=True),
    "Adam with amsgrad": grouped(torch.optim.Adam, amsgrad=True, fused=True),
    "SGD with momentum": grouped(torch.optim.SGD, momentum=0.9, fused=True),
    "Adagrad": grouped(torch.optim.Adagrad, fused=True),
    "NAdam": grouped(torch.optim.NAdam),
}


@contextmanager
def calls_of(optimizer: torch.optim.Optimizer) -> Iterator[list[int]]:
    """Of every call of the optimizer inside, how many tensors it was given."""
    calls: list[int] = []
    kind, real = type(optimizer), type(optimizer).step

    def step(self: torch.optim.Optimizer, *args: object) -> object:
        calls.append(sum(len(group["params"]) for group in self.param_groups))
        return real(self, *args)

    with mock.patch.object(kind, "step", step):
        yield calls


def trained(kind: Make, plan: Plan | None, tile_numel: int) -> tuple[list[torch.Tensor], list[int]]:
    model = make()
    optimizer = kind(model)
    with mock.patch.dict(TILE_NUMEL, {"cpu": tile_numel}), calls_of(optimizer) as calls:
        if plan is None:
            for step in range(3):
                optimizer.zero_grad()
                model(step).backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()], []
        session = build(model, optimizer, plan)
        for step in range(3):
            session.backward(session.module(step))
            session.optimizer.step()
            session.optimizer.zero_grad()
        values = session.module.state_dict()
        session.close()
        return [values[name] for name, _ in make().named_parameters()], calls


def _cases() -> Iterator[Any]:
    """Every optimizer with both sizes of chunks is quick, and every size of tiles with some of them."""
    chunks, tiles = enumerate([8, 10**6]), [1, 4, 10, 30, 10**6]
    for (row, chunk_numel), (column, (name, kind)) in itertools.product(chunks, enumerate(OPTIMIZERS.items())):
        for layer, tile_numel in enumerate(tiles):
            case = pytest.param(kind, tile_numel, chunk_numel, id=f"{chunk_numel}-{name}-{tile_numel}")
            yield case if layer == (column + 2 * row) % len(tiles) else full(case)[0]


@pytest.mark.parametrize(("kind", "tile_numel", "chunk_numel"), _cases())
def test_values_are_torchs(kind: Make, tile_numel: int, chunk_numel: int) -> None:
    plan = zero(2).but(packing=ByNumel(chunk_numel=chunk_numel))
    expected, _ = trained(kind, None, 1)
    found, calls = trained(kind, plan, tile_numel)
    assert len(expected) == len(found) == 2 * len(WIDTHS)
    for one, other in zip(found, expected, strict=True):
        if tile_numel >= max(p.numel() for p in make().parameters()):
            assert torch.equal(one, other)
        else:  # kernels round the last elements of a piece as single ones
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert calls and min(calls) >= 1


def test_one_call_steps_a_group_of_many_chunks() -> None:
    plan = zero(2).but(packing=ByNumel(chunk_numel=8))
    _, calls = trained(OPTIMIZERS["AdamW"], plan, 10**6)
    assert len(calls) == 3 * 2  # in each step one a group
    _, alone = trained(OPTIMIZERS["AdamW"], plan, 1)
    assert len(alone) > 10 * len(calls)


def test_an_optimizer_of_others_steps_tile_by_tile() -> None:
    """What its ``step()`` does with tensors beside each other is not known."""

    class Own(torch.optim.SGD):
        element_wise = True

    _, calls = trained(grouped(Own), zero(2).but(packing=ByNumel(chunk_numel=8)), 10**6)
    assert len(calls) > 3 * 4
