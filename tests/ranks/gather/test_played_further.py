"""Steps that are played where parameters travel in 8 bits, and where all ranks read everything in the midst of one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from engine_setup import data, one_mesh, seeded, sharded
from sets import full
from stream_setup import Branching, queued
from test_played_scripts import USUAL, Strays, Ways, alike_for, counted, plain, sgd, train, usual
from torch import Tensor

from shardwise.build import Session
from shardwise.gather.pool import ChunkPool
from shardwise.plan import zero
from shardwise.testing import assert_close, run_ranks


def in_8_bits(
    ways: Ways, steps: int, plays: bool, what: str = "compress_weights"
) -> tuple[dict[str, Tensor], dict[str, int], list[float]]:
    plan, losses = zero(3).but(prefetch=1, **{what: "fp8"}), []
    rounds = contextlib.nullcontext() if plays else mock.patch.object(ChunkPool, "_scripted", False)
    with queued(), alike_for(2), counted() as found, rounds:
        model = seeded(Branching).float()
        model.layers[0].requires_grad_(what != "compress_frozen")
        with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
            assert session.optimizer is not None
            for step in range(steps):
                x = data(mesh.rank, step).float()
                loss = session.module(x, ways(mesh.rank, step)).square().mean()
                losses.append(float(loss))
                session.backward(loss)
                session.optimizer.step()
                session.optimizer.zero_grad()
            return session.module.state_dict(), found, losses


@pytest.mark.parametrize("ways", [*full(usual), Strays(1, 0.3)], ids=["usual", "strays"])
def test_parameters_in_8_bits_are_played_too(ways: Ways) -> None:
    """What a peer answers with is what it would send to all: the same numbers as in rounds, to the last bit."""
    played, rounds = (run_ranks(3, in_8_bits, ways, 20, plays) for plays in (True, False))
    assert all(found["played"] > 3 for _, found, _ in played) and rounds[0][1]["played"] == 0
    assert (sum(found["strayed"] for _, found, _ in played) > 0) == (ways is not usual)
    for (state, _, losses), (expected, _, others) in zip(played, rounds, strict=True):
        assert losses == others
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_frozen_parameters_in_8_bits_are_not() -> None:
    """A peer would answer with what was loaded, and a gather brings it rounded."""
    for _, found, losses in run_ranks(2, in_8_bits, usual, 6, True, "compress_frozen"):
        assert found["played"] == 0 and len(losses) == 6


# ---- gathered() inside a forward pass


class Looks(Branching):
    """Reads parameters between its layers, as all ranks do: all of them, or two while it goes on."""

    session: Session | None = None
    some = False

    def forward(self, x: Tensor, way: Sequence[Sequence[int]]) -> Tensor:
        first, rest = way
        x = super().forward(x, first)
        if self.session is not None and self.some:
            with self.session.gathered(self.session.params[1:3]):
                return super().forward(x, rest)
        if self.session is not None:
            with self.session.module.gathered():
                pass
        return super().forward(x, rest)


def way(rank: int, step: int) -> Sequence[Sequence[int]]:
    """In one step that is played rank 0 has used nothing yet, and rank 1 has, where both read everything."""
    return ((), USUAL) if (rank, step) == (0, 6) else (USUAL[:1], USUAL[1:])


def looks(steps: int, some: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    plan = zero(3)
    with queued(), alike_for(2), counted() as found:
        model = seeded(Looks)
        with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
            model.session, model.some = session, some
            train(session, way, steps)
            model.session = None
            return session.module.state_dict(), found


@pytest.mark.parametrize("some", [False, *full(True)])
def test_parameters_are_read_in_the_midst_of_a_played_pass(some: bool) -> None:
    expected = plain(2, way, 8, Looks)
    for state, found in run_ranks(2, looks, 8, some, timeout=90.0):
        assert found["played"] > 1
        assert_close(state, expected, 1e-9, "read in the midst")
