"""Ranks are killed at random moments of saves, and nothing may be lost.

Each trial forks 1 to 3 ranks that restore the newest checkpoint and then save one version after the other: new tags,
the same tag again, purges, synchronous and asynchronous. After a random time a random subset of them is killed. What
was reported as saved must be there, and what is visible must be complete and have the values of its version.
"""

import datetime
import faulthandler
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.formats.native import NativeSource, verify
from shardwise.plan import zero
from shardwise.session import build
from tests.faults.report import Report

GRACE_S = 20.0
SHAPES = {"first.weight": (9, 7), "first.bias": (9,), "second.weight": (301, 211), "second.bias": (301,)}
LONGEST_S = 0.1
MOST_LINES = 12
"""Ranks are killed when the first rank has written a random number of lines up to this (ready, save begins, saved) and
up to ``LONGEST_S`` later, so that a slow machine makes as many saves."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(211, 301)


def values_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_until_killed(root: Path, rank: int, world_size: int, trial: int, tell: Callable[[str], None]) -> None:
    """Run one rank until it is killed."""
    chooser = random.Random(trial)
    stacks = open(root.parent / f"stacks-{trial}-{rank}", "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    store = dist.FileStore(str(root.parent / f"store-{trial}"), world_size)
    timeout = datetime.timedelta(seconds=GRACE_S)
    store.set_timeout(timeout)  # a rank that creates a group looks for its dead peers there, by default for 5 minutes
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
        tell(f"begin {tag} {version} {'asynchronous' if use_async else 'synchronous'} {keep or ''}")
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
    try:
        os.close(read)
        save_until_killed(root, rank, world_size, trial, lambda text: os.write(write, f"{text}\n".encode()) and None)
    except BaseException:
        with open(root.parent / f"errors-{trial}-{rank}", "w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(1)


def _reap(pids: list[int], seconds: float) -> list[int]:
    """Return those that do not end in time."""
    end = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.005)
    return left


def _told(read: int, count: int) -> bytes:
    """Return what a rank reports until it has written so many lines, or died."""
    head = b""
    while head.count(b"\n") < count and (more := os.read(read, 1 << 16)):
        head += more
    return head


def trial(root: Path, number: int, chooser: random.Random, report: Report) -> None:
    """Start ranks, kill some, and check the files."""
    world_size, before = chooser.randint(1, 3), {each.tag for each in scan(str(root))}
    notes = _write_notes(root, number)
    ranks = [_fork(root, rank, world_size, number) for rank in range(world_size)]
    head = _told(ranks[0][1], chooser.randint(1, MOST_LINES))
    time.sleep(chooser.random() * LONGEST_S)
    victims = chooser.sample(range(world_size), chooser.randint(1, world_size))
    for victim in victims:
        os.kill(ranks[victim][0], signal.SIGKILL)
    late = _reap([pid for pid, _ in ranks], 3 * GRACE_S)  # the creation of a group waits for the store, then for gloo
    for pid in late:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(5.0)  # on a busy machine a write takes a while
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if late:
        _look_at_hangs(root, number, len(late), report)
    report.counts["kills"] += 1
    report.counts["killed ranks"] += len(victims)
    lines = []
    for _, read in ranks:
        with os.fdopen(read, "rb") as pipe:
            lines.append((head + pipe.read()).decode().splitlines())
        head = b""
    _count_what_was_hit(lines, before, report)
    _check(root, lines, report, number)
    if not any(len(line.split()) == 5 for own in lines for line in own):  # nothing was purged
        report.counts["looked at notes"] += len(notes)
        there = {each.tag: Path(each.path) for each in scan(str(root))}
        gone = [note for note in notes if note[0] not in there or not (there[note[0]] / note[1]).is_file()]
        report.lost += [f"trial {number}: {'/'.join(note)}, which is the user's, is gone" for note in gone]


def _write_notes(root: Path, number: int) -> list[tuple[str, str]]:
    """Write a file and a folder of the user's into every checkpoint; return tag and path of all of them."""
    found = {each.tag: Path(each.path) for each in scan(str(root))}
    for path in found.values():
        (path / "notes").mkdir(exist_ok=True)
        (path / f"note-{number % 5}").touch()
        (path / "notes" / f"note-{number % 5}").touch()
    return [(tag, str(file.relative_to(path))) for tag, path in found.items() for file in path.rglob("note-*")]


