"""The arithmetic of docs/choosing.md, held against what two ranks take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.testing import run_ranks

RANKS, WORDS, WIDTH = 2, 2048, 64
PAGE = Path(__file__).resolve().parents[3] / "docs" / "choosing.md"
LARGEST = WORDS * WIDTH
OTHER = ("gathered parameters", "idle arrays")
CASES = [(precision, stage, where) for precision in ("bf16", None) for stage, where in ((1, ""), (2, ""), (3, ""))]
CASES += [("bf16", 3, "host"), (None, 3, "host")]


def made() -> nn.Module:
    """The embedding and the head are nearly all of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS, bias=False))


def held(precision: str | None, stage: int, where: str) -> tuple[int, int, int]:
    """Bytes in the second step's backward pass: on the device, of those gathered or idle, on the host."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    session = shardwise.shard(model, optimizer, stage=stage, precision=precision, offload=where or None)
    for _ in range(2):
        session.backward(session.module(torch.arange(8)).float().sum())
        memory = session.memory()
        session.optimizer.step()
        session.optimizer.zero_grad()
    session.close()
    device, host = memory.by_tier["device"], memory.by_tier["host"].get("update scratch", 0)
    return (
        memory.tier_bytes("device") - device.get("update scratch", 0),
        sum(device.get(kind, 0) for kind in OTHER),
        memory.tier_bytes("host") - host,
    )


def every_case() -> list[tuple[int, int, int]]:
    return [held(*case) for case in CASES]


def _bytes(cell: str, numel: int) -> float:
    return sum(int(each) * numel / (RANKS if divided else 1) for each, divided in re.findall(r"(\d+) P(/N)?", cell))


@pytest.mark.full
def test_the_table_is_what_is_held() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `stage=")]
    table = {cells[0].strip(): cells[1:] for cells in rows if len(cells) == 4}
    numel = sum(param.numel() for param in made().parameters())
    for found in run_ranks(RANKS, every_case):
        for (precision, stage, where), (device, other, host) in zip(CASES, found, strict=True):
            mixed, single, beside = table[f'`stage={stage}, offload="host"`' if where else f"`stage={stage}`"]
            element = 1 if precision else 2  # as many times 16 bits
            exchanged = int((re.findall(r"(\d+) bytes x the largest layer", beside) or [0])[0]) * element * LARGEST
            state = 0.0 if where else _bytes(mixed if precision else single, numel)
            # Two small layers have buffers, too, and chunks pads.
            case = (precision, stage, where)
            assert device - other == pytest.approx(state + exchanged, abs=0.04 * element * 2 * numel), case
            assert other <= (3 * 2 * element * LARGEST if stage == 3 else 0), case
            assert host == pytest.approx(_bytes(mixed, numel) if where else 0, rel=0.01, abs=1000), case
