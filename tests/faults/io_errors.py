"""Every system call of a save, re-save, purge, asynchronous save and load fails in turn, on either of two ranks.

The modules that change files get a stand-in for ``os`` (and for other functions that they call), which counts calls and
makes one of them fail: with EIO, ENOSPC, EACCES or EPERM, after a write of half the bytes, or with a short write that
is no error. Afterwards all ranks must raise the same clear error (or none), every earlier checkpoint must have the same
bits, training must go on as that of a twin that never saves, and the next save must succeed and leave no extra files.
"""

import errno
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.formats.native import NativeSource, verify
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.faults.report import Report
from tests.faults.system import SHORT, System, in_place_of_the_system

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EPERM, SHORT)
ACTIONS = ("new", "re-save", "re-save without exchange", "asynchronous new", "asynchronous re-save", "load")

HARMLESS = {"listdir", "unlink", "rmdir", "flock", "close of a directory", "link"}
"""Calls whose failure may stay without an error: they only clean up, and the next save removes what they leave. What
cannot be linked is copied."""
NOT_THERE = {"posix_fallocate", "fsync of a directory", "renameat2"}
"""Calls that some file systems do not support, which return EPERM; the save works without them."""


class Twins:
    """A session that is saved, and one that is trained in the same way and never saved."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.sessions = []
        for _ in range(2):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
            self.sessions.append(build(model, torch.optim.AdamW(model.parameters(), lr=0.1), plan, mesh))
        self.saver = Checkpointer(self.sessions[0])
        self.version = 0

    def step(self) -> dict[str, torch.Tensor]:
        """Make one more update of both; return the weights."""
        self.version += 1
        states = []
        for session in self.sessions:
            batch = torch.full((2, 40), 0.1 * (self.version % 7) + session.mesh.rank)
            session.backward(session.module(batch).square().mean())
            session.optimizer.step()
            states.append(session.module.state_dict())
        same = all(torch.equal(states[0][name], value) for name, value in states[1].items())
        assert same, f"training of version {self.version} went another way than that of the twin"
        return {name: value.clone() for name, value in states[0].items()}

    def close(self) -> None:
        self.saver.close()
        for session in self.sessions:
            session.close()


class Sweep:
    """One action on this rank, with each of its calls failing in turn; collective."""

    def __init__(self, root: str, action: str, failing_rank: int, mesh: Mesh, system: System) -> None:
        self.root, self.action, self.failing_rank, self.mesh, self.system = root, action, failing_rank, mesh, system
        self.twins = Twins(mesh, zero(3))
        self.saved: dict[str, tuple[int, dict[str, torch.Tensor]]] = {}
        """Version and weights of each tag that must exist."""
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.noted = False
        self._tags = 0

    def tag(self) -> str:
        if "re-save" in self.action:
            return "same"
        self._tags += 1
        return f"v{self._tags}"

    def save(self, tag: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Train and save; return the error, and the weights."""
        weights = self.twins.step()
        saver = self.twins.saver
        try:
            saver.save(self.root, tag, user_state=self.twins.version, keep=2, use_async="asynchronous" in self.action)
            saver.wait_for_saves()
        except CheckpointError as raised:
            return str(raised), weights
        return "", weights

    def problem(self, what: str) -> None:
        self.lost.append(f"{self.action}, rank {self.failing_rank}, version {self.twins.version}: {what}")

    def check(self, expected: dict[str, tuple[int, dict[str, torch.Tensor]]], what: str) -> None:
        """Check that all of ``expected`` is there, bit for bit (on rank 0)."""
        self.mesh.world.barrier()
        if self.mesh.rank == 0:
            places = {each.tag: each.path for each in scan(self.root)}
            for tag, (version, weights) in expected.items():
                found = verify(places[tag]) if tag in places else ["it is gone"]
                if found:
                    self.problem(f"{what}: {tag}: {found}")
                    continue
                with NativeSource(places[tag]) as source:
                    if source.state()["user_state"] != version:
                        self.problem(f"{what}: {tag} is {source.state()['user_state']}, not {version}")
                    for name, value in weights.items():
                        stored = source.read(f"model/{name}", 0, value.numel()).reshape(value.shape)
                        if not torch.equal(stored, value):
                            self.problem(f"{what}: {tag} has other values in {name}")
        self.mesh.world.barrier()

    def good_save(self) -> None:
        """Make a save that must succeed, purge old checkpoints, and leave no hidden files."""
        tag = self.tag()
        error, weights = self.save(tag)
        if error:
            self.problem(f"the next save fails: {error}")
        self.expect(tag, weights)
        self.check(self.saved, "after the next save")
        if self.mesh.rank == 0:
            self.look_at_notes(tag)
            there = sorted(os.listdir(self.root))
            if there != sorted([*self.saved, "latest"]) or Path(self.root, "latest").read_text() != f"{tag}\n":
                self.problem(f"after the next save there are {there}, expected {list(self.saved)} and latest")
        self.mesh.world.barrier()

    def look_at_notes(self, tag: str) -> None:
        """Check that a user's file and folder stay in a tag that is saved again."""
        notes = [Path(self.root, tag, name) for name in ("notes", "folder/notes")]
        if "re-save" in self.action and self.noted and not all(note.is_file() for note in notes):
            self.problem(f"of {notes} some are gone")
        for note in notes:
            note.parent.mkdir(exist_ok=True)
            note.touch()
        self.noted = True

    def expect(self, tag: str, weights: dict[str, torch.Tensor]) -> None:
        """Record that ``tag`` is saved now, and that the two newest stay."""
        self.saved.pop(tag, None)
        self.saved[tag] = (self.twins.version, weights)
        self.saved = dict(list(self.saved.items())[-2:])

    def failed_call(self, error: str) -> str:
        """Return what failed on the one rank; all raise the same error. Empty if there were fewer calls."""
        posts = self.mesh.world.exchange_object([error, self.system.at is not None, self.system.failed])
        self.system.arm(None)
        _, armed, called = posts[self.failing_rank]
        if posts[0][0] != posts[1][0]:
            self.problem(f"{called}: ranks say {posts[0][0]!r} and {posts[1][0]!r}")
        if armed:
            return ""
        self.counts[called] += 1
        return str(called)

    def inject(self, at: int, number: int) -> bool:
        """Let the call fail; return whether the action has that many calls."""
        tag, mine = self.tag(), self.mesh.rank == self.failing_rank
        self.system.arm(at if mine else None, number)
        error, weights = self.save(tag)
        called = self.failed_call(error)
        if not error or "is saved and complete" in error:
            self.expect(tag, weights)
        if not called:
            return False
        why = f"{called} fails with {errno.errorcode.get(number, 'a short write')}"
        fine = called in HARMLESS or number == SHORT or (number == errno.EPERM and called in NOT_THERE)
        if not error and not fine:
            self.problem(f"{why} and nobody says so")
        elif error and not (errno.errorcode[number] in error and f"rank {self.failing_rank} " in error):
            self.problem(f"{why}, and the error says {error!r}")
        self.check(self.saved, why)
        return True

    def inject_load(self, at: int, number: int) -> bool:
        """Do the same for a load: every rank reports damage, and the previous checkpoint is complete."""
        newest = list(self.saved)[-1]
        self.system.arm(at if self.mesh.rank == self.failing_rank else None, number)
        error = ""
        try:
            self.twins.saver.load(self.root)
        except (CheckpointDamage, CheckpointError) as raised:
            error = str(raised)
        called = self.failed_call(error)
        if not error and called not in {"", "close of a file", *HARMLESS}:
            self.problem(f"{called} fails in a load, and nobody says so")
        restored = self.twins.saver.load(self.root)
        assert restored is not None
        state = self.twins.sessions[0].module.state_dict()
        if restored.tag != newest or any(not torch.equal(v, state[n]) for n, v in self.saved[newest][1].items()):
            self.problem(f"after {called} failed in a load, {restored.tag} is restored with other values")
        return bool(called)

    def run(self, numbers: tuple[int, ...], stride: int) -> None:
        """Let every ``stride``-th call fail with every one of ``numbers``."""
        self.good_save()
        self.good_save()
        before = len(os.listdir("/proc/self/fd"))
        for turn, number in enumerate(numbers):
            at = (turn * stride // len(numbers) + len(self.action)) % stride
            while sum(self.mesh.world.exchange_object(len(self.lost))) < 5:
                if self.action == "load":
                    if number == SHORT or not self.inject_load(at, number):
                        break
                else:
                    there = self.inject(at, number)
                    self.good_save()
                    if not there:
                        break
                at += stride
        after = len(os.listdir("/proc/self/fd"))
        if after > before:
            self.problem(f"{after} descriptors are open, {before} were")
        self.twins.close()


def sweep(root: str, actions: list[str], numbers: tuple[int, ...], stride: int) -> tuple[Counter[str], list[str]]:
    """Run everything on this rank of two; return what rank 0 counted and what either rank reports as wrong."""
    counts, lost, plan = Counter[str](), list[str](), zero(3)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    for action in actions:
        for failing_rank in range(mesh.size):
            with in_place_of_the_system("without exchange" not in action) as system:
                one = Sweep(f"{root}/{action} {failing_rank}", action, failing_rank, mesh, system)
                one.run(numbers, stride)
            counts.update(one.counts)
            lost += [each for found in mesh.world.exchange_object(one.lost) for each in found]
    mesh.close()
    return counts, lost


def campaign(stride: int = 1, directory: str | None = None) -> Report:
    """Let every ``stride``-th call of every action fail; 1 is everything."""
    report = Report("I/O errors")
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for action in ACTIONS:
            counts, lost = run_ranks(2, sweep, folder, [action], NUMBERS, stride, timeout=3600.0)[0]
            report.counts["injected"] += sum(counts.values())
            report.counts[f"in {action}"] = sum(counts.values())
            report.counts.update(counts)
            report.lost += lost
    return report
