"""The contract of every front-end: one program gives the weights of plain PyTorch in one process.

Each test runs one program under one front-end; features of a single front-end are tested in its own folder. Also
tested: dtypes and buffers of 16-bit models under every front-end, and BatchNorm.
"""

import re
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import front_ends
import pytest
import torch
import torch.distributed as dist
from front_ends import FRONT_ENDS, InjectedError, Net, Program, Result, plain
from torch import Tensor, nn

from shardwise.plan import Plan, replicated, zero
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.engine_setup import sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS = 2
CLIP = 0.05
TOLERANCE, HALF_TOLERANCE = 1e-6, 2e-2
FULL = ("accumulates", "fails_in_backward")
"""Programs of the full set, which make the same calls as another one."""
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
    """Run a program under a front-end, and close it twice."""
    front_end = FRONT_ENDS[name](program, folder)
    try:
        return front_end.run()
    finally:
        front_end.close()
        front_end.close()


def run_and_check(name: str, program: Program, folder: str, expected: Result, tolerance: float = TOLERANCE) -> None:
    kind = FRONT_ENDS[name]
    program = replace(program, half=program.half or kind.always_half)
    with kind.context(), warnings.catch_warnings(action="ignore"):
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
def test_program_equals_plain_torch(name: str, program: str, tmp_path: Path) -> None:
    chosen = PROGRAMS[program]
    run_ranks(RANKS, run_and_check, name, chosen, str(tmp_path), plain(chosen))


