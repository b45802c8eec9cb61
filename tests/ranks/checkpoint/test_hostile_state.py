"""What a checkpoint says besides tensors is refused on all ranks before anything of the run is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.core.checkpoint.source import CheckpointError
from shardwise.testing import run_ranks
from tests.faults.fuzz.changes import apply_change
from tests.faults.fuzz.subjects import EngineSubject
from tests.faults.fuzz.trial import differing
from tests.support.sets import full

GROUP = ["state", "optimizers", 0, "groups", 0, "options"]
SMALL = ["state", "optimizers", 0, "small", "first.weight", "step"]
CASES: dict[str, tuple[str, list[Any], Any]] = {
    "a text for a learning rate": ("set", [*GROUP, "lr"], "many"),
    "one beta": ("set", [*GROUP, "betas"], {"$tuple": [0.9]}),
    "an option that is no value": ("set", [*GROUP, "eps"], {"$tensor": "none"}),
    "parameters as an option": ("rename", [*GROUP, "weight_decay"], "params"),
    "a loss scale of nothing": ("set", ["state", "scaler", "scale"], 0.0),
    "a text for a count": ("set", ["state", "updates"], "many"),
    "a text for a step": ("set", SMALL, "many"),
    "a step of a type that is none": ("set", [*SMALL, "dtype"], "load"),
    "a text for a step size": ("set", ["state", "lr_schedulers", 0, "step_size"], "many"),
    "a method of the scheduler": ("rename", ["state", "lr_schedulers", 0, "step_size"], "step"),
    "a scheduler that is none": ("set", ["state", "lr_schedulers", 0], [1]),
    "rank 1's generator": ("set", ["state", "rng", 1, "torch"], {"$tensor": "none"}),
    "rank 1's generator's version": ("set", ["state", "rng", 1, "python", "version"], 7),
    "rank 1's position": ("set", ["state", "data_position", 1], {"$float": "x"}),
    "extra state": ("set", ["state", "extra", "_extra_state", "more"], {"$tensor": "none"}),
}


def save(root: str) -> None:
    subject = EngineSubject()
    subject.step()
    subject.save(Path(root), "t")
    subject.session.close()


def refusals(folders: list[str]) -> list[tuple[str, list[str]]]:
    """What each load raised, and what it changed."""
    subject, found = EngineSubject(), []
    subject.step()
    for folder in folders:
        before = subject.state()
        try:
            subject.load(Path(folder), "all")
            raised = ""
        except (CheckpointError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
        found.append((raised, differing(before, subject.state())))
    subject.step()
    subject.session.close()
    return found


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_nothing_is_changed_where_anything_is_refused(tmp_path: Path, ranks: int) -> None:
    cases = {name: case for name, case in CASES.items() if ranks == 2 or "rank 1" not in name}
    for number, (do, path, value) in enumerate(cases.values()):
        root = tmp_path / str(number)
        if number == 0:
            run_ranks(ranks, save, str(tmp_path / "whole"))
        (root / "t").mkdir(parents=True)
        for file in (tmp_path / "whole" / "t").iterdir():
            (root / "t" / file.name).write_bytes(file.read_bytes())
        apply_change(root / "t", {"op": "tree", "file": "manifest.json", "do": do, "path": path, "value": value})
    folders = [str(tmp_path / str(number) / "t") for number in range(len(cases))]
    for rank, found in enumerate(run_ranks(ranks, refusals, folders)):
        for name, (raised, changed) in zip(cases, found, strict=True):
            assert raised, f"rank {rank} loads {name}"
            assert not changed, f"rank {rank} changed {changed} before {raised}"
            assert "TypeError: " not in raised.split("could not")[0], raised
