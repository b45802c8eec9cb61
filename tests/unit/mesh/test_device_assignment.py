"""Tests of device assignment and of launches without a process group.

- ``rank_device`` and ``decide`` assign a device to each rank. Ranks are simulated one after the other, each with its
  own environment variables and its own ``torch.cuda``.
- Every front-end refuses to train one rank alone if the launcher started several and no process group exists.
- ``check_listeners`` refuses addresses at which ranks on other hosts cannot reach this one.
"""

import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.core.comm import PeerError
from shardwise.core.mesh import LaunchFacts, Mesh, default_device, gloo_addresses, launch
from shardwise.core.mesh.device_assignment import decide
from shardwise.core.mesh.gloo_addresses import Listener, check_listeners, own_listener
from shardwise.plan import MeshPlan, replicated, zero
from shardwise.session import build
from shardwise.strategies import sessions
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from tests.launcher_variables import without_launcher
from tests.support.huggingface_setup import accelerate_reset
from tests.support.on_ranks import raises


@dataclass
class Rank:
    """A process: the identities of the GPUs that it sees, and environment variables in addition to torchrun's."""

    sees: Sequence[str]
    host: str = "host"
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = "NVIDIA H100"


def become(monkeypatch: pytest.MonkeyPatch, rank: Rank, environment: Mapping[str, int]) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", *os.environ.keys() - without_launcher(os.environ).keys()):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**environment, **rank.variables}.items():
        monkeypatch.setenv(variable, str(value))
    properties = [SimpleNamespace(uuid=each, name=rank.name, total_memory=1) for each in rank.sees]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(rank.sees))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(rank.sees))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch.socket, "gethostname", lambda: rank.host)


def started(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Rank], device: str | None = None, may_share: bool = False
) -> tuple[list[str], str | None]:
    """Return the devices of all ranks, and the warning or ``None``."""
    seats, hosts = [], [rank.host for rank in ranks]
    for number, rank in enumerate(ranks):
        local = {"LOCAL_RANK": hosts[:number].count(rank.host), "LOCAL_WORLD_SIZE": hosts.count(rank.host)}
        become(monkeypatch, rank, {"RANK": number, "WORLD_SIZE": len(ranks), **local})
        chosen = launch._device(LaunchFacts.read(), device)
        seats.append(launch.rank_device(chosen, number, device))
    stays, remark = decide(seats, may_share)
    return [seat.device if stays else "cpu" for seat in seats], remark


def all_see(gpus: int, ranks: int, host: str = "host") -> list[Rank]:
    return [Rank([f"{host}-{gpu}" for gpu in range(gpus)], host) for _ in range(ranks)]


