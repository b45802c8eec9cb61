"""``Mesh.create`` with a process group of some of the ranks: members, collectives and errors."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core.comm import PeerError, ranks_of
from shardwise.core.mesh import Mesh
from shardwise.plan import CommPlan, MeshPlan
from shardwise.testing import run_ranks
from tests.support.groups_setup import CPU, GROUPS, join
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full


def comm(shared_memory: bool | None = None) -> CommPlan:
    return CommPlan(overlap=True, shared_memory=shared_memory, gather_on_use=False, sync_init=True)


def create(
    group: dist.ProcessGroup | None, dp_shard: int = -1, dp_replicate: int = 1, shared: bool | None = None
) -> Mesh:
    return Mesh.create(MeshPlan(dp_shard=dp_shard, dp_replicate=dp_replicate), CPU, comm(shared), group)


def facts(name: str, shared_memory: bool | None) -> list[object]:
    lists = GROUPS[name]
    number, group = join(lists, 17.0)
    mesh = create(group, shared=shared_memory)
    own, me = lists[number], dist.get_rank()
    assert mesh.ranks == tuple(own) and mesh.ranks[mesh.rank] == me and mesh.size == len(own)
    assert [row[0] for row in mesh.world.exchange([me], "the gradient norm")] == own
    assert mesh.device_mesh is not None and mesh.device_mesh.mesh.tolist() == [own]
    assert mesh.device_mesh.get_group("dp_shard") is group
    assert mesh.members is not None and mesh.members.timeout_s == 17.0
    names = [type(mesh.shard).__name__, str(mesh)]
    mesh.close()
    mesh.close()
    rows = [torch.zeros(1) for _ in own]
    dist.all_gather(rows, torch.tensor([float(me)]), group=group)  # the program's own default group is unchanged
    assert [int(row) for row in rows] == own
    return names


@pytest.mark.parametrize("shared_memory", [None, *full(False)])
def test_ranks_of_a_group_are_a_mesh(shared_memory: bool | None) -> None:
    for name, lists in GROUPS.items():
        for rank, (kind, text) in enumerate(run_ranks(4, facts, name, shared_memory)):
            own = next(ranks for ranks in lists if rank in ranks)
            expected = "LocalGroup" if len(own) == 1 else "GlooGroup" if shared_memory is False else "SharedGroup"
            assert kind == expected and (len(own) == 1 or f"of ranks {own}" in str(text))


@on_ranks(4)
def test_group_is_split_by_the_plan() -> None:
    """A group of four ranks is split; a group of three is refused."""
    group = dist.new_group(list(range(4)), backend="gloo")
    mesh, me = create(group, 2, 2), dist.get_rank()
    assert mesh.shard.exchange([me]) == [[me // 2 * 2], [me // 2 * 2 + 1]]
    assert mesh.replicate.exchange([me]) == [[me % 2], [me % 2 + 2]]
    assert mesh.world.exchange([me]) == [[0], [1], [2], [3]] and len(mesh.groups) == 3
    assert mesh.device_mesh is not None and mesh.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    mesh.close()
    number, part = join([[0, 2, 3], [1]])
    if number == 0:
        raises(ValueError, "a multiple of 2 ranks, but the number of ranks is 3", lambda: create(part, 2))


# ---- errors


@on_ranks(2)
def test_group_without_this_rank_is_refused() -> None:
    alone = dist.new_group([0], backend="gloo")
    gone = dist.new_group([0, 1], backend="gloo")
    dist.barrier()  # if a rank destroyed the group while the other still connects to it, the other would fail
    dist.destroy_process_group(gone)
    if dist.get_rank() == 0:
        create(alone).close()
    else:
        raises(ValueError, "^group=-100.*rank 1 is not a member", create, alone)
    for group, words in ((gone, "was destroyed"), ("data", "'data' is not a pro"), (3, "3 is not a process group")):
        raises(ValueError, words, create, group)


def test_without_torch_distributed_there_are_no_groups() -> None:
    assert ranks_of("group", None) == (0,)
    raises(ValueError, r"torch\.distributed is not initialized", lambda: create("some"))


@on_ranks(4)
def test_members_with_different_arguments_are_an_error() -> None:
    _, group = join(GROUPS["three_and_one"])
    if dist.get_rank() != 2:
        sizes = (3, 1) if dist.get_rank() == 1 else (1, 3)
        said = raises(ValueError, "want different things", create, group, *sizes)
        assert "rank 1: {'dp_replicate': 1, 'dp_shard': 3, " in said and "rank 3: {'dp_replicate': 3" in said
        differs = "shared_memory differs between the ranks of group 'dp_shard of ranks"
        raises(ValueError, differs, create, group, shared=dist.get_rank() == 1)


@on_ranks(4)
def test_member_that_does_not_join_is_an_error() -> None:
    """The other members' ``Mesh.create`` times out."""
    _, group = join(GROUPS["strided"])
    if dist.get_rank() == 1:
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
        failed = r"agreeing among ranks \[1, 3\] failed on rank 1"
        assert "did not come in time" in raises(PeerError, failed, create, group)
    elif dist.get_rank() != 3:
        create(group).close()


@on_ranks(4)
def test_model_parallel_groups_cross_the_data_parallel_ones() -> None:
    me = dist.get_rank()
    _, data = join(GROUPS["strided"])
    number, parts = join(GROUPS["pairs"])
    mesh = create(data)
    with pytest.raises(ValueError, match=rf"share ranks \[{(me + 2) % 4}\] besides rank {me}; give groups that cross"):
        mesh.join_model_parallel(data)
    mesh.join_model_parallel(parts)
    assert mesh.model_parallel is not None and mesh.model_parallel.rank == me % 2
    assert mesh.model_parallel.exchange([me]) == [[2 * number], [2 * number + 1]]
    assert len(mesh.groups) == 3 and mesh.traffic()["exchange"] == sum(g.traffic.bytes["exchange"] for g in mesh.groups)
    mesh.join_model_parallel(parts)  # a second call changes nothing
    assert len(mesh.groups) == 3
    _, others = join([[0, 3], [1, 2]])
    raises(RuntimeError, "has the model-parallel group of ranks", lambda: mesh.join_model_parallel(others))
    mesh.close()
