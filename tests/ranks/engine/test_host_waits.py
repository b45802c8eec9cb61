"""Host waits of a training step: reads of device values, exchanges with other ranks, events, streams and copies.

A CPU stands for a GPU: ``runs_ahead`` is patched, so that the code that avoids host waits is used, and reads of tensors
are counted.
"""

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.core.checks import batches, guards
from shardwise.core.engine import optimizer
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool, assert_close, run_ranks
from tests.support import exchange_setup
from tests.support.engine_setup import adam, one_mesh, seeded, sharded
from tests.support.late_setup import train
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.stream_setup import Branching, losses_of

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
PACKAGE = Path(shardwise.__file__).parent
"""Identifies frames of the package; folder names do not, because the clone may have the same name."""
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Frames of comprehensions, which exist in Python 3.11 only."""
LATER = "device.py"
"""Reads values that were copied to the host in the step before."""
STEPS = 5


@functools.cache
def is_ours(filename: str) -> bool:
    return PACKAGE in Path(filename).parents


def caller() -> tuple[str, str]:
    """Return the file and the function of the innermost frame of the package, or empty strings."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name not in INLINED:
            return Path(code.co_filename).name, code.co_name
        frame = frame.f_back
    return "", ""


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Use the code paths of a device for which reading a value is expensive."""
    yes = lambda _device: True  # noqa: E731
    with contextlib.ExitStack() as stack:
        for module in (batches, guards, optimizer):
            stack.enter_context(mock.patch.object(module, "runs_ahead", yes))
        yield


@contextlib.contextmanager
def counted() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the reads of tensors, by the function that reads, and the purposes of exchanges."""
    reads: list[str] = []

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            at, function = caller()
            # Exchanged values and settings are on the host already.
            if at and at not in ("control.py", "shared.py", LATER):
                reads.append(f"{name} in {function} of {at}")
            return original(self, *args, **kwargs)

        return read

    patched = {name: reading(name) for name in READS}
    with mock.patch.multiple(torch.Tensor, **patched), exchange_setup.counted() as exchanges:
        yield reads, exchanges


def one_step(plan: Plan) -> tuple[list[str], list[str], list[float | None], list[float | None]]:
    """Return reads and exchanges of the last step, and the norms of all steps with and without ``as_on_a_gpu``."""
    norms: dict[bool, list[float | None]] = {True: [], False: []}
    for ahead in (True, False):
        with as_on_a_gpu() if ahead else contextlib.nullcontext(), counted() as (reads, exchanges):
            model = seeded(Branching)
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


@pytest.mark.parametrize(("stage", "shared"), [(2, False), (3, None), *full((1, None), (3, False))])
def test_step_reads_no_device_values(stage: int, shared: bool | None) -> None:
    plan = zero(stage).but(shared_memory=shared)
    for reads, exchanges, late, now in run_ranks(2, one_step, plan):
        assert reads == []
        assert exchanges == OTHERS
        assert_close({"norms": torch.tensor(late)}, {"norms": torch.tensor(now)}, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("stage", [3, *full(2)])
def test_clipping_reads_the_norm_once(stage: int) -> None:
    for reads, exchanges, late, now in run_ranks(2, one_step, zero(stage).but(max_norm=0.1)):
        assert reads == ["cpu in _shares of norm.py", "tolist in _shares of norm.py"]
        assert exchanges == OTHERS
        assert late == now


@on_ranks(2)
def test_write_to_a_resharded_parameter_raises_a_step_later() -> None:
    model = seeded(Branching)
    with as_on_a_gpu(), sharded(model, adam(model), zero(3)) as session:
        for step in range(3):
            session.backward(losses_of(session.module, session.mesh.rank, step, False))
            if step < 2:
                session.optimizer.step()
            if step == 0:
                model.layers[2].weight.data[0, 0] = 3.0  # not gathered: its storage is a single NaN
        raises(RuntimeError, "layers.2.weight.* was written to", session.optimizer.step)


# ---- events, streams and blocking copies on a late device


def by_line(waits: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the thread and the source line of each wait."""
    at = [(thread.split("_")[0], *where.rsplit(":", 1)) for thread, where in waits]
    return {(who, linecache.getline(str(PACKAGE / "core" / file), int(line)).strip()) for who, file, line in at}


LANDED, READ = "self._arrival()", "read.synchronize()"
"""Waits for a gradient that the host update reads, and for the copy that used a slot two tiles before."""
ALLOWED = {
    "synchronize(shards.mesh.device)  # uploads still read the shards that the CPU will write",
    "return not all(later.value() for later in pending)",
    "norms = torch.stack([*norm_of_each([*own.values()], p, dtype)]).double().cpu()",
    LANDED,
    READ,
}
"""Allowed waits, including values requested in the step before, and the norm of gradients on the device."""
MORE = full((1, "host"), (1, "mixed"), (2, "state_host"), (2, "early_host"))


@pytest.mark.parametrize(("ranks", "name"), [(1, "zero2_state_host"), (1, "early"), *MORE])
def test_offload_waits_in_step_only(ranks: int, name: str) -> None:
    """In ``step()`` the host waits for gradients and slots, but not for copies of updated weights."""
    with RankPool(ranks) as pool:  # the device has to exist at the first backward pass
        found = pool.run(train, name, 0)
    for each in found:
        during, lines = by_line(each.in_passes), {line for _, line in by_line(each.in_steps)}
        assert during <= {("shardwise-update", LANDED)} and each.right, each
        assert lines <= ALLOWED and (READ in lines) is (name in ("zero2_state_host", "state_host", "early")), lines
