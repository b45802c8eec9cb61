"""Setup for tests of :mod:`tests.support.alike`: a model of blocks, plans, steps, and a log of real ranks' calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.scale_model import Blocks
from shardwise.core.comm import GroupMaker, GroupRequest, NativeGroup, control, native, register_backend
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from tests import other_numbers
from tests.support.alike import Asked

PLANS: dict[str, Plan] = {"zero1": zero(1), "zero2": zero(2), "zero3": zero(3), "hybrid": zero(3, dp_replicate=2)}
WIDTH = 8


def made(plan: Plan, mesh: Mesh, blocks: int) -> Session:
    """Build the same model on every rank."""
    other_numbers.seed(0)
    model = Blocks(blocks, WIDTH)
    return build(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan, mesh)


def train(session: Session, steps: int) -> None:
    """Train on the same batches on every rank."""
    for step in range(steps):
        x = torch.full((2, WIDTH), 0.1 * (step + 1))
        session.backward(session.module(x).square().mean())
        session.optimizer.step()
        session.optimizer.zero_grad()


def counted(mesh: Mesh) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Return calls and bytes, by group."""
    return [(group.name, dict(group.traffic.calls), dict(group.traffic.bytes)) for group in mesh.groups]


def real_native(maker: GroupMaker, request: GroupRequest) -> NativeGroup:
    """Use the backend's own collectives, over gloo."""
    lists = request.rank_lists
    gather, reduce = (maker.process_group(f"{request.name}_{each}", lists, "gloo") for each in ("gather", "reduce"))
    return NativeGroup(request.called, maker.device, request.control, gather, reduce)


@contextlib.contextmanager
def recorded(asked: Asked) -> Iterator[None]:
    """Record shardwise's calls of torch.distributed inside this context, as :class:`AlikeProcessGroup` does."""

    def noted(where: Any, name: str, called: str, sizes: Callable[..., tuple[int, int]]) -> Any:
        whole = getattr(where, name)

        def call(*args: Any, **rest: Any) -> Any:
            asked.add(called, *sizes(*args))
            return whole(*args, **rest)

        return mock.patch.object(where, name, call)

    def gathered(out: Tensor, own: Tensor) -> tuple[int, int]:
        return own.nbytes, out.nbytes - own.nbytes

    def scattered(out: Tensor, full: Tensor) -> tuple[int, int]:
        return full.nbytes - out.nbytes, out.nbytes

    with (
        noted(control, "all_gather_single", "all_gather", gathered),
        noted(native, "all_gather_single", "all_gather", gathered),
        noted(native, "reduce_scatter_single", "reduce_scatter", scattered),
        noted(dist, "all_reduce", "all_reduce", lambda tensor, *_: (tensor.nbytes, tensor.nbytes)),
        noted(dist, "isend", "send", lambda tensor, *_: (tensor.nbytes, 0)),
        noted(dist, "irecv", "receive", lambda tensor, *_: (0, tensor.nbytes)),
    ):
        yield


def real_steps(name: str, transport: str, steps: int, blocks: int) -> tuple[Any, Any, int]:
    """Return, on a real rank, the log of ``steps``, the groups' counts, and the bytes of this rank's shards."""
    plan = PLANS[name].but(shared_memory=False)
    put_back = register_backend("cpu", real_native) if transport == "native" else lambda: None
    try:
        mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    finally:
        put_back()
    session = made(plan, mesh, blocks)
    mesh.reset_traffic()
    asked = Asked()
    with recorded(asked):
        train(session, steps)
    numel = sum(chunk.shard_end - chunk.shard_start for chunk in session._engine.shards.chunks)
    found = asked.log, counted(mesh), numel
    session.close()
    mesh.close()
    return found
