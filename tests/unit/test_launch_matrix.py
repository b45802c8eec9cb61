"""Which device each rank of a launch gets: numbers of GPUs and ranks, who sees which, and what was asked for.

Ranks are simulated one after the other, each with its own environment and its own ``torch.cuda``; what they would tell
each other is then decided once, as every rank does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.core.mesh import LaunchFacts, default_device, launch
from shardwise.core.mesh.device_assignment import decide

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS", "SLURM_GPU_BIND", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass
class Rank:
    """One process: the GPUs that it sees, by identity, and its variables beside torchrun's."""

    sees: Sequence[str]
    host: str = "host"
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = "NVIDIA H100"


def become(monkeypatch: pytest.MonkeyPatch, rank: Rank, environment: Mapping[str, str]) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {**environment, **rank.variables}.items():
        monkeypatch.setenv(variable, value)
    properties = [SimpleNamespace(uuid=each, name=rank.name, total_memory=1) for each in rank.sees]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(rank.sees))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(rank.sees))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch.socket, "gethostname", lambda: rank.host)


def started(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Rank], device: str | None = None, may_share: bool = False
) -> tuple[list[str], str | None]:
    """The devices of all ranks, and what is said of them."""
    seats, hosts = [], [rank.host for rank in ranks]
    for number, rank in enumerate(ranks):
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(hosts[:number].count(rank.host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(rank.host)),
        }
        become(monkeypatch, rank, environment)
        chosen = launch._device(LaunchFacts.read(), device)
        seats.append(launch.rank_device(chosen, number, device))
    stays, remark = decide(seats, may_share)
    return [seat.device if stays else "cpu" for seat in seats], remark


def all_see(gpus: int, ranks: int, host: str = "host") -> list[Rank]:
    return [Rank([f"{host}-{gpu}" for gpu in range(gpus)], host) for _ in range(ranks)]


def bound(ranks: int, each: int = 1, host: str = "host") -> list[Rank]:
    """Slurm's ``--gpus-per-task``: each sees its own, and has them under the first numbers."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(each))), "SLURM_GPUS_PER_TASK": str(each)}
    return [Rank([f"{host}-{rank}-{gpu}" for gpu in range(each)], host, visible) for rank in range(ranks)]


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (all_see(8, 8), [f"cuda:{rank}" for rank in range(8)]),
        (all_see(8, 3), ["cuda:0", "cuda:1", "cuda:2"]),
        (bound(8), ["cuda:0"] * 8),
        (bound(4, each=2), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (all_see(2, 2, "a") + all_see(2, 2, "b"), ["cuda:0", "cuda:1"] * 2),
        (bound(2, host="a") + all_see(2, 2, "b"), ["cuda:0", "cuda:0", "cuda:0", "cuda:1"]),
        ([Rank(["x", "y"]), Rank(["x", "y"]), Rank(["z", "w"]), Rank(["z", "w"])], ["cuda:0", "cuda:1"] * 2),
        (all_see(1, 1), ["cuda:0"]),
    ],
    ids=["one each", "more gpus", "slurm 1 each", "slurm 2 each", "two hosts", "hosts that differ", "pairs", "alone"],
)
def test_every_rank_gets_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Rank], expected: list[str], device: str | None
) -> None:
    assert started(monkeypatch, ranks, device) == (expected, None)


def test_without_gpus_it_is_the_cpu_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus_of_host", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert started(monkeypatch, all_see(0, 4)) == (["cpu"] * 4, None)
        assert started(monkeypatch, all_see(8, 4), "cpu") == (["cpu"] * 4, None)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (4, 8), (7, 8)])
def test_fewer_gpus_than_ranks_is_the_cpu_and_said(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    devices, remark = started(monkeypatch, all_see(gpus, ranks))
    assert devices == ["cpu"] * ranks
    assert remark is not None and "no GPU is used" in remark and f"ranks [0, {gpus}" in remark
    assert "GPU-host-0 of host" in remark and "--gpus-per-task=1" in remark


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (4, 8)])
def test_a_shared_gpu_that_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    with pytest.raises(
        ValueError, match=rf"ranks \[0, {gpus}\] would share the GPU GPU-host-0 of host, which is cuda:0"
    ):
        started(monkeypatch, all_see(gpus, ranks), "cuda")


def test_a_host_without_gpus_among_others_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus_of_host", lambda: 0)
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] would compute on the CPU \(rank 2 sees 0 GPUs on b\)"):
        started(monkeypatch, all_see(2, 2, "a") + all_see(0, 2, "b"))


@pytest.mark.parametrize(
    ("device", "gpus", "text"),
    [
        ("cuda:1", 1, "device='cuda:1', but 1 GPUs are visible to rank 0"),
        ("cuda:99", 8, "device='cuda:99', but 8 GPUs"),
        ("cuda", 0, "device='cuda', but 0 GPUs"),
        ("gpu", 1, "device='gpu': give 'cpu', 'cuda' for the rank's own GPU, or one such as 'cuda:0'"),
        ("meta", 0, "device='meta': give 'cpu'"),
        (["cuda"], 1, r"device=\['cuda'\]: give 'cpu'"),
    ],
)
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: Any, gpus: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        started(monkeypatch, all_see(gpus, 1), device)


@pytest.mark.parametrize(
    ("backend", "rank", "expected", "text"),
    [
        ("nccl", Rank(["x"]), "cuda:0", ""),
        ("gloo", Rank(["x"]), "cpu", "backend is gloo, and 1 GPUs are visible"),
        ("cpu:gloo,cuda:nccl", Rank(["x"]), "cpu", "2 ranks of this host see 1 GPUs"),
        ("cpu:gloo,cuda:nccl", Rank(["x"], variables={"CUDA_VISIBLE_DEVICES": "1"}), "cuda:0", ""),
        ("cpu:gloo,cuda:nccl", Rank(["x", "y"]), "cuda:0", ""),
    ],
)
def test_once_the_processes_have_met(
    monkeypatch: pytest.MonkeyPatch, backend: str, rank: Rank, expected: str, text: str
) -> None:
    """Somebody else started torch.distributed: its backend says what it is for."""
    become(monkeypatch, rank, {"RANK": "0", "WORLD_SIZE": "2"})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert str(default_device()) == expected
    assert [text in str(each.message) for each in told] == ([True] if text else [])


# ---- what launchers say


SLURM = {"RANK": "9", "WORLD_SIZE": "20", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8(x2),4"}, (1, 8)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8,12", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, (1, 8)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_PROCID": "0"}, (9, 20)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8(x2),4", "LOCAL_RANK": "3"}, (3, 20)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "many"}, (9, 20)),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "1"}, (9, 20)),
        (SLURM, (9, 20)),
    ],
)
def test_ranks_of_a_host_under_slurm(variables: dict[str, str], expected: tuple[int, int]) -> None:
    facts = LaunchFacts.read(variables)
    assert (facts.local_rank, facts.local_world_size) == expected


# ---- how they tell each other


def _facts(rank: int, size: int) -> LaunchFacts:
    return LaunchFacts.read({"RANK": str(rank), "WORLD_SIZE": str(size)})


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(PeerError, match="rank 0 of 2: not all ranks have started"):
        launch._exchange(_facts(0, 2), store, {})
