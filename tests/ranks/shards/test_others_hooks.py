"""Saved-tensor hooks that a program pushes and pops around a module by hooks of its own (as activation offloading
does)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.torch_internals import top_saved_hooks
from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, data, seeded, sharded


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6))


def around_a_module() -> tuple[bool, int]:
    """Whether a pass leaves no hooks, and how often the program's own were asked."""
    model, packed = seeded(net), list[Tensor]()

    def pack(value: Tensor) -> Tensor:
        packed.append(value.detach())
        return value

    others = torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)

    def enter(*_args: Any) -> None:
        others.__enter__()

    def leave(*_args: Any) -> None:
        others.__exit__(None, None, None)

    with sharded(model, adam(model), zero(3)) as session:
        # Registered after ours, which leave the module first.
        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizers[0].step()
        return top_saved_hooks() is None, len(packed)


def test_hooks_of_others_that_end_after_a_module_leave_none_of_ours() -> None:
    assert all(clean and asked for clean, asked in run_ranks(2, around_a_module))
