"""The contract of every front-end: the same program under each one gives the numbers of plain PyTorch in one process.

A front-end is a small adapter with the same methods, and a behaviour is a function that gets one. Each test is one
behaviour under one front-end on two ranks. Features of one front-end are tested in its own folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_setup import launched
from lightning_setup import HIDDEN, OUT, WIDTH, fabric
from torch import Tensor, nn

import shardwise
import shardwise.deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from shardwise.plan import zero
from shardwise.strategies.namespace import FABRIC
from shardwise.testing import run_ranks

RANKS, STEPS, CLIP = 2, 4, 0.05
Batch = tuple[Tensor, Tensor]


class Fails(nn.Module):
    """Raises in a forward pass when it is told to."""

    armed = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.armed:
            self.armed = False
            raise ArithmeticError("in the middle of the model")
        return inputs


def net(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), Fails(), nn.Dropout(0.0), nn.Linear(HIDDEN, OUT))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-3)


def batches(rank: int, passes: int = 1) -> list[list[Batch]]:
    """Of each step its micro-batches."""
    generator = torch.Generator().manual_seed(100 + rank)
    rows = torch.randn(STEPS, passes, 4, WIDTH + OUT, generator=generator)
    return [[(each[:, :WIDTH], each[:, WIDTH:]) for each in step] for step in rows]


def error(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


# ---- the front-ends


class Front:
    """A model and its AdamW, sharded by one front-end.

    Args:
        model: the module to shard.
        passes: backward passes of a step.
        clip: norm that gradients are clipped to; 0: none.
        half: compute in fp16 with a loss scale.
    """

    module: Any
    optimizer: Any

    def __init__(self, model: nn.Module, passes: int = 1, clip: float = 0.0, half: bool = False) -> None:
        self.model, self.passes, self.clip, self.half = model, passes, clip, half
        self.setup(adam(model))

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError(f"{optimizer=}")

    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.module(inputs.half() if self.half and self.casts else inputs)
        return output

    casts = True  # the program gives fp16 inputs

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss / self.passes)

    def one_pass(self) -> Any:
        """Around the forward and backward pass of a micro-batch."""
        return nullcontext()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.module.state_dict()
        return {name: value.detach().float().clone() for name, value in found.items()}

    def save(self, path: str) -> None:
        raise NotImplementedError(f"{path=}")

    def load(self, path: str) -> None:
        raise NotImplementedError(f"{path=}")

    def close(self) -> None:
        raise NotImplementedError


class Native(Front):
    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        options = {"precision": "fp16"} if self.half else {}
        self.session = shardwise.shard(self.model, optimizer, stage=3, max_norm=self.clip, **options)
        self.module, self.optimizer = self.session.module, self.session.optimizer

    def backward(self, loss: Tensor) -> None:
        self.session.backward(loss / self.passes)

    def save(self, path: str) -> None:
        self.session.checkpoints.save(path)

    def load(self, path: str) -> None:
        self.session.checkpoints.load(path)

    def close(self) -> None:
        self.session.close()


class OfBooster(Front):
    def plugin(self) -> Any:
        options = {"initial_scale": 64.0} if self.half else {}
        precision = "fp16" if self.half else "fp32"
        return LowLevelZeroPlugin(stage=2, precision=precision, max_norm=self.clip, **options)

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        self.booster = Booster(plugin=self.plugin())
        self.module, self.optimizer, *_ = self.booster.boost(self.model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.booster.backward(loss / self.passes, self.optimizer)

    def save(self, path: str) -> None:
        self.booster.save_model(self.module, f"{path}/model", shard=True)
        self.booster.save_optimizer(self.optimizer, f"{path}/optimizer", shard=True)

    def load(self, path: str) -> None:
        self.booster.load_model(self.module, f"{path}/model")
        self.booster.load_optimizer(self.optimizer, f"{path}/optimizer")

    def close(self) -> None:
        self.booster.close()


class OfGemini(OfBooster):
    def plugin(self) -> Any:
        options = {"initial_scale": 64.0} if self.half else {}
        small = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 0.01}
        precision = "fp16" if self.half else "fp32"
        return GeminiPlugin(
            precision=precision, max_norm=self.clip, enable_gradient_accumulation=True, **small, **options
        )


class OfDeepSpeed(Front):
    casts = True

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.passes,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": 3},
            "fp16": {"enabled": self.half, "initial_scale_power": 6},
        }
        self.module, self.optimizer, *_ = shardwise.deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=config
        )

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        yield
        self.module.step()

    def step(self) -> None:
        """Each pass has called ``step()``."""

    def save(self, path: str) -> None:
        self.module.save_checkpoint(path)

    def load(self, path: str) -> None:
        self.module.load_checkpoint(path)

    def close(self) -> None:
        self.module.destroy()


class OfFabric(Front):
    casts = False

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        import shardwise.fabric

        strategy = shardwise.fabric.DeepSpeedStrategy(stage=3, initial_scale_power=6)
        precision = shardwise.fabric.ShardedPrecision("16-mixed") if self.half else None
        if precision is not None:
            strategy.precision = precision
        self.fabric = fabric(strategy, FABRIC)
        self.module, self.optimizer = self.fabric.setup(self.model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss / self.passes)

    def step(self) -> None:
        if self.clip:
            self.fabric.clip_gradients(self.module, self.optimizer, max_norm=self.clip)
        super().step()

    def save(self, path: str) -> None:
        self.fabric.save(f"{path}/saved", {"model": self.module, "optimizer": self.optimizer})

    def load(self, path: str) -> None:
        self.fabric.load(f"{path}/saved", {"model": self.module, "optimizer": self.optimizer})

    def close(self) -> None:
        self.fabric.strategy.unshard()


class OfAccelerate(Front):
    casts = False

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        from shardwise.huggingface import ShardwiseAccelerator

        precision = "fp16" if self.half else "no"
        self.accelerator = ShardwiseAccelerator(
            plan=zero(3), mixed_precision=precision, cpu=True, gradient_accumulation_steps=self.passes
        )
        self.module, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        with self.accelerator.accumulate(self.module):
            yield
            if self.clip and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.module.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        """Each pass has called ``step()``."""

    def save(self, path: str) -> None:
        self.accelerator.save_state(path)

    def load(self, path: str) -> None:
        self.accelerator.load_state(path)

    def close(self) -> None:
        self.accelerator.close()


FRONTS: dict[str, type[Front]] = {
    "native": Native,
    "booster": OfBooster,
    "gemini": OfGemini,
    "deepspeed": OfDeepSpeed,
    "fabric": OfFabric,
    "accelerate": OfAccelerate,
}


# ---- the program, and plain PyTorch


def train(front: Front, steps: range) -> None:
    mine = batches(dist.get_rank(), front.passes)
    for step in steps:
        for inputs, target in mine[step]:
            with front.one_pass():
                front.backward(error(front(inputs), target))
        front.step()


def plain(passes: int = 1, clip: float = 0.0, steps: tuple[int, ...] = tuple(range(STEPS))) -> nn.Module:
    """The same steps by one process on the batches of all ranks."""
    model = net()
    optimizer = adam(model)
    every = [batches(rank, passes) for rank in range(RANKS)]
    for step in steps:
        for mine in every:
            for inputs, target in mine[step]:
                (error(model(inputs), target) / (passes * RANKS)).backward()
        if clip:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        optimizer.step()
        optimizer.zero_grad()
    return model


def same(found: dict[str, Tensor], model: nn.Module, most: float = 1e-6) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    differences = {name: float((value - expected[name]).abs().max()) for name, value in found.items()}
    assert all(difference <= most for difference in differences.values()), differences


# ---- the behaviours


def trains(front: type[Front], _: str) -> None:
    made = front(net())
    train(made, range(STEPS))
    same(made.state(), plain())
    made.close()


def accumulates(front: type[Front], _: str) -> None:
    made = front(net(), passes=2)
    train(made, range(STEPS))
    same(made.state(), plain(passes=2))
    made.close()


def clips(front: type[Front], _: str) -> None:
    made = front(net(), passes=2, clip=CLIP)
    train(made, range(STEPS))
    same(made.state(), plain(passes=2, clip=CLIP))
    made.close()


def skips_an_overflow(front: type[Front], _: str) -> None:
    """The second step's gradients are infinite on one rank: no rank updates, and the step counts for nothing."""
    made = front(net(), half=True)
    train(made, range(1))
    before = made.state()
    inputs, target = batches(dist.get_rank())[1][0]
    with made.one_pass():
        loss = error(made(inputs), target)
        made.backward(loss * float("inf") if dist.get_rank() == 1 else loss)
    made.step()
    after = made.state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    train(made, range(2, STEPS))
    same(made.state(), plain(steps=(0, 2, 3)), 2e-2)
    made.close()