def bound(ranks: int, each: int = 1, host: str = "host") -> list[Rank]:
    """Return ranks as Slurm's ``--gpus-per-task`` starts them: each sees only its own GPUs, numbered from 0."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(each))), "SLURM_GPUS_PER_TASK": str(each)}
    return [Rank([f"{host}-{rank}-{gpu}" for gpu in range(each)], host, visible) for rank in range(ranks)]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_every_rank_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    for ranks, expected in (
        (all_see(8, 8), [f"cuda:{rank}" for rank in range(8)]),
        (all_see(8, 3), ["cuda:0", "cuda:1", "cuda:2"]),
        (bound(8), ["cuda:0"] * 8),
        (bound(4, each=2), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (all_see(2, 2, "a") + all_see(2, 2, "b"), ["cuda:0", "cuda:1"] * 2),
        (bound(2, host="a") + all_see(2, 2, "b"), ["cuda:0", "cuda:0", "cuda:0", "cuda:1"]),
        ([Rank(["x", "y"]), Rank(["x", "y"]), Rank(["z", "w"]), Rank(["z", "w"])], ["cuda:0", "cuda:1"] * 2),
        (all_see(1, 1), ["cuda:0"]),
    ):
        assert started(monkeypatch, ranks, device) == (expected, None)


def test_without_gpus_the_cpu_is_used_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus_of_host", lambda: 0)
    with warnings.catch_warnings(action="error"):
        assert started(monkeypatch, all_see(0, 4)) == (["cpu"] * 4, None)
        assert started(monkeypatch, all_see(8, 4), "cpu") == (["cpu"] * 4, None)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (4, 8), (7, 8)])
def test_fewer_gpus_than_ranks_uses_the_cpu_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    devices, remark = started(monkeypatch, all_see(gpus, ranks))
    assert devices == ["cpu"] * ranks
    assert remark is not None and "no GPU is used" in remark and f"ranks [0, {gpus}" in remark
    assert "GPU-host-0 of host" in remark and "--gpus-per-task=1" in remark


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (4, 8)])
def test_explicit_cuda_with_a_shared_gpu_raises(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    told = rf"ranks \[0, {gpus}\] would share the GPU GPU-host-0 of host, which is cuda:0"
    raises(ValueError, told, started, monkeypatch, all_see(gpus, ranks), "cuda")


def test_one_host_without_gpus_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus_of_host", lambda: 0)
    told = r"ranks \[2, 3\] would compute on the CPU \(rank 2 sees 0 GPUs on b\)"
    raises(ValueError, told, started, monkeypatch, all_see(2, 2, "a") + all_see(0, 2, "b"))


def test_invalid_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, gpus, told in (
        ("cuda:1", 1, "device='cuda:1', but the number of GPUs that are visible to rank 0 is 1"),
        ("cuda:99", 8, "device='cuda:99', but the number of GPUs that are visible to rank 0 is 8"),
        ("cuda", 0, "device='cuda', but the number of GPUs that are visible to rank 0 is 0"),
        ("gpu", 1, "device='gpu': give 'cpu', 'cuda' for the rank's own GPU, or one such as 'cuda:0'"),
        ("meta", 0, "device='meta': give 'cpu'"),
        (["cuda"], 1, r"device=\['cuda'\]: give 'cpu'"),
    ):
        raises(ValueError, told, started, monkeypatch, all_see(gpus, 1), device)


def test_default_device_with_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user initialized torch.distributed, the backend of the process group selects the device type."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for backend, rank, expected, text in (
        ("nccl", Rank(["x"]), "cuda:0", ""),
        ("gloo", Rank(["x"]), "cpu", "backend is gloo, and 1 GPUs are visible"),
        ("cpu:gloo,cuda:nccl", Rank(["x"]), "cpu", "2 ranks of this host see 1 GPUs"),
        ("cpu:gloo,cuda:nccl", Rank(["x"], variables={"CUDA_VISIBLE_DEVICES": "1"}), "cuda:0", ""),
        ("cpu:gloo,cuda:nccl", Rank(["x", "y"]), "cuda:0", ""),
    ):
        become(monkeypatch, rank, {"RANK": 0, "WORLD_SIZE": 2})
        monkeypatch.setattr(dist, "get_backend", lambda *_, backend=backend: backend)
        with warnings.catch_warnings(record=True, action="always") as told:
            assert str(default_device()) == expected
        assert [text in str(each.message) for each in told] == ([True] if text else [])


# ---- variables of launchers


SLURM = {"RANK": "9", "WORLD_SIZE": "20", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


def test_local_rank_under_slurm() -> None:
    for tasks, more, expected in (
        ("8(x2),4", {}, (1, 8)),
        ("8,12", {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, (1, 8)),
        ("8(x2),4", {"SLURM_PROCID": "0"}, (9, 20)),
        ("8(x2),4", {"LOCAL_RANK": "3"}, (3, 20)),
        ("many", {}, (9, 20)),
        ("8", {}, (9, 20)),
    ):
        facts = LaunchFacts.read({**SLURM, "SLURM_TASKS_PER_NODE": tasks, **more})
        assert (facts.local_rank, facts.local_world_size) == expected
    assert LaunchFacts.read(SLURM).local_rank == 9


@pytest.mark.parametrize("tasks", ["SLURM_STEP_NUM_TASKS SLURM_PROCID", "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK"])
def test_tasks_without_a_rendezvous_warn(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, own = tasks.split()
    monkeypatch.setattr("os.environ", {number: "2", own: "1"})
    with pytest.warns(UserWarning, match=f"{number}=2, but RANK .* trains alone .this is {own}=1"):
        launch._warn_of_tasks.__wrapped__()


def test_a_missing_rank_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store, facts = dist.HashStore(), LaunchFacts.read({"RANK": "0", "WORLD_SIZE": "2"})
    store.set_timeout(timedelta(milliseconds=50))
    raises(PeerError, "rank 0 of 2: not all ranks have started", launch._exchange, facts, store, {})
    monkeypatch.setattr("os.environ", os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    raises(PeerError, "rank 0 of 2: not all ranks have started", launch._store, facts, timedelta(seconds=1))
    with socket.create_server(("", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        monkeypatch.setattr(LaunchFacts, "read", lambda: LaunchFacts(launched=True))
        raises(PeerError, "rank 0 of 1: MASTER_PORT=[0-9]+ is in use", launch.init_distributed)


CPU = torch.device("cpu")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_build(model: nn.Module) -> None:
    build(model, sgd(model), zero(2))


def by_replicated_build(model: nn.Module) -> None:
    build(model, sgd(model), replicated())


def by_booster(model: nn.Module) -> None:
    Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")).boost(model, sgd(model))


def by_ddp(model: nn.Module) -> None:
    Booster(plugin=TorchDDPPlugin()).boost(model, sgd(model))


def by_fsdp(model: nn.Module) -> None:
    Booster(plugin=TorchFSDPPlugin()).boost(model, sgd(model))


def by_deepspeed(model: nn.Module) -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
    deepspeed.initialize(model=model, optimizer=sgd(model), config=config, dist_init_required=False)


def by_lightning(model: nn.Module) -> None:
    sessions.shard(model, [sgd(model)], zero(2), CPU, sessions.OF_TRAINER)


def by_trainer(model: nn.Module) -> None:
    lightning = pytest.importorskip("lightning")
    from shardwise.lightning import DDPFullyShardedStrategy

    lightning.Trainer(strategy=DDPFullyShardedStrategy(), accelerator="cpu", devices=1, logger=False)


def by_fabric(model: nn.Module) -> None:
    fabric = pytest.importorskip("lightning.fabric")
    from shardwise.fabric import DDPFullyShardedStrategy

    fabric.Fabric(strategy=DDPFullyShardedStrategy(), accelerator="cpu", devices=1)


def by_huggingface(model: nn.Module) -> None:
    transformers = pytest.importorskip("transformers")
    from shardwise.huggingface import ShardwiseTrainer

    with accelerate_reset(), tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, report_to=[], max_steps=1)
        data = [{"input": torch.ones(3)}] * 2
        ShardwiseTrainer(model=model, args=arguments, train_dataset=data, plan=zero(2)).train()


def by_the_older_interface(_: nn.Module) -> None:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        model = nn.Linear(3, 2)
    ShardedOptimizerV2(ShardedModelV2(model, strategy), sgd(model))


def by_accelerate(model: nn.Module) -> None:
    pytest.importorskip("accelerate")
    from shardwise.huggingface import ShardwiseAccelerator

    with accelerate_reset():
        ShardwiseAccelerator(plan=zero(2), cpu=True).prepare(model, sgd(model))


@pytest.fixture
def launched() -> Iterator[None]:
    """Act as rank 1 of 2 without a master address, so that a rendezvous fails at once."""
    assert not dist.is_initialized()
    with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):  # accelerate adds variables
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield


DOORS: list[Callable[[nn.Module], None]] = [by_build, by_replicated_build, by_deepspeed, by_lightning]
DOORS += [by_trainer, by_fabric, by_huggingface]
MEETING = [by_booster, by_ddp, by_fsdp, by_the_older_interface, by_accelerate]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("door", DOORS)
def test_ranks_without_a_process_group_do_not_train_alone(door: Callable[[nn.Module], None], launched: None) -> None:
    model = nn.Linear(3, 2)
    raises(RuntimeError, r"WORLD_SIZE=2 .* rank 1 would train alone.*init_process_group", lambda: door(model))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None, "the model is as it was"


@pytest.mark.parametrize("door", [*DOORS, by_booster, by_ddp, by_fsdp, by_the_older_interface])
def test_a_process_group_of_one_rank_is_refused(
    door: Callable[[nn.Module], None], launched: None, group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(RuntimeError, r"WORLD_SIZE=2 .* rank 1 would train alone", lambda: door(nn.Linear(3, 2)))
    monkeypatch.delenv("RANK")  # without RANK a leftover WORLD_SIZE is ignored, since a process group exists
    by_lightning(nn.Linear(3, 2))


@pytest.mark.parametrize("door", MEETING)
def test_front_ends_that_initialize_the_process_group(door: Callable[[nn.Module], None], launched: None) -> None:
    raises(ValueError, "MASTER_ADDR", lambda: door(nn.Linear(3, 2)))


def test_an_explicit_mesh_of_one_rank_trains(launched: None) -> None:
    plan, model = zero(2), nn.Linear(3, 2)
    session = build(model, sgd(model), plan, Mesh.create(MeshPlan(dp_shard=1, dp_replicate=1), CPU, plan.comm))
    assert session.mesh.size == 1 and session.optimizers
    session.backward(session.module(torch.ones(1, 3)).sum())
    session.optimizer.step()
    session.close()


def test_without_a_launcher_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(3, 2)
    by_build(model)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    raises(ValueError, "sharded already", by_build, model)  # the model is already sharded by the first call
    by_build(nn.Linear(3, 2))


def listener(rank: int, host: str, address: str | None, network: str | None = None) -> Listener:
    return Listener(rank, host, network or host, address, ["eth0", "docker0"])


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1", "::ffff:127.0.1.1"])
def test_loopback_address_across_hosts_raises(address: str) -> None:
    found = [listener(0, "one", "10.0.0.1"), listener(1, "two", address)]
    error = raises(ValueError, None, lambda: check_listeners(found))
    for part in ("rank 1 on two", address, "set GLOO_SOCKET_IFNAME (", "NCCL_SOCKET_IFNAME", "one has eth0, docker0;"):
        assert part in error


def test_reachable_addresses_are_accepted() -> None:
    for first, second in (
        (listener(0, "one", "10.0.0.1"), listener(1, "two", "10.0.0.2")),
        (listener(0, "one", None), listener(1, "two", None)),
        (listener(0, "one", "::ffff:10.0.0.1"), listener(1, "two", "fe80::1")),
        (listener(0, "one", "127.0.1.1"), listener(1, "one", "127.0.1.1")),
        # Two host names in one network namespace, as with containers that use the host's network.
        (listener(0, "one", "127.0.0.1", "net"), listener(1, "two", "127.0.0.1", "net")),
    ):
        assert check_listeners([first, second]) is None  # type: ignore[func-returns-value]


def test_gloo_interface_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_addresses.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert own_listener(0, "eth0").address is None and own_listener(0, "lo, eth0").interfaces == ["eth0"]
    message = r"GLOO_SOCKET_IFNAME='eth7', but .* has no network interface 'eth7': it has lo, eth0; set it"
    raises(ValueError, message, lambda: own_listener(0, "eth7"))
