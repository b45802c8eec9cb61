"""Connections are open files: what becomes of their limit (``ulimit -n``)."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.comm import members
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from tests.support.launching import SECONDS, forked, start

RANKS = 4


def opened() -> int:
    return len(os.listdir("/dev/fd"))


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
