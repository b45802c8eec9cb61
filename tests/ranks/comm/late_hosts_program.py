"""What each of four ranks on two hosts runs over a wire that counts rounds: how many what they do together takes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rounds_wire import WORDS, words_of
from torch import nn

from shardwise.build import Session, build
from shardwise.comm import HostsGroup
from shardwise.mesh import Mesh, init_distributed
from shardwise.plan import zero

TRIES, UNITS, WIDTH = 3, 12, 64


class Counter:
    """Rounds of the wire, in a folder that the ranks of both hosts have."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._words, self._met = folder, words_of(os.environ["ROUNDS_FILE"]), 0

    def meet(self, what: str = "") -> None:
        """Return when all ranks are here: over files, not over the wire."""
        self._met += 1
        name = what or f"met{self._met}-"
        (self._folder / f"{name}{dist.get_rank()}").touch()
        while len(list(self._folder.glob(f"{name}*"))) < dist.get_world_size():
            time.sleep(0.005)

    def of(self, act: Callable[[], object]) -> list[tuple[int, int]]:
        """Where this rank began and ended, in each of some tries."""
        found = []
        for _ in range(TRIES):
            self.meet()
            while not WORDS.unpack_from(self._words)[1]:  # what is left of before
                time.sleep(0.005)
            self.meet()
            began = WORDS.unpack_from(self._words)[0]
            act()
            found.append((began, WORDS.unpack_from(self._words)[0]))
        return found


def step(session: Session) -> None:
    session.backward(session.module(torch.ones(2, WIDTH)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    init_distributed()
    mesh = Mesh.create(zero(3).mesh, torch.device("cpu"), zero(3).comm)
    group = mesh.shard
    assert isinstance(group, HostsGroup), mesh
    (full,) = group.buffers([(group.size * 1000, torch.float32)])
    out = torch.empty(1000)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)])
    session = build(model, torch.optim.AdamW(model.parameters()), zero(3), mesh)
    acts: dict[str, Callable[[], object]] = {
        "a meeting": lambda: group.exchange([1.0], "a test"),
        "a longer meeting": lambda: group.exchange([1.0] * 600, "a test"),
        "a reduce_scatter": lambda: (full.wait_writable(), group.reduce_scatter(out, full, 1.0).wait()),
        "an all_reduce": lambda: (full.wait_writable(), group.all_reduce(full, 1.0).wait()),
        "a step": lambda: step(session),
    }
    for act in acts.values():  # where places are kept, they are from now on
        for _ in range(3):
            act()
    folder = Path(sys.argv[1])
    counter = Counter(folder)
    counter.meet("ready")
    while not (folder / "in rounds").exists():
        time.sleep(0.005)
    found = {what: counter.of(act) for what, act in acts.items()}
    counter.meet("counted")
    while not (folder / "at once").exists():
        time.sleep(0.005)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), "utf-8")
    session.close()
    mesh.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
