"""Sparse buffers (a graph's edges): rank 0's on all ranks as dense ones are, or refused before anything is moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.checkpoint import CheckpointError
from shardwise.core.mesh import init_distributed
from shardwise.testing import run_ranks

MAKE: dict[str, Any] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}


class Graph(nn.Module):
    def __init__(self, kind: str, scale: float, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(6, 6)
        edges = MAKE[kind](scale * torch.eye(6).roll(1, 0))
        self.register_buffer("edges", edges, persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.lin(self.edges @ inputs)


def _trained(folder: str) -> None:
    init_distributed()
    inputs = torch.arange(36.0).view(6, 6) / 36
    for stage, kind in ((1, "coo"), (3, "csr"), (3, "csc")):
        plain = Graph(kind, 1.0)
        model = Graph(kind, 1.0 + dist.get_rank())
        session = shardwise.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        assert torch.equal(model.edges.to_dense(), plain.edges.to_dense()) and model.edges.layout is plain.edges.layout
        oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            session.backward(session.module(inputs).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
            plain(inputs).square().mean().backward()
            oracle.step()
            oracle.zero_grad()
        session.checkpoints.save(folder, kind)
        session.checkpoints.load(folder, kind)
        state = session.module.state_dict()
        assert list(state) == ["lin.weight", "lin.bias"]
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)
        with pytest.raises(CheckpointError, match=r"user_state/graph is a tensor \(6, 6\) of layout .*to_dense\(\)"):
            session.checkpoints.save(folder, "refused", user_state={"graph": model.edges})


def _refused() -> None:
    init_distributed()
    for kind in MAKE:
        model = Graph(kind, 1.0, persistent=True)
        with pytest.raises(ValueError, match=r"edges \(6, 6\) has the layout torch.sparse_c.*persistent=False"):
            shardwise.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
        assert torch.equal(model.lin.weight, Graph(kind, 1.0).lin.weight)
    if dist.get_world_size() > 1:
        model = Graph("coo", 1.0)
        if dist.get_rank():
            model.edges = torch.zeros(6, 6).to_sparse()
        with pytest.raises(ValueError, match="tensor edges"):
            shardwise.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_buffers_of_no_state_are_rank_0s(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, _trained, str(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2])
def test_others_are_refused_by_name(ranks: int) -> None:
    run_ranks(ranks, _refused)
