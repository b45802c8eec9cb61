"""``python -m tests.faults.kills N``: ranks are killed N times at random moments of saves, and nothing may be lost.

Each trial forks 1 to 3 ranks that restore the newest checkpoint and then save one version after the other: new tags,
the same tag again, purges, synchronous and asynchronous. After a random time a random subset of them is killed. What
the ranks were told is saved must be there, and what is visible must be whole and hold the values of its version.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise.build import build
from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.read import NativeSource, verify
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero

GRACE_S = 30.0
SHAPES = {"first.weight": (9, 7), "first.bias": (9,), "second.weight": (301, 211), "second.bias": (301,)}
LONGEST_S = 0.4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(211, 301)


def values_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@dataclass
class Outcome:
    """What a campaign saw."""

    kills: int = 0
    killed_ranks: int = 0
    saves: int = 0
    inside_a_save: int = 0
    leftovers: int = 0
    hangs: int = 0
    lost: list[str] = field(default_factory=list)


def save_until_killed(root: Path, rank: int, world_size: int, trial: int, tell: Callable[[str], None]) -> None:
    """One rank's life."""
    chooser = random.Random(trial)
    stacks = open(root.parent / f"stacks-{trial}-{rank}", "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    store = dist.FileStore(str(root.parent / f"store-{trial}"), world_size)
    timeout = datetime.timedelta(seconds=GRACE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    model = Net()
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3))
    saver = Checkpointer(session)
    restored = saver.load(root, "auto")
    version = 0 if restored is None else int(restored.user_state)
    if restored is not None and restored.skipped:
        tell(f"damaged {restored.skipped}")
    pending = ""
    tell("ready")
    while True:
        version += 1
        session.module.load_state_dict(values_of(version))
        tag = chooser.choice([f"v{version}", "same", "same"])
        use_async = chooser.random() < 0.5
        keep = chooser.choice([None, 1, 2])
        tell(f"begin {tag} {version}")
        saver.save(root, tag, step=version, user_state=version, keep=keep, use_async=use_async)
        if pending:
            tell(pending)
        pending = f"saved {tag} {version}" if use_async else ""
        if not use_async:
            tell(f"saved {tag} {version}")


def _fork(root: Path, rank: int, world_size: int, trial: int) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        os.close(read)
        save_until_killed(root, rank, world_size, trial, lambda text: os.write(write, f"{text}\n".encode()) and None)
    except BaseException:
        with open(root.parent / f"errors-{trial}-{rank}", "w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def _reap(pids: list[int], seconds: float) -> list[int]:
    """Those that do not end in time."""
    end = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.005)
    return left


def _lines(read: int) -> list[str]:
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode().splitlines()


def trial(root: Path, number: int, chooser: random.Random, outcome: Outcome) -> None:
    """Start ranks, kill some, and look at what is left."""
    world_size = chooser.randint(1, 3)
    ranks = [_fork(root, rank, world_size, number) for rank in range(world_size)]
    head = os.read(ranks[0][1], 6)  # "ready\n", or the beginning of a complaint, or nothing if it died
    time.sleep(chooser.random() * LONGEST_S)
    victims = chooser.sample(range(world_size), chooser.randint(1, world_size))
    for victim in victims:
        os.kill(ranks[victim][0], signal.SIGKILL)
    late = _reap([pid for pid, _ in ranks], GRACE_S + 10)
    for pid in late:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    outcome.hangs += len(late)
    if late:
        stacks = "\n".join(path.read_text() for path in sorted(root.parent.glob(f"stacks-{number}-*")))
        print(
            f"trial {number}: {len(late)} of {world_size} ranks hang, {len(victims)} were killed\n{stacks}", flush=True
        )
    outcome.kills += 1
    outcome.killed_ranks += len(victims)
    lines = [
        [*(head.decode().splitlines() if rank == 0 else []), *_lines(read)] for rank, (_, read) in enumerate(ranks)
    ]
    _check(root, lines, outcome, number)


def _check(root: Path, lines: list[list[str]], outcome: Outcome, number: int) -> None:
    told = [line.split() for own in lines for line in own]
    outcome.lost += [f"trial {number}: {' '.join(words)}" for words in told if words and words[0] == "damaged"]
    if not any(words == ["ready"] for words in told):
        errors = "".join(path.read_text() for path in sorted(root.parent.glob(f"errors-{number}-*")))
        outcome.lost.append(f"trial {number}: no rank began: {errors[-2000:]}")
    saved = [(words[1], int(words[2])) for words in told if words[:1] == ["saved"]]
    outcome.saves += len({version for _, version in saved})
    outcome.inside_a_save += bool(lines[0]) and lines[0][-1].startswith("begin")
    outcome.leftovers += any(name.startswith(".") for name in os.listdir(root)) if root.exists() else 0
    newest = max((version for _, version in saved), default=0)
    found = scan(str(root))
    versions = []
    for each in found:
        problems = verify(each.path)
        if problems:
            outcome.lost.append(f"trial {number}: {each.tag} is damaged: {problems}")
            continue
        with NativeSource(each.path) as source:
            version = source.state()["user_state"]
            versions.append(version)
            for name, value in values_of(version).items():
                if not torch.equal(source.read(f"model/{name}", 0, value.numel()), value.reshape(-1)):
                    outcome.lost.append(f"trial {number}: {each.tag} has other values in {name} than version {version}")
    if newest and max(versions, default=0) < newest:
        outcome.lost.append(
            f"trial {number}: version {newest} was saved, the newest there is {max(versions, default=0)}"
        )
    latest = root / "latest"
    if latest.exists() and latest.read_text().strip() not in {each.tag for each in found}:
        # Purges begin after `latest` moved, so it always names one that is there.
        outcome.lost.append(f"trial {number}: latest names {latest.read_text()!r}, there are {[e.tag for e in found]}")


def campaign(count: int, seed: int = 0, directory: str | None = None) -> Outcome:
    """``count`` kills. Nothing may have used torch's threads in this process before."""
    torch.set_num_threads(1)
    chooser, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        root = Path(folder) / "run"
        for number in range(count):
            before = max((e.head.serial for e in scan(str(root)) if e.head), default=0)
            trial(root, seed * 1000003 + number, chooser, outcome)
            after = max((e.head.serial for e in scan(str(root)) if e.head), default=0)
            if after < before:
                outcome.lost.append(f"trial {number}: the newest serial went from {before} to {after}")
            for path in Path(folder).glob("store-*"):
                path.unlink(missing_ok=True)
    return outcome


if __name__ == "__main__":
    found = campaign(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(found)
    sys.exit(bool(found.lost or found.hangs))
