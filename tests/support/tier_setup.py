"""Setup for tests of tiers: plans by mix, disks that fail on purpose, and digests of everything that a step changes."""

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise.core.memory.disk import store as disk
from shardwise.core.memory.disk.io_threads import Request, RequestQueue, ThreadQueue
from shardwise.core.mesh import Mesh
from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.plan import DiskPlan, Plan, TierPlan, on_device
from shardwise.session import Session, build

SHARES: dict[str, tuple[float, float, float, float]] = {
    "device": (0, 0, 0, 0),
    "s_host": (0, 0, 1, 0),
    "all_host": (1, 0, 1, 0),
    "s_disk": (0, 0, 0, 1),
    "p_host_s_disk": (1, 0, 0, 1),
    "p_disk": (0, 1, 0, 0),
    "p_disk_s_host": (0, 1, 1, 0),
    "all_disk": (0, 1, 0, 1),
    "thirds": (0.34, 0.33, 0.33, 0.34),
}
"""Shares of parameters on host and disk, and of state on host and disk."""


def shared(shares: Sequence[float], directory: str, **knobs: Any) -> TierPlan:
    """Return a plan with shares in the order of :data:`SHARES`, with a disk if one of them needs it."""
    names = ("param_host_fraction", "param_disk_fraction", "state_host_fraction", "state_disk_fraction")
    given: dict[str, Any] = dict(zip(names, map(float, shares), strict=True))
    small: dict[str, Any] = {"queue_depth": 4, "threads": 1, "state_buffers": 3, "param_buffers": 3}
    disk = DiskPlan(directory=directory, **(small | knobs)) if shares[1] + shares[3] else None
    return replace(on_device(), disk=disk, **given)


def tiers(mix: str, directory: str, **knobs: Any) -> TierPlan:
    """Return the plan of one mix."""
    fields: dict[str, Any] = {"block_bytes": 4096, "single_submit": False, "overlap_events": True}
    return shared(SHARES[mix], directory, **(fields | knobs))


def with_tiers(plan: Plan, mix: str, directory: str, **knobs: Any) -> Plan:
    """Return ``plan`` with its data in the tiers of a mix."""
    return plan.but(tiers=tiers(mix, directory, **knobs))


def small_tiles(numel: int = 60) -> Any:
    """Split chunks into many tiles inside this context."""
    return mock.patch.dict(TILE_NUMEL, {"cpu": numel})


class Fault:
    """Makes requests fail in all stores that are created inside :meth:`installed`. With ``at=None`` none fails."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.forever = False
        self.number = errno.EIO
        self.writing: bool | None = None
        self.seen = self.failed = 0

    def arm(self, at: int, number: int = errno.EIO, writing: bool | None = None, forever: bool = False) -> None:
        """Let the ``at``-th request from now (from 0) fail, with ``forever`` all later ones too."""
        self.at, self.number, self.writing, self.forever, self.seen, self.failed = at, number, writing, forever, 0, 0

    def lift(self) -> None:
        self.at = None

    def result(self, request: Request, result: int) -> int:
        if self.at is None or (self.writing is not None and request.writing != self.writing):
            return result
        self.seen += 1
        fails = self.seen > self.at if self.forever else self.seen == self.at + 1
        self.failed += fails
        return -self.number if fails else result

    @contextlib.contextmanager
    def installed(self) -> Iterator[Self]:
        with mock.patch.object(disk, "ThreadQueue", lambda *given: _Faulty(ThreadQueue(*given), self)):
            yield self


class _Faulty:
    def __init__(self, inner: RequestQueue, fault: Fault) -> None:
        self.inner, self.fault = inner, fault

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        return [(request, self.fault.result(request, result)) for request, result in self.inner.reap(at_least)]

    def close(self) -> None:
        self.inner.close()


def _tensor_bytes(value: Tensor) -> bytes:
    # Copied bit by bit, so that NaN and -0.0 count.
    flat = value.detach().cpu().contiguous().view(-1)
    return str((value.dtype, tuple(value.shape))).encode() + flat.view(torch.uint8).numpy().tobytes()


def digest(value: Any) -> str:
    """Return a digest of nested dicts and lists of tensors and plain values."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            total.update(_tensor_bytes(part))
        elif isinstance(part, dict):
            for key, entry in part.items():
                total.update(str(key).encode())
                add(entry)
        elif isinstance(part, list | tuple):
            for entry in part:
                add(entry)
        else:
            total.update(json.dumps(part, default=str).encode())

    add(value)
    return total.hexdigest()


def everything(session: Session) -> dict[str, str]:
    """Return digests of masters, compute parameters, optimizer state with step counts, and gradients."""
    session._engine.pool.settle()
    return {
        "masters": digest(session.module.state_dict()),
        "parameters": digest({n: v for n, v in session.module.full_state(masters=False) if isinstance(v, Tensor)}),
        "optimizer": digest([each.state_dict() for each in session.optimizers]),
        "gradients": digest(session.full_gradients()),
        "small": digest([_small(each.optimizer) for each in session.optimizers]),
    }


def _small(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the state of this rank's shards that is not per element."""
    states = optimizer.state.values()
    return [{k: v for k, v in entry.items() if not (isinstance(v, Tensor) and v.dim())} for entry in states]


class Net(nn.Module):
    """Blocks of different sizes, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.blocks[3].weight = self.blocks[2].weight
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale * self.frozen


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(rank: int, number: int) -> Tensor:
    """Return ``[4, 6]`` in fp32."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + number))


def backward(session: Session, step: int, passes: int = 2) -> list[float]:
    """Run the backward passes of a step; return their losses."""
    losses = []
    for index in range(passes):
        loss = session.module(batch(session.mesh.rank, 10 * step + index)).float().square().mean()
        session.backward(loss)
        losses.append(float(loss.detach()))
    return losses


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),  # has state before the first step
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@contextlib.contextmanager
def session_of(plan: Plan, kind: str, mesh: Mesh) -> Iterator[Session]:
    """Yield a session of :func:`make_net`; it is not closed if the test fails, since peers are gone then."""
    model = make_net()
    session = build(model, OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad]), plan, mesh)
    yield session
    session.close()


def undisturbed(plan: Plan, kind: str, mesh: Mesh, steps: int) -> dict[str, str]:
    """Return the results of so many steps without faults."""
    with session_of(plan, kind, mesh) as session:
        for step in range(steps):
            backward(session, step)
            session.optimizer.step()
        return everything(session)
