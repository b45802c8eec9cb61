"""``Mesh.create``: the grid of ranks, the choice of transports, model-parallel groups, and ``init_distributed``.

Covers a launcher's environment, emulated GPUs, and two hosts whose names resolve to 127.0.1.1, as Debian's
``/etc/hosts`` has it.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.core.mesh import LaunchFacts, Mesh, init_distributed
from shardwise.plan import CommPlan, MeshPlan
from shardwise.testing import run_ranks
from tests.launcher_variables import without_launcher
from tests.support.hosts import ADDRESSES, WIRE, TwoHosts
from tests.support.launching import finished
from tests.support.on_ranks import on_ranks, raises
from tests.support.scope import hosts_of
from tests.support.sets import full

CPU = torch.device("cpu")
COMM = CommPlan(overlap=True, shared_memory=None, gather_on_use=False, sync_init=True)


def create(dp_shard: int, dp_replicate: int, shared_memory: bool | None = None) -> Mesh:
    return Mesh.create(
        MeshPlan(dp_shard=dp_shard, dp_replicate=dp_replicate), CPU, replace(COMM, shared_memory=shared_memory)
    )


def test_mesh_without_torch_distributed_has_one_rank() -> None:
    mesh = create(-1, 1)
    assert (mesh.rank, mesh.size, mesh.shard.size, mesh.replicate.size, mesh.device_mesh) == (0, 1, 1, 1, None)
    assert mesh.traffic() == dict.fromkeys(mesh.world.traffic.bytes, 0)
    mesh.close()
    raises(ValueError, "multiple of 2 ranks, but the number of ranks is 1", lambda: create(2, 1))


def grid(dp_shard: int, dp_replicate: int, shared_memory: bool | None) -> list[object]:
    mesh = create(dp_shard, dp_replicate, shared_memory)
    told: list[object] = [
        mesh.rank,
        mesh.size,
        [type(group).__name__ for group in (mesh.shard, mesh.replicate, mesh.world)],
        [row[0] for row in mesh.shard.exchange([mesh.rank])],
        [row[0] for row in mesh.replicate.exchange([mesh.rank])],
        [row[0] for row in mesh.world.exchange([mesh.rank])],
        len(mesh.groups),
        mesh.device_mesh.mesh_dim_names if mesh.device_mesh is not None else None,
    ]
    assert mesh.rank == mesh.replicate.rank * mesh.shard.size + mesh.shard.rank == dist.get_rank()
    calls = sum(group.traffic.calls["exchange"] for group in mesh.groups)
    assert calls == 3 and mesh.traffic()["exchange"] == sum(sum(group.traffic.bytes.values()) for group in mesh.groups)
    mesh.reset_traffic()
    assert mesh.traffic()["exchange"] == 0
    mesh.close()
    mesh.close()
    return told


@pytest.mark.parametrize("shared_memory", [*full(None), False])
def test_ranks_are_split_into_shards_and_replicas(shared_memory: bool | None) -> None:
    kind = "GlooGroup" if shared_memory is False else "SharedGroup"
    axes = ("dp_replicate", "dp_shard")
    for rank, told in enumerate(run_ranks(4, grid, 2, 2, shared_memory)):
        low = rank // 2 * 2
        rows = [[low, low + 1], [rank % 2, rank % 2 + 2], [0, 1, 2, 3]]
        assert told == [rank, 4, [kind] * 3, *rows, 3, axes]
    for rank, told in enumerate(run_ranks(3, grid, -1, 1, shared_memory)):
        assert told == [rank, 3, [kind, "LocalGroup", kind], [0, 1, 2], [rank], [0, 1, 2], 2, axes]
    for rank, told in enumerate(run_ranks(2, grid, 1, -1, shared_memory)):
        assert told == [rank, 2, ["LocalGroup", kind, kind], [rank], [0, 1], [0, 1], 2, axes]
    assert run_ranks(1, grid, 1, 1, shared_memory)[0][2] == ["LocalGroup"] * 3  # type: ignore[index]


@pytest.mark.parametrize(
    "plan",
    [MeshPlan(dp_shard=-1, dp_replicate=1, sp=2), MeshPlan(dp_shard=1, dp_replicate=-1, sp=2, tp=2)],
    ids=["data", "tensor and data"],
)
@on_ranks(4)
def test_neighboring_data_parallel_ranks_share_sequences(plan: MeshPlan) -> None:
    me, apart = dist.get_rank(), plan.tp
    other = me ^ apart
    mesh = Mesh.create(plan, CPU, COMM)
    own = mesh.sequence.rank
    mesh.ring.send(torch.tensor(me), 1 - own, 0, 0, "a test's number")
    assert int(mesh.ring.receive((torch.Size([]), torch.int64), 1 - own, 0, 0, "a test's number")) == other
    mesh.ring.settle()
    assert mesh.sequence.exchange([me]) == [[min(me, other)], [max(me, other)]] and mesh.size == 4 // apart
    sent = mesh.traffic()
    assert sent["send"] == 8 and sent["exchange"] == mesh.sequence.traffic.bytes["exchange"] > 0
    mesh.reset_traffic()
    assert not any(mesh.traffic().values())
    mesh.close()


def parts(group_of: list[list[int]] | None, plan: MeshPlan) -> dict[str, list[int]]:
    """Return this rank's groups, as global ranks."""
    group, me = None, dist.get_rank()
    for ranks in group_of or ():
        made = dist.new_group(ranks, backend="gloo")
        group = made if me in ranks else group
    mesh = Mesh.create(plan, CPU, COMM, group)
    names = ("shard", "replicate", "world", "tensor", "pipeline", "mesh_group", "stage_group")
    told = {name: [int(row[0]) for row in getattr(mesh, name).exchange([me])] for name in names}
    others = [me] if mesh.model_parallel is None else [int(row[0]) for row in mesh.model_parallel.exchange([me])]
    assert others == sorted(told["tensor"] if plan.pp == 1 else told["pipeline"] if plan.tp == 1 else others)
    assert len(others) == plan.tp * plan.pp
    assert told["world"] == list(mesh.ranks) and mesh.ranks[mesh.rank] == me
    assert (mesh.rank, mesh.size, mesh.is_rank0) == (mesh.world.rank, mesh.world.size, me == told["mesh_group"][0])
    sizes = {"pp": plan.pp, "dp_replicate": 2, "dp_shard": 2, "tp": plan.tp}
    assert mesh.device_mesh.mesh_dim_names == tuple(n for n, size in sizes.items() if n[:2] == "dp" or size > 1)
    assert mesh.device_mesh.get_local_rank("dp_shard") == mesh.shard.rank
    assert (mesh.wire is None) == (plan.pp == 1)
    if mesh.wire is not None:  # around the pipeline, in both lanes, with and without a description
        rank, size = mesh.pipeline.rank, mesh.pipeline.size
        for lane, described in ((0, True), (1, False)):
            sent = torch.full((2, 3), me, dtype=torch.bfloat16)
            mesh.wire.send(sent, (rank + 1) % size, lane, 5, "a test", described)
            before = (rank - 1) % size
            if described:
                came = mesh.wire.receive_described(before, lane, 5, "a test")
                assert came is not None
            else:
                came = mesh.wire.receive((sent.shape, sent.dtype), before, lane, 5, "a test")
            assert came.shape == (2, 3) and bool((came == told["pipeline"][rank - 1]).all())
        mesh.wire.settle()
        assert mesh.wire.traffic.bytes["send"] == mesh.traffic()["send"] == 2 * 12 + 12 * 8
        mesh.wire.send_nothing((rank + 1) % size, 0, 6, "a test")
        assert mesh.wire.receive_described((rank - 1) % size, 0, 6, "a test") is None
        mesh.wire.settle()
    if plan.tp * plan.pp > 1:
        raises(RuntimeError, f"tp={plan.tp}, pp={plan.pp}", lambda: mesh.join_model_parallel(dist.group.WORLD))
    mesh.close()
    return told