def evaluates(front: type[Front], _: str) -> None:
    """Before, between and after steps, in evaluation mode and without a graph."""
    made, expected = front(net()), net()
    inputs = batches(dist.get_rank())[0][0][0]
    for steps, model in ((range(0), expected), (range(2), plain(steps=(0, 1))), (range(2, STEPS), plain())):
        train(made, steps)
        made.module.eval()
        with torch.no_grad():
            assert float((made(inputs) - model(inputs)).abs().max()) < 1e-5
        made.module.train()
    same(made.state(), plain())
    made.close()


def goes_on_from_a_checkpoint(front: type[Front], folder: str) -> None:
    first = front(net())
    train(first, range(2))
    first.save(folder)
    first.close()
    second = front(net(seed=9))
    second.load(folder)
    same(second.state(), plain(steps=(0, 1)))
    train(second, range(2, STEPS))
    same(second.state(), plain())
    second.close()


def goes_on_after_a_failure(front: type[Front], _: str) -> None:
    """A forward pass raises on every rank; gradients are dropped and the step is made again."""
    model = net()
    made = front(model)
    train(made, range(1))
    for each in model.modules():
        if isinstance(each, Fails):
            each.armed = True
    with pytest.raises(ArithmeticError):
        made(batches(dist.get_rank())[1][0][0])
    made.module.zero_grad()
    train(made, range(1, STEPS))
    same(made.state(), plain())
    made.close()


def closes(front: type[Front], _: str) -> None:
    """Closing twice is harmless, and the same process shards another model afterwards."""
    made = front(net())
    train(made, range(1))
    made.close()
    made.close()
    trains(front, _)


BEHAVIOURS: list[Callable[[type[Front], str], None]] = [
    trains,
    accumulates,
    clips,
    skips_an_overflow,
    evaluates,
    goes_on_from_a_checkpoint,
    goes_on_after_a_failure,
    closes,
]


def play(behaviour: Callable[[type[Front], str], None], name: str, folder: str) -> None:
    context = launched() if name == "accelerate" else nullcontext()
    with context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        behaviour(FRONTS[name], folder)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", FRONTS)
def test_contract(name: str, behaviour: Callable[[type[Front], str], None], tmp_path: Path) -> None:
    run_ranks(RANKS, play, behaviour, name, str(tmp_path))
