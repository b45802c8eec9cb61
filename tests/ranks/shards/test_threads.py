"""Threads of one rank that evaluate one model at the same time."""

from __future__ import annotations

import dataclasses
import sys
import threading

import pytest
import torch
from saving_setup import ROWS, Table
from torch import Tensor

from shardwise.plan import ByTensor, Plan, on_device, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import data, seeded, sgd, sharded
from tests.support.sets import full

NAMES = ["linear", "layer_norm", "attention", "lstm", "mul", "conv2d"]
THREADS, TIMES = 3, 12


def table() -> Table:
    return Table(NAMES)


def served(plan: Plan) -> tuple[list[str], Tensor]:
    """What went wrong in any thread, and a parameter after a step that follows."""
    model, plain = seeded(table), seeded(table)
    wrong: list[str] = []

    def serve(thread: int) -> None:
        try:
            with torch.no_grad():
                for index in range(TIMES):
                    x = data(0, thread, index, rows=ROWS)
                    if not torch.allclose(model(x), plain(x), rtol=1e-12, atol=0):
                        wrong.append(f"thread {thread}, pass {index}")
        except Exception as error:
            wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with sharded(model, sgd(model), plan) as session:
        threads = [threading.Thread(target=serve, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        session.backward(session.module(data(0, 0, rows=ROWS)))
        session.optimizer.step()
        return wrong, session.module.state_dict()["first.weight"]


@pytest.mark.parametrize(
    "plan",
    [
        zero(3),
        *full(
            zero(3).but(shared_memory=False, same_order=False), zero(3).but(packing=ByTensor(persist_numel=0)), zero(2)
        ),
    ],
    ids=["shared", "gloo", "alone", "zero2"],
)
def test_threads_evaluate_one_model(plan: Plan) -> None:
    model = seeded(table)
    optimizer = sgd(model)
    model(data(0, 0, rows=ROWS)).backward()
    optimizer.step()
    for wrong, weight in run_ranks(2, served, plan):
        assert not wrong
        torch.testing.assert_close(weight, model.first.weight.detach(), rtol=1e-11, atol=0)


def overlapping(plan: Plan) -> list[str]:
    """A second thread enters while the first is inside."""
    model = seeded(table)
    told: list[str] = []

    def evaluate() -> None:
        try:
            model(data(0, 0, rows=ROWS))
        except RuntimeError as error:
            told.append(str(error))

    def within(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=evaluate)
            other.start()
            other.join()

    with sharded(model, sgd(model), plan) as session:
        handle = model.ops["lstm"].register_forward_hook(within)
        loss = session.module(data(0, 0, rows=ROWS))
        handle.remove()
        session.backward(loss)
        session.optimizer.step()
    return told


def test_overlapping_threads_under_a_capacity_are_an_error() -> None:
    limited = dataclasses.replace(on_device(), device_capacity_bytes=1 << 24)
    for told in run_ranks(1, overlapping, zero(3).but(tiers=limited)):
        assert len(told) == 1
        assert "hold a lock" in told[0]
    assert run_ranks(2, overlapping, zero(3)) == [[], []]
