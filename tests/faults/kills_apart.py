"""``python -m tests.faults.kills_apart N``: ranks of two hosts that share no directory are killed N times during saves.

As :mod:`tests.faults.kills`, where each host keeps its part: a program on each host forks its ranks, trial by trial.
They load the newest checkpoint that both hosts have whole, which must be at least as new as what any rank was told is
saved, with its values and without a damaged one before it, and then save one version after the other until all ranks of
one host, or some of both, are killed: after a random time, or at a random call by which a save changes the file system.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.build import build
from shardwise.checkpoint.file_system import FileSystem
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero
from tests.faults.kills import Net, values_of
from tests.faults.report import Report
from tests.support.hosts import TwoHosts

GRACE_S = 20.0
WAIT_S = 240.0
LONGEST_S = 0.4
CALLS = ("make_directory", "create", "sync", "sync_directory", "rename", "exchange", "write_file", "remove_tree")
MOST_CALLS = 45


class Dying(FileSystem):
    """Kills its process at the ``at``-th of the calls above, before or after it is made."""

    def __init__(self, at: int, after: bool) -> None:
        super().__init__()
        self._left, self._after = at, after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def call(*arguments: Any) -> Any:
            self._left -= 1
            dies = self._left == 0  # now, since calls make others
            if dies and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = found(*arguments)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


class Trial:
    """What both hosts draw alike."""

    def __init__(self, seed: int, number: int, last: bool) -> None:
        chooser = random.Random(f"{seed}/{number}")
        self.number, self.last = number, last
        self.a_host = chooser.choice([1, 1, 2])
        self.at_call = chooser.random() < 0.7
        self.call, self.after = chooser.randint(1, MOST_CALLS), chooser.random() < 0.5
        self.seconds = chooser.random() * LONGEST_S
        self.hosts = chooser.choice([[0], [1], [0, 1]])
        self.seed = chooser.random()

    @property
    def size(self) -> int:
        return 2 * self.a_host


def life(trial: Trial, rank: int, folders: dict[str, str], least: int, tell: Callable[[str], None]) -> None:
    """One rank's: it loads, and saves until it is killed; ``least`` is the version that must be there."""
    stacks = open(f"{folders['shared']}/stacks-{trial.number}-{rank}", "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    store = dist.FileStore(f"{folders['shared']}/store-{trial.number}", trial.size)
    timeout = datetime.timedelta(seconds=GRACE_S)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.size, timeout=timeout)
    model = Net()
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3))
    dies = trial.at_call and not trial.last and rank // trial.a_host in trial.hosts and rank % trial.a_host == 0
    saver = Checkpointer(session, Dying(trial.call, trial.after)) if dies else Checkpointer(session)
    saver.apart = True
    restored = saver.load(folders["root"], "auto")
    version = 0 if restored is None else int(restored.user_state)
    if restored is not None:
        if restored.skipped:
            tell(f"lost damaged {restored.skipped}")
        with session.module.gathered():
            for name, value in values_of(version).items():
                if not torch.equal(model.get_parameter(name), value):
                    tell(f"lost other values in {name} than version {version}")
    if version < least:
        tell(f"lost version {least} was saved, {version} is loaded")
    chooser = random.Random(trial.seed)
    tell(f"loaded {version}")
    for _ in range(3 if trial.last else 1_000_000):
        version += 1
        session.module.load_state_dict(values_of(version))
        tag, keep = chooser.choice([f"v{version}", "same", "same"]), chooser.choice([None, 1, 2])
        use_async = chooser.random() < 0.25
        tell(f"begin {version}")
        saver.save(folders["root"], tag, step=version, user_state=version, keep=keep, use_async=use_async)
        if use_async:
            saver.wait_for_saves()
        tell(f"saved {version}")


