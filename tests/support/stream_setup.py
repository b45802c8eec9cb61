"""Setup for tests of deadlocks on streams: collectives whose waits are queued as on a GPU, and the graph of all waits.

No GPU is needed to detect a deadlock. Each rank records the order in which its host starts collectives on the device
and waits for them. A collective ends when every rank's device has reached it, and a device reaches it when everything
that it was told to wait for before has ended; so a run ends on GPUs exactly if these conditions have no cycle.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import Buffer, Group, GroupMaker, Handle, NativeGroup
from shardwise.core.comm.control import Control
from shardwise.core.grads.backward_passes import BackwardPasses
from shardwise.plan import Plan
from shardwise.session import Session
from tests.support.engine_setup import adam, data, one_mesh, plain_steps, seeded, sharded

CPU = torch.device("cpu")
LAYERS = 7
Name = tuple[str, tuple[int, ...], int]
"""A collective: its communicator, the communicator's ranks, and its number there."""


@dataclass
class Program:
    """The collectives and waits that one rank's host queued, in order, each with the number of host exchanges before
    it.

    Attributes:
        steps: ``(what, collective, meetings)``; what is ``"start"`` or ``"wait"``.
        meetings: the number of exchanges with other hosts so far.
    """

    steps: list[tuple[str, Name, int]] = field(default_factory=list)
    meetings: int = 0

    def note(self, what: str, name: Name) -> None:
        self.steps.append((what, name, self.meetings))


class _Queued:
    """A collective on a device's stream: ``wait`` queues a wait."""

    def __init__(self, group: QueuedGroup, name: Name, run: Callable[[], None] | None) -> None:
        self._group, self._name, self._run = group, name, run

    def finished(self) -> bool:
        return False  # peers are as slow as possible

    def wait(self) -> None:
        self._group.program.note("wait", self._name)
        if self._run is not None:
            self._run, run = None, self._run
            run()


class QueuedGroup(NativeGroup):
    """Behaves as NCCL's group towards the host.

    Sums are computed after the pass: nothing reads one before, if each step has one pass (a second pass would add sums
    that are not there yet).
    """

    program = Program()
    """The program of this rank, for all groups."""
    later: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waits_in_queue = True
        self._ranks = tuple(dist.get_process_group_ranks(self._reduce))
        self._numbers = {"gather": 0, "reduce": 0}

    def _queue(self, communicator: str, run: Callable[[], None] | None) -> Handle:
        name = (communicator, self._ranks, self._numbers[communicator])
        self._numbers[communicator] += 1
        self.program.note("start", name)
        return _Queued(self, name, run)

    def _start_gather(self, out: Tensor, shard: Tensor) -> Handle:
        # The collectives of a communicator end in order on a GPU; gloo runs several at a time, and a ring passes on
        # what the output has by then.
        arrived = torch.empty_like(out)
        start = super()._start_gather(arrived, shard)

        def end() -> None:
            start.wait()
            out.copy_(arrived)

        return self._queue("gather", end)

    def _reduce_scatter(self, out: Tensor, full: Buffer, scale: float) -> Handle:
        given, start = Buffer(full.local.clone()), super()._reduce_scatter
        self.later.append(lambda: start(out, given, scale).wait())
        return self._queue("reduce", None)

    def _all_reduce(self, full: Buffer, scale: float) -> Handle:
        start = super()._all_reduce
        self.later.append(lambda: start(full, scale).wait())
        return self._queue("reduce", None)

    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        self.program.meetings += 1
        return super()._exchange(values, purpose)


PARTS = ("control", "gather", "reduce")


@contextlib.contextmanager
def groups_of(kind: type[NativeGroup], timeout_s: float = 60.0) -> Iterator[None]:
    """Create the groups of CPU ranks' meshes from ``kind``, over gloo, inside this context."""
    make = GroupMaker.make

    def native(maker: GroupMaker, name: str, rank_lists: list[list[int]]) -> Group:
        if all(len(ranks) == 1 for ranks in rank_lists):
            return make(maker, name, rank_lists)
        maker.timeout_s = timeout_s
        over = [maker.process_group(f"{name}_{part}", rank_lists, "gloo") for part in PARTS]
        return kind(name, CPU, Control(name, over[0], maker.activity), *over[1:])

    with mock.patch.object(GroupMaker, "make", native):
        yield


@contextlib.contextmanager
def queued() -> Iterator[Program]:
    """Queue waits as on GPUs inside this context; yield this rank's program. Sums are computed at the end of each
    pass."""
    program, finish = Program(), BackwardPasses._finish

    def finishing(passes: BackwardPasses) -> None:
        finish(passes)
        for make in QueuedGroup.later:
            make()
        QueuedGroup.later.clear()

    with (
        mock.patch.object(QueuedGroup, "program", program),
        mock.patch.object(BackwardPasses, "_finish", finishing),
        groups_of(QueuedGroup),
    ):
        yield program


class Branching(nn.Module):
    """Layers of equal size, which share exchange buffers; each call says which of them run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))

    def forward(self, x: Tensor, way: Sequence[int]) -> Tensor:
        for index in way:
            x = torch.tanh(self.layers[index](x))
        return x


def way_of(rank: int, step: int, differ: bool) -> list[int]:
    """Return all layers in order, or some of them in any order; ``differ``: in another order on each rank."""
    draw = random.Random(1000 * step + (rank if differ else 0))
    if not differ:
        return list(range(LAYERS))
    return draw.sample(range(LAYERS), draw.randrange(1, LAYERS + 1))


def losses_of(model: nn.Module, rank: int, step: int, differ: bool) -> Tensor:
    return model(data(rank, step), way_of(rank, step, differ)).square().mean()


def train(session: Session, steps: int, differ: bool) -> dict[str, Tensor]:
    """Train this rank's part; return the final parameters."""
    for step in range(steps):
        session.backward(losses_of(session.module, session.mesh.rank, step, differ))
        session.optimizer.step()
    return session.module.state_dict()


def train_on(kind: type[NativeGroup], plan: Plan, steps: int, differ: bool) -> tuple[dict[str, Tensor], Program]:
    """Train on ranks of a pool over groups of ``kind``."""
    with queued() if kind is QueuedGroup else contextlib.nullcontext(Program()) as program, groups_of(kind):
        model = seeded(Branching)
        with one_mesh(plan) as mesh, sharded(model, adam(model, lr=0.01), plan, mesh) as session:
            return train(session, steps, differ), program


def plain(size: int, steps: int, differ: bool) -> dict[str, Tensor]:
    """Train in one process."""
    model = seeded(Branching)
    return plain_steps(model, adam(model, lr=0.01), steps, functools.partial(losses_of, differ=differ), size)


def stuck(programs: Sequence[Program]) -> list[Name]:
    """Return the collectives that would never end if the ranks had GPUs."""
    at, begun, ended = [0] * len(programs), dict[Name, int](), set[Name]()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program.steps):
                what, name, _ = program.steps[at[rank]]
                if what == "start":
                    begun[name] = begun.get(name, 0) + 1
                elif name not in ended:
                    break
                at[rank], moved = at[rank] + 1, True
            ended |= {name for name, count in begun.items() if count == len(name[1])}
    return sorted({name for program in programs for _, name, _ in program.steps} - ended)


def begun_apart(programs: Sequence[Program]) -> list[Name]:
    """Return collectives that some rank starts before, and another one after, an exchange between their hosts."""
    meetings: dict[Name, set[int]] = {}
    for program in programs:
        for what, name, met in program.steps:
            if what == "start":
                meetings.setdefault(name, set()).add(met)
    return sorted(name for name, met in meetings.items() if len(met) > 1)