@pytest.mark.parametrize("ranks", [3, *full(1)])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_checkpoint_loads_at_another_world_size(name: str, ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = Program(steps=(0, 1), save=folder), Program(steps=(2, 3), load=folder)
    run_ranks(RANKS, run_and_check, name, first, folder, plain(first))
    run_ranks(ranks, run_and_check, name, second, folder, plain(second))


def test_programs_give_different_weights() -> None:
    """Check that a front-end which ignores an option of a program would fail."""
    weights = [plain(program).weights for program in (Program(), *list(PROGRAMS.values())[1:4])]
    for index, one in enumerate(weights):
        for other in weights[:index]:
            assert max(float((one[name] - other[name]).abs().max()) for name in one) > 2 * HALF_TOLERANCE


PASSES = 300
BF16 = torch.bfloat16
CASTS_BUFFERS = {"booster-zero", "booster-gemini", "booster-hybrid", "lightning-colossalai", "sharded-model"}
"""Front-ends of ColossalAI's API, which casts buffers, too."""
FP32_OUTPUTS = {"fabric", "accelerate"}


class Counting(Net):
    """Add to the buffers in every pass, and record the dtype of the input."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.register_buffer("bias", torch.zeros(()))
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int32))

    def forward(self, input: Tensor) -> Tensor:
        for name, buffer in self.named_buffers():
            buffer.add_(0.001 if name == "bias" else 1)
        self.input_dtype = input.dtype
        return super().forward(input)


def counts(model: nn.Module) -> dict[str, tuple[torch.dtype, float]]:
    return {name: (buffer.dtype, float(buffer)) for name, buffer in model.named_buffers()}


def expected_counts(dtype: torch.dtype) -> dict[str, tuple[torch.dtype, float]]:
    model = Counting()
    for name in ("bias", "n"):
        setattr(model, name, getattr(model, name).to(dtype))
    for _ in range(PASSES):
        model(torch.zeros(1, front_ends.WIDTH))
    return counts(model)


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        (zero(3, BF16), torch.float32),
        (zero(1, BF16), torch.float32),
        *full((replicated(BF16), torch.float32), (zero(2, BF16), torch.float32)),
        (zero(3, BF16).but(buffer_dtype=BF16), BF16),
    ],
)
def test_buffers_keep_their_dtype_or_get_the_plans(plan: Plan, dtype: torch.dtype) -> None:
    """fp64 and integer buffers keep theirs."""
    model = Counting()
    with sharded(model, front_ends.adam(model), plan) as session:
        for _ in range(PASSES):
            session.backward(session.module(torch.ones(1, front_ends.WIDTH)).float().sum())
            session.optimizer.step()
            session.optimizer.zero_grad()
        found = counts(model)
    assert found == expected_counts(dtype) and found["n"] == (dtype, 256.0 if dtype is BF16 else PASSES)


@on_ranks(RANKS)
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_dtypes_under_a_front_end(name: str, tmp_path: Path) -> None:
    """The table of docs/mixed-precision.md: buffers, and dtypes of input and output, after one fp16 step."""
    kind, outputs, loss_of = FRONT_ENDS[name], list[Tensor](), front_ends.loss_of

    def noted(output: Tensor, target: Tensor) -> Tensor:
        outputs.append(output)
        return loss_of(output, target)

    with (
        kind.context(),
        mock.patch.multiple(front_ends, Net=Counting, loss_of=noted),
        mock.patch.object(kind, "half_inputs", name == "deepspeed"),  # DeepSpeed casts no inputs without auto_cast
        warnings.catch_warnings(action="ignore"),
    ):
        front_end = kind(Program(steps=(0,), passes=PASSES, half=True), str(tmp_path))
        front_end.run()
        net: Any = front_end.net
        assert counts(net) == expected_counts(torch.float16 if name in CASTS_BUFFERS else torch.float32)
        assert net.input_dtype is (torch.float32 if name == "booster-ddp" else torch.float16)
        assert outputs[-1].dtype is (torch.float32 if name in FP32_OUTPUTS else torch.float16)
        front_end.close()


NAMES = {
    "shard": ("session.optimizer.step()", "session.checkpoints.save(directory)"),
    "booster-gemini": ("step() of the boosted optimizer", "booster.save_model(model, path)"),
    "lightning-fully-sharded": ("self.optimizers().step()", "trainer.save_checkpoint(path)"),
    "fabric": ("step() of what fabric.setup returned", ""),  # its strategy keeps small parameters gathered
    "deepspeed": ("engine.step()", "engine.save_checkpoint(directory)"),
    "sharded-model": ("step() of the optimizer's wrapper", "state_dict() of the wrapper"),
    "huggingface": ("trainer.optimizer.step()", "trainer.save_model()"),
    "accelerate": ("step() of the optimizer that prepare returned", "accelerator.get_state_dict(model)"),
}


@on_ranks(RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_objects_of_the_front_end(name: str, tmp_path: Path) -> None:
    """Also after another front-end was used in the same process."""
    kind, (step, save) = FRONT_ENDS[name], NAMES[name]
    optimizers = list[torch.optim.Optimizer]()

    def noted(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(sgd(model))
        return optimizers[-1]

    with kind.context(), mock.patch.object(front_ends, "adam", noted), warnings.catch_warnings(action="ignore"):
        front_end, other = kind(Program(steps=(0,), half=kind.always_half), str(tmp_path)), Net()
        front_end.run()
        with sharded(other, sgd(other), zero(3)):
            raises(RuntimeError, rf"; call {re.escape(step)}$", optimizers[-1].step)
            if save:
                weight = front_end.net[0].state_dict()["weight"]
                raises(RuntimeError, rf"; use {re.escape(save)}, or call it", weight.sum)
        front_end.close()


def normed() -> nn.Module:
    torch.manual_seed(5)
    instances = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    body = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), instances, nn.Flatten())
    return nn.Sequential(*body, nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@on_ranks(RANKS)
@pytest.mark.parametrize("plan", [zero(3, BF16), *full(zero(1, BF16), zero(3, torch.float16).but(scaler=None))])
def test_norms_with_running_statistics(plan: Plan) -> None:
    """Statistics are fp32; torch has no BatchNorm for CPUs with 16-bit weights and fp32 statistics."""
    batches = list(torch.randn(20, 8, 3, 4, 4, generator=torch.Generator().manual_seed(1)))
    recipe = PlainRecipe(param_dtype=plan.precision.param_dtype)
    plain = train_plain(normed, square_loss, sgd, [[[x]] for x in batches], recipe)
    with sharded(model := normed(), sgd(model), plan) as session:
        for x in batches:
            session.backward(square_loss(session.module, x))
            session.optimizer.step()
            session.optimizer.zero_grad()
        assert_close(session.module.state_dict(), plain.masters[-1] | plain.buffers[-1], 1e-3, "state")
        for each in (session.module, plain.model):
            each.eval()
        with torch.no_grad():
            assert_close({"": session.module(batches[0])}, {"": plain.model(batches[0])}, 1e-2, "evaluation")