def _look_at_hangs(root: Path, number: int, late: int, report: Report) -> None:
    """Torch's gloo waits five times its time-out for a peer that dies while they connect: counted separately."""
    stacks = [path.read_text() for path in sorted(root.parent.glob(f"stacks-{number}-*"))]
    stacks = [stack for stack in stacks if stack]
    making = [stack for stack in stacks if "_new_process_group_helper" in stack.split("File", 2)[1]]
    report.counts["hang while torch makes a group"] += len(making)
    if len(making) < late:
        report.counts["hang elsewhere"] += late - len(making)
        report.lost.append(f"trial {number}: {late} ranks hang, {len(stacks)} say where\n" + "\n".join(stacks))


def _count_what_was_hit(lines: list[list[str]], before: set[str], report: Report) -> None:
    """Count what the first rank was doing, by kind; a save that still ran next to the following one counts as well."""
    told = [line.split() for line in lines[0]]
    saved = {int(words[2]) for words in told if words[0] == "saved"}
    tags, hit = set(before), set()
    for words in told:
        if words[0] == "begin" and int(words[2]) not in saved:
            hit |= {words[3], "re-saving" if words[1] in tags else "new", *(["purging"] if words[4:] else [])}
        if words[0] == "begin":
            tags.add(words[1])
    report.counts["inside a save"] += bool(hit)
    for kind in sorted(hit - {"new"}):
        report.counts[f"inside a {kind} one"] += 1


def _check(root: Path, lines: list[list[str]], report: Report, number: int) -> None:
    told = [line.split() for own in lines for line in own]
    report.lost += [f"trial {number}: {' '.join(words)}" for words in told if words and words[0] == "damaged"]
    if not any(words == ["ready"] for words in told):
        errors = "".join(path.read_text() for path in sorted(root.parent.glob(f"errors-{number}-*")))
        report.lost.append(f"trial {number}: no rank began: {errors[-2000:]}")
    saved = [(words[1], int(words[2])) for words in told if words[:1] == ["saved"]]
    report.counts["saves"] += len({version for _, version in saved})
    report.counts["left something hidden"] += any(n.startswith(".") for n in os.listdir(root)) if root.exists() else 0
    newest = max((version for _, version in saved), default=0)
    found = scan(str(root))
    versions = []
    for each in found:
        problems = verify(each.path)
        if problems:
            report.lost.append(f"trial {number}: {each.tag} is damaged: {problems}")
            continue
        with NativeSource(each.path) as source:
            version = source.state()["user_state"]
            versions.append(version)
            for name, value in values_of(version).items():
                if not torch.equal(source.read(f"model/{name}", 0, value.numel()), value.reshape(-1)):
                    report.lost.append(f"trial {number}: {each.tag} has other values in {name} than version {version}")
    if newest and max(versions, default=0) < newest:
        found_newest = max(versions, default=0)
        report.lost.append(f"trial {number}: version {newest} was saved, the newest there is {found_newest}")
    latest = root / "latest"
    if latest.exists() and latest.read_text().strip() not in {each.tag for each in found}:
        # `latest` moves before a purge, so it always names a checkpoint that exists.
        report.lost.append(f"trial {number}: latest names {latest.read_text()!r}, there are {[e.tag for e in found]}")


def campaign(count: int, seed: int = 0, directory: str | None = None) -> Report:
    """Run ``count`` kills. Nothing may have used torch's threads in this process before."""
    torch.set_num_threads(1)
    chooser, report = random.Random(seed), Report("kills")
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        root = Path(folder) / "run"
        for number in range(count):
            before = max((e.head.serial for e in scan(str(root)) if e.head), default=0)
            trial(root, seed * 1000003 + number, chooser, report)
            after = max((e.head.serial for e in scan(str(root)) if e.head), default=0)
            if after < before:
                report.lost.append(f"trial {number}: the newest serial went from {before} to {after}")
            for path in Path(folder).glob("*-*"):  # stores, stacks, errors
                path.unlink(missing_ok=True)
            if (number + 1) % 100 == 0:
                print(report, flush=True)
    return report
