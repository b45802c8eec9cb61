"""Tests that one program with each front-end matches plain PyTorch, on the device that the front-end chooses."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.on_device import device_of_rank
from shardwise.testing import RankPool

sys.path.append(str(Path(__file__).resolve().parents[1] / "ranks" / "front_ends"))
CONTRACT: Any = importlib.import_module("test_front_ends")
LIGHTNING, TRAINER = ("lightning",), ("transformers", "accelerate")
PACKAGES = {"lightning": LIGHTNING, "fabric": LIGHTNING, "huggingface": TRAINER, "accelerate": TRAINER}


def run(device_type: str, name: str, folder: str) -> None:
    """Train with accumulation and clipping, and compare with one process on the CPU."""
    device_of_rank(device_type)
    program, tolerance = CONTRACT.PROGRAMS["clips"], 1e-6 if device_type == "cpu" else 1e-4
    CONTRACT.run_and_check(name, program, folder, CONTRACT.plain(program), tolerance)


def front_ends() -> list[Any]:
    needs = {name: PACKAGES.get(name.split("-")[0], ()) for name in CONTRACT.FRONT_ENDS}
    return [pytest.param(name, marks=pytest.mark.packages(*packages)) for name, packages in needs.items()]


@pytest.mark.parametrize("name", front_ends())
def test_front_end_matches_plain_pytorch(one_rank: RankPool, device_type: str, name: str, tmp_path: Path) -> None:
    assert one_rank.run(run, device_type, name, str(tmp_path), timeout=240.0) == [None]
