"""What a launcher tells its ranks in the environment, and how they start from that."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.core.mesh import LaunchFacts, init_distributed
from tests.launcher_variables import without_launcher
from tests.support.launching import finished


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (False, 0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (True, 3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (True, 1, 2, 1, 2)),
    ],
)
def test_launch_facts(environment: Mapping[str, str], expected: tuple[object, ...]) -> None:
    facts = LaunchFacts.read(environment)
    assert (facts.launched, facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == expected


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
    ],
)
def test_launch_facts_refuse_what_they_cannot_read(environment: Mapping[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LaunchFacts.read(environment)


def test_alone_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    device = init_distributed()
    assert device.type in ("cpu", "cuda") and not dist.is_initialized()
    with pytest.raises(ValueError, match="cuda:99"):
        init_distributed("cuda:99")


@pytest.mark.full
def test_torchrun(tmp_path: Path) -> None:
    """From the command line, with every process a new Python."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch.distributed as dist
            from shardwise.core.mesh import Mesh, init_distributed, shutdown
            from shardwise.plan import zero
            device = init_distributed("cpu")
            assert init_distributed("cpu") == device
            plan = zero(3)
            mesh = Mesh.create(plan.mesh, device, plan.comm)
            # One write, so that the ranks' lines do not mix.
            print(f"ranks {mesh.world.exchange([mesh.rank])} {dist.get_backend()}\\n", end="", flush=True)
            mesh.close()
            shutdown()
            shutdown()
            """
        )
    )
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    status, shown = finished(*command, log=tmp_path / "log", whole=True)
    assert status == 0, shown
    assert shown.count("ranks [[0.0], [1.0]] gloo") == 2


def test_torchrun_with_gpus_of_each_kind(tmp_path: Path) -> None:
    """Two ranks and an emulated CUDA: a GPU each, one for both by default, and one for both that was asked for."""
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