def _fork(trial: Trial, rank: int, folders: dict[str, str], least: int) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        os.close(read)
        life(trial, rank, folders, least, lambda text: os.write(write, f"{text}\n".encode()) and None)
        code = 0
    except BaseException:
        with open(f"{folders['shared']}/errors-{trial.number}-{rank}", "w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def _reap(pids: list[int], seconds: float) -> list[int]:
    """Those that do not end in time."""
    end, left = time.monotonic() + seconds, list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    return left


def _run(host: int, trial: Trial, folders: dict[str, str], least: int) -> list[str]:
    """What the ranks of this host told."""
    ranks = [_fork(trial, host * trial.a_host + each, folders, least) for each in range(trial.a_host)]
    head = os.read(ranks[0][1], 8)  # until it has loaded, or died
    if not trial.at_call and not trial.last and host in trial.hosts:
        time.sleep(trial.seconds)
        for pid, _ in ranks:
            os.kill(pid, signal.SIGKILL)
    late = _reap([pid for pid, _ in ranks], 3 * GRACE_S)
    for pid in late:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(5.0)  # on a busy machine it takes a while to write
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    stacks = [path.read_text() for path in sorted(Path(folders["shared"]).glob(f"stacks-{trial.number}-*"))]
    elsewhere = [stack for stack in stacks if stack and "_new_process_group_helper" not in stack]
    lines = head.decode()
    for _, read in ranks:
        with os.fdopen(read, "rb") as pipe:
            lines += pipe.read().decode()
    told = [f"lost hang {stack}".replace("\n", " | ") for stack in elsewhere[: len(late)]]
    return [*lines.splitlines(), *["late"] * len(late), *told]


def _both(shared: str, trial: int, host: int, lines: list[str]) -> list[str]:
    """What the ranks of both hosts told, when both have ended."""
    mine = Path(shared, f"told-{trial}-{host}")
    mine.with_suffix(".part").write_text(json.dumps(lines))
    mine.with_suffix(".part").rename(mine)
    theirs, end = Path(shared, f"told-{trial}-{1 - host}"), time.monotonic() + WAIT_S
    while not theirs.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"trial {trial}: host {1 - host} has not ended")
        time.sleep(0.01)
    return lines + json.loads(theirs.read_text())


def drive(host: int, count: int, seed: int, shared: str, root: str) -> None:
    """All trials of one host; prints what was lost, and counts, as JSON."""
    torch.set_num_threads(1)
    lost, least, counts = [], 0, {"kills": 0, "saves": 0, "inside a save": 0, "hang while torch makes a group": 0}
    for number in range(count + 1):
        trial = Trial(seed, number, number == count)
        told = _both(shared, number, host, _run(host, trial, {"shared": shared, "root": root}, least))
        words = [line.split() for line in told if line]
        lost += [f"trial {number}: {line}" for line in told if line.startswith("lost")]
        saved = {int(each[1]) for each in words if each[0] == "saved"}
        if not any(each[0] == "loaded" for each in words):
            errors = "".join(path.read_text() for path in sorted(Path(shared).glob(f"errors-{number}-*")))
            lost.append(f"trial {number}: no rank began: {errors[-3000:]}")
        least = max(saved, default=least)
        counts["kills"] += not trial.last
        counts["saves"] += len(saved)
        counts["hang while torch makes a group"] += told.count("late")
        counts["inside a save"] += any(each[0] == "begin" and int(each[1]) > max(saved, default=0) for each in words)
    print(json.dumps({"lost": lost, "counts": counts}), flush=True)


def campaign(count: int, seed: int = 0, directory: str | None = None) -> Report:
    """``count`` kills on two hosts, which must be possible here (:meth:`TwoHosts.why_not`)."""
    report = Report("kills of hosts apart")
    with tempfile.TemporaryDirectory(dir=directory) as shared:
        root = Path(shared, "apart")
        root.mkdir()
        with TwoHosts(apart=root) as hosts:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            program = [sys.executable, "-W", "ignore", "-m", "tests.faults.kills_apart"]
            runs = [
                hosts.start(
                    host,
                    [*program, str(count), str(seed), str(host), shared, str(root)],
                    env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for host in (0, 1)
            ]
            said = [run.communicate() for run in runs]
    for out, errors in said:
        last = out.strip().splitlines()[-1:]
        if not last or not last[0].startswith("{"):
            report.lost.append(f"a host ended: {out[-1000:]} {errors[-3000:]}")
            continue
        found = json.loads(last[0])
        report.lost += found["lost"]
        report.counts.update(found["counts"] if not report.counts else {})
    return report


if __name__ == "__main__":
    if len(sys.argv) > 3:
        drive(int(sys.argv[3]), int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], sys.argv[5])
    else:
        found = campaign(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
        print(found)
        sys.exit(bool(found.lost))
