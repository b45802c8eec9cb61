"""What a training step makes the host wait for, counted: values it reads of the device, and exchanges with other ranks.

A CPU stands in for a GPU: the code that spares the host waits there is switched on, and whatever would be read of the
device counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.core.checks import batches, guards
from shardwise.core.comm import Group, PeerError
from shardwise.core.engine import optimizer, pipelined
from shardwise.plan import PipelinePlan, Plan, replicated, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import SCALER, adam, one_mesh, seeded, sharded, told
from tests.support.sets import full
from tests.support.stream_setup import Branching, losses_of
from tests.support.tensor_cases import gpt2
from tests.support.tensor_setup import loss_of

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
PACKAGE = Path(shardwise.__file__).parent
"""The clone's folder may have the package's name, so that names of folders do not tell whose a frame is."""
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Frames that only Python 3.11 makes."""
LATER = "device.py"
"""Reads what was sent to the host a step before."""
STEPS = 5


@functools.cache
def is_ours(filename: str) -> bool:
    return PACKAGE in Path(filename).parents


def caller() -> tuple[str, str]:
    """The file and the function of the innermost frame of the package; of none, nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name not in INLINED:
            return Path(code.co_filename).name, code.co_name
        frame = frame.f_back
    return "", ""


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, what reading a value costs on a GPU decides."""
    yes = lambda _device: True  # noqa: E731
    with contextlib.ExitStack() as stack:
        for module in (batches, guards, optimizer, pipelined):
            stack.enter_context(mock.patch.object(module, "runs_ahead", yes))
        yield


@contextlib.contextmanager
def counted() -> Iterator[tuple[list[str], list[str]]]:
    """What is read of tensors inside, by the place that reads it, and for what ranks exchange something."""
    reads: list[str] = []
    exchanges: list[str] = []

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            at, function = caller()
            # What ranks exchange is on the host already, and so are settings.
            if at and at not in ("control.py", "shared.py", LATER):
                reads.append(f"{name} in {function} of {at}")
            return original(self, *args, **kwargs)

        return read

    def telling(name: str) -> Callable[..., Any]:
        original = getattr(Group, name)

        def tell(group: Group, values: Any, purpose: str = "", *rest: Any, **named: Any) -> Any:
            exchanges.append(purpose)
            return original(group, values, purpose, *rest, **named)

        return tell

    patched = {name: reading(name) for name in READS}
    told = {name: telling(name) for name in ("exchange", "summarize")}
    with mock.patch.multiple(torch.Tensor, **patched), mock.patch.multiple(Group, **told):
        yield reads, exchanges


def one_step(plan: Plan, dtype: torch.dtype) -> tuple[list[str], list[str], list[float | None], list[float | None]]:
    """Of the last of some steps: what was read and exchanged; norms of all steps, and those of a host that waits."""
    norms: dict[bool, list[float | None]] = {True: [], False: []}
    for ahead in (True, False):
        with as_on_a_gpu() if ahead else contextlib.nullcontext(), counted() as (reads, exchanges):
            model: nn.Module = seeded(Branching).to(dtype)
            with one_mesh(plan) as mesh, sharded(model, adam(model), plan, mesh) as session:
                for step in range(STEPS):
                    loss = losses_of(session.module, mesh.rank, step, False)
                    reads.clear()
                    exchanges.clear()
                    session.backward(loss)
                    session.optimizer.step()
                    if ahead:
                        found = list(reads), list(exchanges)
                    norms[ahead].append(session.optimizer.get_grad_norm())
    return *found, norms[True], norms[False]


OTHERS = ["which parameters had gradients", "the gradient norm"]