def test_tensor_parallel_ranks_of_four() -> None:
    for me, told in enumerate(run_ranks(4, parts, None, MeshPlan(dp_shard=-1, dp_replicate=1, tp=4))):
        every = {name: [0, 1, 2, 3] for name in ("tensor", "mesh_group", "stage_group")}
        assert told == {name: [me] for name in ("shard", "replicate", "world", "pipeline")} | every
    for me, told in enumerate(run_ranks(4, parts, [[0, 2], [1, 3]], MeshPlan(dp_shard=-1, dp_replicate=1, tp=2))):
        assert told["tensor"] == told["mesh_group"] == [me % 2, me % 2 + 2] and told["world"] == [me]


@pytest.mark.full
def test_pipeline_stages_outside_and_inside_of_data_parallel_groups() -> None:
    plan = MeshPlan(dp_shard=-1, dp_replicate=1, tp=2, pp=2)
    for me, told in enumerate(run_ranks(8, parts, None, plan)):
        low, part, stage = me - me % 2, me % 2, me // 4 * 4
        assert (told["tensor"], told["pipeline"]) == ([low, low + 1], [me % 4, me % 4 + 4])
        assert told["shard"] == told["world"] == [stage + part, stage + part + 2]
        assert told["stage_group"] == list(range(stage, stage + 4))
    for me, told in enumerate(run_ranks(8, parts, None, replace(plan, dp_outside=True))):
        low, part, inside = me - me % 2, me % 2, me // 4 * 4
        assert (told["tensor"], told["pipeline"]) == ([low, low + 1], [inside + part, inside + part + 2])
        assert told["shard"] == told["world"] == [me % 4, me % 4 + 4]
        assert told["stage_group"] == [[0, 1, 4, 5], [2, 3, 6, 7]][me // 2 % 2]


@on_ranks(4)
def test_indivisible_sizes_are_refused_with_all_sizes() -> None:
    for sizes, words in (
        ({"dp_shard": -1, "tp": 3}, "^tp=3 needs a multiple of 3 ranks, but the number of ranks is 4"),
        ({"dp_shard": 4, "tp": 2}, "dp_shard=4.* tp=2.* multiple of 8"),
    ):
        raises(ValueError, words, Mesh.create, MeshPlan(dp_replicate=1, **sizes), CPU, COMM)
    raises(ValueError, "tp=0", MeshPlan, dp_shard=-1, dp_replicate=1, tp=0)


@on_ranks(4)
def test_shared_memory_within_a_host_and_messages_between_hosts() -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another."""
    with hosts_of(2):
        raises(ValueError, "not on one host", lambda: create(4, 1, True))
        mesh = create(2, 2)
    names = [type(group).__name__ for group in (mesh.shard, mesh.replicate, mesh.world)]
    assert names == ["SharedGroup", "GlooGroup", "GlooGroup"]
    mesh.close()


def refuse(*_: object) -> int:
    raise PermissionError(1, "not here")


@on_ranks(2)
def test_ranks_agree_on_fallbacks() -> None:
    """If one rank has no memfd, all use a file in /dev/shm; if that fails, too, all use gloo."""
    made, make = list[str](), tempfile.mkstemp

    def noted(**where: str) -> tuple[int, str]:
        file, path = make(**where)
        made.append(path)
        return file, path

    forbidden = refuse if dist.get_rank() == 1 else os.memfd_create
    with mock.patch.object(os, "memfd_create", forbidden), mock.patch.object(tempfile, "mkstemp", noted):
        mesh = create(-1, 1)
        assert type(mesh.shard).__name__ == "SharedGroup" and mesh.shard._method == "file"  # type: ignore[attr-defined]
        full = mesh.shard.buffers([(4 * mesh.size, torch.float32)])[0]
        full.local.fill_(1.0)
        mesh.shard.all_reduce(full, 1.0).wait()
        assert full.local.tolist() == [float(mesh.size)] * 4 * mesh.size
        mesh.shard.fence()
        assert made and not any(map(os.path.exists, made))
        mesh.close()
        with mock.patch.object(os, "posix_fallocate", refuse):
            mesh = create(-1, 1)
            assert type(mesh.shard).__name__ == "GlooGroup"
            mesh.close()
            raises(ValueError, r"rank 1: .* by memfd: .*not here.*rank 0: .* by file: .*not here", create, -1, 1, True)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
    ],
)
def test_launch_facts_refuse_invalid_environment(environment: Mapping[str, str], text: str) -> None:
    raises(ValueError, text, lambda: LaunchFacts.read(environment))


def test_single_process_initializes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    device = init_distributed()
    assert device.type in ("cpu", "cuda") and not dist.is_initialized()
    raises(ValueError, "cuda:99", lambda: init_distributed("cuda:99"))


def test_torchrun_with_emulated_gpus(tmp_path: Path) -> None:
    """Two ranks on an emulated CUDA: one GPU each, one GPU for both by default, and one for both by choice."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, warnings
            from types import SimpleNamespace
            import torch, torch.distributed as dist
            from shardwise.core.mesh import init_distributed, shutdown
            rank = os.environ["RANK"]
            torch.cuda.is_available = lambda: True
            torch.cuda.device_count = lambda: 1
            torch.cuda.set_device = lambda device: None
            start, seen = dist.init_process_group, []

            def init(backend, device_id, **options):
                seen.append(f"{backend} on {device_id}")
                start("gloo", **options)  # NCCL has to wait for a GPU

            dist.init_process_group = init

            def launch(what, identity, device=None):
                torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=identity, name="H100")
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    try:
                        found = init_distributed(device)
                    except ValueError as error:
                        found = str(error).split(" of ")[0]
                if dist.is_initialized():
                    dist.barrier()  # or one would leave while the other still connects
                shutdown()
                print(f"{what} {rank}: {found} {seen} {len(told)}\\n", end="", flush=True)
                seen.clear()

            launch("own", f"g{rank}")
            launch("both", "g")
            launch("asked", "g", "cuda")
            """
        )
    )
    status, shown = finished("shardwise", "run", "--nproc", "2", str(script), log=tmp_path / "log")
    assert status == 0, shown
    for rank in range(2):
        assert f"own {rank}: cuda:0 ['nccl on cuda:0'] 0\n" in shown, shown
        assert f"both {rank}: cpu ['gloo on None'] {int(rank == 0)}\n" in shown, shown
        assert f"asked {rank}: ranks [0, 1] would share the GPU GPU-g [] 0\n" in shown, shown


PROGRAM = """
import torch
import torch.distributed as dist
from shardwise.core.mesh import init_distributed

