"""Connections are open files: how many a mesh takes, and what becomes of the limit (``ulimit -n``)."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.comm import GroupMaker, choose, members, register_backend
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.launching import SECONDS, forked, start

RANKS = 4


def opened() -> int:
    return len(os.listdir("/dev/fd"))


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Inside, CPU ranks have met over a library, whose collectives are gloo's under another name."""
    put_back = register_backend("cpu", choose._native)
    try:
        with (
            mock.patch.object(GroupMaker, "backend", "nccl"),
            mock.patch.object(dist, "get_default_backend_for_device", lambda _: "cpu:gloo"),
        ):
            yield
    finally:
        put_back()


def taken(plan: Plan) -> tuple[int, int, int, int]:
    """Open files of a communicator over all ranks; of a mesh; of a model on it; of a second one."""
    gc.collect()  # files of earlier tests would be closed meanwhile
    counts = [opened()]
    own = dist.new_group(backend="gloo")
    counts.append(opened())
    with as_on_gpus():
        mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
        counts.append(opened())
        sessions = []
        for _ in range(2):
            sessions.append(build(nn.Linear(64, 64), None, plan, mesh))
            counts.append(opened())
    for session in sessions:
        session.close()
    mesh.close()
    dist.destroy_process_group(own)
    one, *others = (after - before for before, after in pairwise(counts))
    return one, *others  # type: ignore[return-value]


def test_a_mesh_of_shards_takes_few_connections() -> None:
    """Beside gathers and reductions, and torch's own mesh, which are a library's on GPUs: one communicator for what is
    told; models need none."""
    for stage in (2, 3):
        for one, mesh, first, second in run_ranks(RANKS, taken, zero(stage)):
            torchs = one - (RANKS - 1)  # of an axis of one rank
            assert torchs > 0 and mesh == 3 * one + torchs and first == second == 0


def limited(rank: int, meet: str) -> None:
    """A process of its own, which may have hardly more files than it has."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    before = opened() + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    plan = zero(3).but(shared_memory=False)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    assert mesh.world.exchange([float(rank)]) == [[float(each)] for each in range(RANKS)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > opened() > before
    dist.barrier()
    os._exit(17)


def too_few(limit: int) -> None:
    """The hard limit is too low."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        members.make_room(10)  # that many fit
        assert not found and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 10 + members.SPARE
        members.make_room(5000)
        members.make_room(5000)
    (told,) = found
    said, there = str(told.message), opened()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, limit)
    assert f"at most {limit} are allowed" in said and "5000 ranks" in said
    numbers = [count + members.GROUPS * 5000 + members.SPARE for count in range(there - 4, there + 5)]
    assert any(f"Allow {number} on every host" in said for number in numbers)
    os._exit(17)


def ended(target: Callable[..., None], *arguments: tuple[object, ...]) -> list[int | None]:
    begun = [start(forked(target, *each)) for each in arguments]
    for each in begun:
        each.join(SECONDS)
    return [each.exitcode for each in begun]


def test_the_limit_goes_up_to_what_a_mesh_needs(tmp_path: Path) -> None:
    assert ended(limited, *((rank, f"{tmp_path}/meet") for rank in range(RANKS))) == [17] * RANKS


def test_a_hard_limit_that_is_too_low_is_told_once() -> None:
    assert ended(too_few, (1000,)) == [17]