@pytest.mark.parametrize(
    ("stage", "shared"),
    [
        pytest.param(
            stage,
            shared,
            id=f"{stage}-{'gloo' if shared is False else 'shared'}",
            marks=() if (stage, shared) in ((2, False), (3, None)) else pytest.mark.full,
        )
        for stage in (1, 2, 3)
        for shared in (None, False)
    ],
)
def test_a_step_reads_nothing_of_the_device(stage: int, shared: bool | None) -> None:
    plan = zero(stage).but(shared_memory=shared)
    for reads, exchanges, late, now in run_ranks(2, one_step, plan, torch.float64):
        assert reads == []
        assert exchanges == OTHERS
        assert_close({"norms": torch.tensor(late)}, {"norms": torch.tensor(now)}, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("stage", [3, *full(2)])
def test_clipping_reads_the_norm_once(stage: int) -> None:
    for reads, exchanges, late, now in run_ranks(2, one_step, zero(stage).but(max_norm=0.1), torch.float64):
        assert reads == ["cpu in _shares of norm.py", "tolist in _shares of norm.py"]
        assert exchanges == OTHERS
        assert late == now


def test_what_a_program_wrote_to_parameters_is_known_without_a_read() -> None:
    for reads, exchanges, _, _ in run_ranks(2, one_step, zero(2, torch.bfloat16), torch.float32):
        assert not reads
        assert exchanges == OTHERS


def skipped(plan: Plan, rows_up_to: int) -> tuple[list[str], list[str], str | None]:
    """Of a step in which one rank's gradients of several parameters are not finite: what was read, exchanged, told."""
    model: nn.Module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
    with (
        mock.patch.object(Group, "rows_up_to", rows_up_to),
        as_on_a_gpu(),
        counted() as (reads, exchanges),
        sharded(model, adam(model), plan) as session,
    ):
        handle = model[2].weight.register_hook(lambda grad: grad * math.inf) if session.mesh.rank else None
        session.backward(session.module(torch.ones(2, 6, dtype=torch.float16)).square().mean())
        session.optimizer.step()
        if handle is not None:
            handle.remove()
        return reads, exchanges, session.optimizer.skipped_because


@pytest.mark.parametrize(("stage", "rows_up_to"), [(2, 1), (3, 16), *full((1, 1), (1, 16), (2, 16)), *full((3, 1))])
def test_a_skipped_step_names_the_parameter_in_one_read(stage: int, rows_up_to: int) -> None:
    plan = zero(stage, torch.float16).but(shared_memory=False, scaler=SCALER)
    for reads, exchanges, because in run_ranks(3, skipped, plan, rows_up_to):
        found = [read for read in reads if "in first_non_finite of" in read]
        assert found == ["tolist in first_non_finite of optimizer.py"]
        assert exchanges.count("which gradient is not finite") == 1
        assert because is not None and "the gradient of 2.weight is not finite" in because


ALONE: dict[str, tuple[Plan, list[str]]] = {
    "ddp": (replicated(), []),
    **{f"zero{stage}": (zero(stage), []) for stage in (1, 2, 3)},  # type: ignore[arg-type]
    "bf16": (zero(3, torch.bfloat16), []),
}
"""What ``tests/gpu/test_counts.py`` expects of one rank, whose arrays all stay gathered."""


@pytest.mark.parametrize("name", ["zero3", "bf16", *full("ddp", "zero1", "zero2")])
def test_one_rank_reads_no_more(name: str) -> None:
    plan, expected = ALONE[name]
    dtype = torch.float64 if plan.precision.param_dtype is None else torch.float32
    ((reads, _, _, _),) = run_ranks(1, one_step, plan, dtype)
    assert reads == expected


def late_write(plan: Plan) -> str:
    with as_on_a_gpu():
        model = seeded(Branching)
        with one_mesh(plan) as mesh, sharded(model, adam(model), plan, mesh) as session:
            weight = session.module.unwrap().layers[2].weight
            session.backward(losses_of(session.module, mesh.rank, 0, False))
            session.optimizer.step()
            weight.data[0, 0] = 3.0  # it is not gathered: one NaN stands for all of it
            session.backward(losses_of(session.module, mesh.rank, 1, False))
            session.optimizer.step()
            session.backward(losses_of(session.module, mesh.rank, 2, False))
            return told(session.optimizer.step)


def test_a_write_to_an_absent_parameter_is_told_a_step_later() -> None:
    for message in run_ranks(2, late_write, zero(3)):
        assert "layers.2.weight" in message and "was written to" in message


def tokens(seed: int) -> dict[str, Tensor]:
    ids, labels = torch.randint(0, 20, (2, 4, 5), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": labels}


@contextlib.contextmanager
def sending() -> Iterator[list[str]]:
    """When values are sent to the host inside, and when they are read there."""
    found: list[str] = []

    class Noted(batches.Later):
        def __init__(self, value: Tensor) -> None:
            found.append("sent")
            super().__init__(value)

        def value(self) -> bool | float:
            found.append("read")
            return super().value()

    with contextlib.ExitStack() as stack:
        for module in (batches, pipelined):
            stack.enter_context(mock.patch.object(module, "Later", Noted))
        yield found


def compared(plan: Plan, same: bool) -> tuple[list[str], list[str], str]:
    """The last of some steps of ranks that hold one model together: what comparing their batches read of the device,
    what happened in which order, and what a step says in which this rank was given other values."""
    with as_on_a_gpu(), counted() as (reads, _), sending() as order, one_mesh(plan) as mesh:
        model = gpt2()[0].made()
        with sharded(model, adam(model), plan, mesh) as session:
            blocks = [each for each in model.modules() if type(each).__name__.endswith("Block")]
            for each in blocks:
                each.register_forward_pre_hook(lambda *_: order.append("pass"))

            def step(batch: dict[str, Tensor]) -> None:
                if session.pipeline is not None:
                    session.pipeline.step(batch, lambda outputs, _: loss_of(outputs), train=True)
                else:
                    session.backward(loss_of(session.module(**batch)))
                session.optimizer.step()
                session.optimizer.zero_grad()

            for index in range(2):
                reads.clear()
                order.clear()
                step(tokens(index))
            found = [each for each in reads if each.endswith(("batches.py", "pipelined.py"))], list(order)
            try:
                step(tokens(7 if same else 7 + mesh.mesh_group.rank))
            except (PeerError, ValueError) as error:
                return *found, str(error)
            return *found, ""


HELD_TOGETHER: dict[str, Plan] = {
    "stages": zero(1).but(pp=2, pipeline=PipelinePlan(microbatches=2)),
    "parts": zero(1).but(tp=2),
}


@pytest.mark.parametrize("name", HELD_TOGETHER)
def test_comparing_batches_waits_for_no_pass(name: str) -> None:
    """They are on their way to the host before the first pass, and read behind the last."""
    for reads, order, said in run_ranks(2, compared, HELD_TOGETHER[name], True):
        assert reads == [] and said == ""
        assert order[0] == "sent" and order[-1] == "read" and order.count("read") == 1, order
        assert "pass" in order and order.count("sent") == 1, order


@pytest.mark.parametrize("name", HELD_TOGETHER)
def test_batches_with_other_values_are_told_at_the_end(name: str) -> None:
    for _, _, said in run_ranks(2, compared, HELD_TOGETHER[name], False):
        assert "2 different batches" in said and "of the same shapes, with other values" in said