try:
    init_distributed("cpu")
except ValueError as error:
    print("refused:", error)
else:
    sum = torch.ones(1)
    dist.all_reduce(sum)
    print("met:", sum.item())
"""


@pytest.mark.full
@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
def test_loopback_host_names_are_refused_until_an_interface_is_set(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    common = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0]}
    inherited = without_launcher(os.environ)
    inherited.pop("GLOO_SOCKET_IFNAME", None)
    said, folder = dict[str, list[str]](), shlex.quote(str(tmp_path))
    with TwoHosts() as hosts:
        for port, named in enumerate(["", WIRE], 29631):
            runs = []
            for host, name in enumerate(hosts.names):
                names = tmp_path / name
                names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n", "utf-8")
                script = f'mount --bind {shlex.quote(str(names))} /etc/hosts && exec "$0" program.py'
                env = {**inherited, **common, "RANK": str(host), "MASTER_PORT": str(port)}
                env |= {"GLOO_SOCKET_IFNAME": named} if named else {}
                out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                runs.append(hosts.start(host, ["sh", "-c", f"cd {folder} && {script}", sys.executable], env, **out))
            said[named] = [run.communicate(timeout=200)[0] for run in runs]
    for text in said[""]:
        assert "refused: rank 0 on host-a would advertise 127.0.1.1" in text, text
        assert "set GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME, too) to the network interface" in text
        assert f"host-a has {WIRE}; host-b has {WIRE}" in text
    assert all("met: 2.0" in text for text in said[WIRE]), said[WIRE]
