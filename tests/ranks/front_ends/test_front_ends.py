"""The contract of every front-end: the same program under each one gives the weights of plain PyTorch in one process.

Each test is one program under one front-end. Features of one front-end are tested in its own folder.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
from front_ends import FRONT_ENDS, InjectedError, Program, Result, plain
from torch import Tensor

from shardwise.testing import run_ranks
from tests.support.sets import full

RANKS = 2
CLIP = 0.05
TOLERANCE, HALF_TOLERANCE = 1e-6, 2e-2
FULL = ("accumulates", "fails_in_backward")
"""Programs that make the same calls as another."""
PROGRAMS: dict[str, Program] = {
    "trains": Program(evaluate=True),
    "accumulates": Program(passes=2),
    "clips": Program(passes=2, clip=CLIP),
    "skips_an_overflow": Program(half=True, overflow=1),
    "fails_in_forward": Program(failure=(1, "forward")),
    "fails_in_backward": Program(failure=(1, "backward")),
}
NOT_OFFERED = {("booster-fsdp", "skips_an_overflow"): "torch's fully_shard has no loss scale"}


def run(name: str, program: Program, folder: str) -> Result:
    """One model under a front-end; closing it twice is harmless."""
    front_end = FRONT_ENDS[name](program, folder)
    try:
        return front_end.run()
    finally:
        front_end.close()
        front_end.close()


def run_and_check(name: str, program: Program, folder: str, expected: Result, tolerance: float = TOLERANCE) -> None:
    kind = FRONT_ENDS[name]
    program = replace(program, half=program.half or kind.always_half)
    with kind.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not kind.can_repeat(program):
            with pytest.raises(InjectedError):
                run(name, program, folder)
            program = replace(program, failure=None)
        result = run(name, program, folder)
    tolerance = HALF_TOLERANCE if program.half else tolerance
    check(result.weights, expected.weights, tolerance)
    for output, unsharded in zip(result.outputs, expected.outputs, strict=True):
        check({"output": output}, {"output": unsharded.chunk(dist.get_world_size())[dist.get_rank()]}, 10 * tolerance)


def check(tensors: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert tensors.keys() == expected.keys()
    differences = {name: float((value.cpu() - expected[name]).abs().max()) for name, value in tensors.items()}
    assert all(difference <= tolerance for difference in differences.values()), differences


PAIRS = [pair for pair in product(FRONT_ENDS, PROGRAMS) if pair not in NOT_OFFERED]


@pytest.mark.parametrize(
    ("name", "program"), [row for pair in PAIRS for row in (full(pair) if pair[1] in FULL else [pair])]
)
def test_a_program_equals_plain_pytorch(name: str, program: str, tmp_path: Path) -> None:
    chosen = PROGRAMS[program]
    run_ranks(RANKS, run_and_check, name, chosen, str(tmp_path), plain(chosen))


@pytest.mark.parametrize("ranks", [3, *full(1)])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_checkpoint_is_loaded_on_another_number_of_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = Program(steps=(0, 1), save=folder), Program(steps=(2, 3), load=folder)
    run_ranks(RANKS, run_and_check, name, first, folder, plain(first))
    run_ranks(ranks, run_and_check, name, second, folder, plain(second))


def test_the_programs_differ() -> None:
    """A front-end that ignored what a program asks for would not pass."""
    weights = [plain(program).weights for program in (Program(), *list(PROGRAMS.values())[1:4])]
    for index, one in enumerate(weights):
        for other in weights[:index]:
            assert max(float((one[name] - other[name]).abs().max()) for name in one) > 2 * HALF_TOLERANCE
