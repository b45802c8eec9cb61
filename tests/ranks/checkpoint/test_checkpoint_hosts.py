"""Two hosts: a folder that they do not share, through every front-end, kills during saves into it, and a lost host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sets import campaign

from tests.faults import kills_apart
from tests.support.hosts import ADDRESSES, TwoHosts

TRAINS = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import shardwise

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
session = shardwise.shard(model, torch.optim.AdamW(model.parameters()), stage=3)

def step():
    session.backward(session.module(torch.ones(2, 8) * (rank + 1)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()
"""
SAVES = """
session.checkpoints.apart = False
step()
for act in (session.checkpoints.save, session.checkpoints.load):
    try:
        act(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("done", flush=True)
step()
print("trains on", sorted(os.listdir(sys.argv[1])), flush=True)
"""
KEEPS_PARTS = """
import lightning.fabric, warnings
import shardwise.fabric
from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin

warnings.simplefilter("ignore")
os.chdir(sys.argv[1])

def fresh(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())

def trained(update, seed):
    kept = update(seed)
    kept["step"]()
    return kept

def own(seed):
    model, optimizer = fresh(seed)
    session = shardwise.shard(model, optimizer, stage=3)
    def step():
        session.backward(session.module(torch.ones(2, 8) * (rank + 1)).square().mean())
        session.optimizer.step()
        session.optimizer.zero_grad()
    return {"step": step, "save": lambda: session.checkpoints.save("own"),
            "load": lambda: session.checkpoints.load("own", "auto"), "state": session.module.state_dict}

def booster(seed):
    model, optimizer = fresh(seed)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, optimizer)
    def step():
        booster.backward(model(torch.ones(2, 8) * (rank + 1)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    def load():
        booster.load_model(model, "booster/one")
        booster.load_checkpoint("booster", model, optimizer)
    return {"step": step, "save": lambda: booster.save_checkpoint("booster", model, optimizer, tag="one"),
            "load": load, "state": model.state_dict}

def speed(seed, all_of_it=True):
    model, optimizer = fresh(seed)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
              "checkpoint": {"use_node_local_storage": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    def step():
        engine.backward(engine(torch.ones(2, 8) * (rank + 1)).square().mean())
        engine.step()
    return {"step": step, "save": lambda: engine.save_checkpoint("speed"),
            "load": lambda: engine.load_checkpoint("speed", load_optimizer_states=all_of_it),
            "state": engine.session.module.state_dict}

def fabric(seed):
    fabric = lightning.fabric.Fabric(accelerator="cpu", strategy=shardwise.fabric.DDPFullyShardedStrategy(), devices=1,
                                     num_nodes=2)
    fabric.launch()
    model, optimizer = fabric.setup(*fresh(seed))
    def step():
        fabric.backward(model(torch.ones(2, 8) * (rank + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    kept = {"model": model, "optimizer": optimizer}
    return {"step": step, "save": lambda: fabric.save("fabric/one", kept),
            "load": lambda: fabric.load("fabric/one", kept), "state": model.state_dict}

for begin in (own, booster, speed, lambda seed: speed(seed, False), fabric):
    first = trained(begin, 0)
    first["save"]()
    saved = {name: value.clone() for name, value in first["state"]().items()}
    first["step"]()
    after = {name: value.clone() for name, value in first["state"]().items()}
    second = trained(begin, 1)
    second["load"]()
    loaded = second["state"]()
    same = all(torch.equal(loaded[name], value) for name, value in saved.items())
    second["step"]()
    went_on = all(torch.equal(second["state"]()[name], value) for name, value in after.items())
    print("front-end", same, went_on, flush=True)
files = sorted(str(path) for path in __import__("pathlib").Path(".").rglob("pieces-*"))
print("files", *files, flush=True)
"""
GOES_ON = """
from shardwise.build import build
from shardwise.mesh import Mesh
from shardwise.plan import zero

plan, before = zero(3), session
# Both ranks are ready, and have imported everything: neither is so late.
group = dist.new_group(timeout=datetime.timedelta(seconds=15))
session = build(*fresh(0), plan, Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, group))
step()
print("trains at last", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
try:
    while True:
        step()
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.stdout.flush()
    os._exit(0)
"""

PROGRAM = TRAINS + SAVES + KEEPS_PARTS + GOES_ON

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not())),
]


def started(hosts: TwoHosts, *arguments: str) -> list[subprocess.Popen[str]]:
    """A rank on each host, as a scheduler starts them."""
    runs = []
    common = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29651"}
    for host in (0, 1):
        env = {**os.environ, **common, "RANK": str(host)}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        runs.append(hosts.start(host, [sys.executable, "-u", "-c", PROGRAM, *arguments], env, **out))
    return runs


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a rank on each host prints until the wire between them is cut, and then."""
    apart, cut = tmp_path_factory.mktemp("apart"), tmp_path_factory.mktemp("told") / "cut"
    with TwoHosts(apart=apart) as hosts:
        runs, before = started(hosts, str(apart), str(cut)), ["", ""]
        for host, run in enumerate(runs):
            assert run.stdout is not None
            while "trains at last" not in before[host]:
                line = run.stdout.readline()
                assert line, f"it ended:\n{before[host]}"
                before[host] += line
        hosts.cut()
        cut.touch()
        return [text + run.communicate(timeout=400)[0] for text, run in zip(before, runs, strict=True)]


@pytest.mark.full
def test_every_front_end_keeps_the_parts_of_hosts_and_brings_them_together(said: list[str]) -> None:
    for rank, text in enumerate(said):
        told = [line.split()[1:] for line in text.splitlines() if line.startswith("front-end")]
        # Without its state an optimizer does not go on as it would have.
        assert told == [["True", str(number != 3)] for number in range(5)], text
        (files,) = (line.split()[1:] for line in text.splitlines() if line.startswith("files"))
        assert len(files) == 4 and all(file.endswith(f"/pieces-{rank}.safetensors") for file in files), text


@pytest.mark.full
@pytest.mark.parametrize("count", [5, *campaign(100)])
def test_kills_of_either_host_lose_nothing(tmp_path: Path, count: int) -> None:
    found = kills_apart.campaign(count, 20, str(tmp_path))
    assert found.lost == [], found
    assert found.counts["kills"] == count and found.counts["saves"] > 0 and found.counts["inside a save"] > 0, found


def test_a_folder_that_only_one_host_has_is_named_where_one_is_wanted_and_training_goes_on(said: list[str]) -> None:
    for text in said:
        assert "CheckpointError rank 1 could not write its part" in text, text
        assert "is not there on that rank's host (host-b): give a directory on storage that all hosts share" in text
        assert "FileNotFoundError" in text and "no checkpoint in" in text
        assert "trains on []" in text


def test_a_lost_host_is_an_error_on_each_within_the_time_out(said: list[str]) -> None:
    for rank, text in enumerate(said):
        _, _, then = text.partition("trains at last")
        assert "PeerError" in then and f"rank {1 - rank}" in then, text
