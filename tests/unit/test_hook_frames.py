"""A module inside a block that has pinned its unit needs no frame of its own; any other has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.core.shards.hooks import GatherHooks
from shardwise.plan import zero
from shardwise.session import Session, build
from tests.support.alike import alike_mesh


class Leaf(nn.Linear):
    """Calls itself once, where it is told to."""

    again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            self.again = False
            x = self(x)
        return nn.functional.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Two layers; other saved-tensor hooks around the second, where that is wanted."""

    others = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Leaf(4, 4), Leaf(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if not self.others:
            return self.two(x)  # type: ignore[no-any-return]
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return self.two(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def built() -> Iterator[tuple[Session, list[str]]]:
    """A session, and the classes of modules that got a frame since it was built."""
    entered: list[str] = []
    real = GatherHooks._enter

    def enter(self: GatherHooks, module: nn.Module, units: list[int]) -> None:
        entered.append(type(module).__name__)
        real(self, module, units)

    plan = zero(3)
    with alike_mesh(plan, 0, 2) as (mesh, _), mock.patch.object(GatherHooks, "_enter", enter):
        model = Model()
        session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, mesh)
        yield session, entered
        hooks = session.engine.attachment.hooks
        assert hooks is not None and not hooks._running.frames and not hooks._running.packs
        assert not any(hooks.pool._pins.values())
        session.close()


@pytest.mark.parametrize("case", ["plain", "calls itself", "other hooks", "leaf alone", "leaf alone calls itself"])
def test_who_gets_a_frame(case: str) -> None:
    with built() as (session, entered):
        model: Any = session.model
        block = model.blocks[1]
        block.one.again, block.others = case.endswith("calls itself"), case == "other hooks"
        if case.startswith("leaf alone"):
            block.one(torch.ones(2, 4)).sum().backward()
            assert entered == ["Leaf"] * (2 if case.endswith("calls itself") else 1)
            session.optimizer.zero_grad()  # type: ignore[union-attr]
            return
        session.backward(session.module(torch.ones(2, 4)).sum())
        leaves = entered.count("Leaf")
        assert entered.count("Model") == 1 and entered.count("Block") == 3
        assert leaves == (1 if case == "other hooks" else 0)
