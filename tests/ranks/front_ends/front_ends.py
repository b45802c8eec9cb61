"""Adapters that run one training program under each front-end, and that program in plain PyTorch.

A :class:`Program` is data. :func:`plain` runs it in one process; a :class:`FrontEnd` runs it with the calls that its
users make. Front-ends with their own loop (the Trainers) get the same batches through a loader.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, SequentialSampler

import shardwise
import shardwise.deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.core.mesh import default_device
from shardwise.plan import zero
from shardwise.strategies.lightning_packages import FABRIC, LIGHTNING
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from tests.support.booster_setup import SMALL
from tests.support.huggingface_setup import launched, quiet
from tests.support.lightning_setup import HIDDEN, OUT, WIDTH, fabric, trainer, weights

STEPS, ROWS = 4, 12
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Program:
    """A training run.

    Attributes:
        steps: the steps to make, by number: they name their batches.
        passes: backward passes of a step.
        clip: norm that gradients are clipped to; 0: none.
        half: compute in fp16 with a loss scale.
        overflow: step in which the loss of the last rank is infinite.
        failure: step and place (``"forward"``, ``"backward"``) where every rank raises an error once.
        evaluate: evaluate before the first step and after each one.
        load: folder of the checkpoint that is loaded before the first step.
        save: folder of the checkpoint that is saved after the last step.
    """

    steps: tuple[int, ...] = tuple(range(STEPS))
    passes: int = 1
    clip: float = 0.0
    half: bool = False
    overflow: int | None = None
    failure: tuple[int, str] | None = None
    evaluate: bool = False
    load: str = ""
    save: str = ""


@dataclass
class Result:
    """The results of a program.

    Attributes:
    weights: full parameters after the last step.
    outputs: of the model for :func:`evaluation_batch` in each evaluation.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)


class InjectedError(ArithmeticError):
    """The error that the model of a program raises."""


class Failing(nn.Module):
    """Return the input, and raise once in the armed pass."""

    armed = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.armed == "backward" and inputs.requires_grad:
            inputs.register_hook(lambda _: self.fail("backward"))
        self.fail("forward")
        return inputs

    def fail(self, place: str) -> None:
        if self.armed == place:
            self.armed = ""
            raise InjectedError(f"in the {place} pass")


class Net(nn.Sequential):
    """A network that records its outputs in evaluation mode."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), Failing(), nn.Dropout(0.0), nn.Linear(HIDDEN, OUT))
        self.outputs: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        if not self.training:
            self.outputs.append(output.detach().float())
        return output

    def arm(self, program: Program, step: int) -> None:
        if program.failure is not None and program.failure[0] == step:
            (failing,) = (module for module in self if isinstance(module, Failing))
            failing.armed = program.failure[1]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-3)


def batches(step: int, passes: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
    """Return the micro-batches of one rank in one step; all ranks have equally many rows."""
    rows = torch.randn(passes, ROWS, WIDTH + OUT, generator=torch.Generator().manual_seed(100 + step))
    share = ROWS // ranks
    return [(each[:, :WIDTH], each[:, WIDTH:]) for each in rows[:, rank * share : (rank + 1) * share]]


def own_batches(step: int, passes: int) -> list[Batch]:
    """Return this rank's micro-batches on the default device of the front-ends."""
    device, own = default_device(), batches(step, passes, dist.get_rank(), dist.get_world_size())
    return [(inputs.to(device), target.to(device)) for inputs, target in own]


def evaluation_batch() -> Batch:
    return own_batches(99, 1)[0]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def overflows(program: Program, step: int) -> bool:
    return step == program.overflow and dist.get_rank() == dist.get_world_size() - 1


def plain(program: Program) -> Result:
    """Run the program in one process of plain PyTorch in fp32, without a step that overflows."""
    model, result = Net(), Result()
    optimizer = adam(model)

    def evaluate() -> None:
        if program.evaluate:
            with torch.no_grad():
                result.outputs.append(model(batches(99, 1)[0][0]))

    evaluate()
    for step in range(max(program.steps, default=-1) + 1):  # earlier steps are in the checkpoint
        if step == program.overflow:
            continue
        for inputs, target in batches(step, program.passes):
            (loss_of(model(inputs), target) / program.passes).backward()  # type: ignore[no-untyped-call]
        if program.clip:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), program.clip)) > program.clip
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


class FrontEnd:
    """A model and its AdamW under one front-end, with a loop that the user writes.

    Args:
    program: what :meth:`run` does.
    folder: for files that the front-end itself writes.
    """

    module: Any
    optimizer: Any
    half_inputs: ClassVar[bool] = False  # the program casts inputs to fp16 if half
    always_half: ClassVar[bool] = False  # fp16 in every program
    repeats: ClassVar[tuple[str, ...]] = ("forward", "backward")  # passes that can be repeated after an error

    def __init__(self, program: Program, folder: str) -> None:
        self.program, self.folder, self.net = program, folder, Net(seed=9 if program.load else 3)
        self.setup(adam(self.net))

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError(f"{optimizer=}")

    @classmethod
    def context(cls) -> AbstractContextManager[None]:
        """Return the environment that a launcher provides."""
        return nullcontext()

    @classmethod
    def can_repeat(cls, program: Program) -> bool:
        """Return whether the failing pass, if there is one, can be repeated."""
        return program.failure is None or program.failure[1] in cls.repeats

    def run(self) -> Result:
        if self.program.load:
            self.load(self.program.load)
        self.evaluate()
        for step in self.program.steps:
            self.net.arm(self.program, step)
            try:
                self.train(step)
            except InjectedError:
                if not self.can_repeat(self.program):
                    raise
                self.module.zero_grad()
                self.train(step)
            self.evaluate()
        if self.program.save:
            self.save(self.program.save)
        return Result(self.weights(), self.net.outputs)

    def train(self, step: int) -> None:
        for inputs, target in own_batches(step, self.program.passes):
            with self.one_pass():
                loss = loss_of(self(inputs), target)
                self.backward(loss * float("inf") if overflows(self.program, step) else loss)
        self.step()

    def evaluate(self) -> None:
        if self.program.evaluate:
            self.module.eval()
            with torch.no_grad():
                self(evaluation_batch()[0])
            self.module.train()

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs.half() if self.program.half and self.half_inputs else inputs)

    def one_pass(self) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of a micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss / self.program.passes)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.module.state_dict()
        return {name: value.detach().float().clone() for name, value in state.items()}

    def save(self, path: str) -> None:
        raise NotImplementedError(f"{path=}")

    def load(self, path: str) -> None:
        raise NotImplementedError(f"{path=}")

    def close(self) -> None:
        raise NotImplementedError


class Shard(FrontEnd):
    half_inputs = True

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        options = {"precision": "fp16"} if self.program.half else {}
        self.session = shardwise.shard(self.net, optimizer, stage=3, max_norm=self.program.clip, **options)
        self.module, self.optimizer = self.session.module, self.session.optimizer

    def backward(self, loss: Tensor) -> None:
        self.session.backward(loss / self.program.passes)

    def save(self, path: str) -> None:
        self.session.checkpoints.save(path)

    def load(self, path: str) -> None:
        self.session.checkpoints.load(path)

    def close(self) -> None:
        self.session.close()


class BoosterFrontEnd(FrontEnd):
    plugin: ClassVar[Callable[..., Plugin]]

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        scale = {"initial_scale": 64.0} if self.program.half else {}
        precision = "fp16" if self.program.half else "fp32"
        self.booster = Booster(plugin=self.plugin(precision=precision, max_norm=self.program.clip, **scale))
        self.module, self.optimizer, *_ = self.booster.boost(self.net, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.booster.backward(loss / self.program.passes, self.optimizer)

    def save(self, path: str) -> None:
        self.booster.save_model(self.module, f"{path}/model", shard=True)
        self.booster.save_optimizer(self.optimizer, f"{path}/optimizer", shard=True)

    def load(self, path: str) -> None:
        self.booster.load_model(self.module, f"{path}/model")
        self.booster.load_optimizer(self.optimizer, f"{path}/optimizer")

    def close(self) -> None:
        self.booster.close()


class Zero(BoosterFrontEnd):
    half_inputs = True
    plugin = functools.partial(LowLevelZeroPlugin, stage=2)


class Gemini(BoosterFrontEnd):
    half_inputs = True
    plugin = functools.partial(GeminiPlugin, enable_gradient_accumulation=True, **SMALL)


class Hybrid(BoosterFrontEnd):
    half_inputs = True
    plugin = functools.partial(HybridParallelPlugin, tp_size=1, pp_size=1, zero_stage=1)


class TorchPlugin(BoosterFrontEnd):
    """Plugins whose sharding is torch's: the Booster sets the precision, and the program clips."""

    repeats = ("forward",)

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        plugin = self.plugin()
        precision = "fp16" if self.program.half and not plugin.control_precision() else None
        self.booster = Booster(plugin=plugin, mixed_precision=precision)
        self.module, self.optimizer, *_ = self.booster.boost(self.net, optimizer)

    def step(self) -> None:
        if self.program.clip:
            self.optimizer.clip_grad_by_norm(self.program.clip)
        super().step()


class TorchDDP(TorchPlugin):
    plugin = TorchDDPPlugin


class TorchFSDP(TorchPlugin):
    def plugin(self) -> Plugin:  # type: ignore[override]
        mixed = MixedPrecision(param_dtype=torch.float16) if self.program.half else None
        return TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)


class DeepSpeed(FrontEnd):
    half_inputs = True

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        config = {
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
            "gradient_accumulation_steps": self.program.passes,
            "gradient_clipping": self.program.clip,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "fp16": {"enabled": self.program.half, "initial_scale_power": 6},
        }
        self.module, self.optimizer, *_ = shardwise.deepspeed.initialize(
            model=self.net, optimizer=optimizer, config=config
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


class ShardedModel(FrontEnd):
    half_inputs = True
    always_half = True

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        strategy = TensorShardStrategy()
        with ZeroInitContext(default_device(), strategy, shard_param=True):
            self.net = Net(seed=9 if self.program.load else 3)
        self.module = ShardedModelV2(self.net, strategy)
        self.optimizer = ShardedOptimizerV2(self.module, adam(self.module), initial_scale=64.0)

    def step(self) -> None:
        if self.program.clip:
            self.optimizer.clip_grad_norm(self.module, self.program.clip)
        super().step()

    def save(self, path: str) -> None:
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if dist.get_rank() == 0:
            torch.save(state, f"{path}/state.pt")
        dist.barrier()

    def load(self, path: str) -> None:
        state = torch.load(f"{path}/state.pt")
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self.module.close()


class Fabric(FrontEnd):
    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        import shardwise.fabric

        strategy = shardwise.fabric.DeepSpeedStrategy(stage=3, initial_scale_power=6)
        if self.program.half:
            strategy.precision = shardwise.fabric.ShardedPrecision("16-mixed")
        self.fabric = fabric(strategy, FABRIC)
        self.module, self.optimizer = self.fabric.setup(self.net, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss / self.program.passes)

    def step(self) -> None:
        if self.program.clip:
            self.fabric.clip_gradients(self.module, self.optimizer, max_norm=self.program.clip)
        super().step()

    def save(self, path: str) -> None:
        self.fabric.save(f"{path}/saved", {"model": self.module, "optimizer": self.optimizer})

    def load(self, path: str) -> None:
        self.fabric.load(f"{path}/saved", {"model": self.module, "optimizer": self.optimizer})

    def close(self) -> None:
        self.fabric.strategy.unshard()


class Accelerate(FrontEnd):
    @classmethod
    def context(cls) -> AbstractContextManager[None]:
        return launched()

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        from shardwise.huggingface import ShardwiseAccelerator

        precision = "fp16" if self.program.half else "no"
        self.accelerator = ShardwiseAccelerator(
            plan=zero(3),
            mixed_precision=precision,
            cpu=not torch.cuda.is_available(),
            gradient_accumulation_steps=self.program.passes,
        )
        self.module, self.optimizer = self.accelerator.prepare(self.net, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        with self.accelerator.accumulate(self.module):
            yield
            if self.program.clip and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.module.parameters(), self.program.clip)
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


# ---- front-ends with a loop of their own


def loader(micro_batches: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(micro_batches, batch_size=None)  # type: ignore[arg-type]


@functools.cache
def lightning_module() -> Any:
    """Return a LightningModule whose epochs are steps, so that Lightning validates and resumes between steps."""

    class Module(LIGHTNING.load("LightningModule")):  # type: ignore[misc]
        def __init__(self, net: Net, program: Program) -> None:
            super().__init__()
            self.net, self.program = net, program

        def train_dataloader(self) -> Any:
            return loader(own_batches(self.current_epoch, self.program.passes))

        def val_dataloader(self) -> Any:
            return loader([evaluation_batch()])

        def training_step(self, batch: Batch, _: int) -> Tensor:
            self.net.arm(self.program, self.current_epoch)
            loss = loss_of(self.net(batch[0]), batch[1])
            return loss * float("inf") if overflows(self.program, self.current_epoch) else loss

        def validation_step(self, batch: Batch, _: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.net)

    return Module


class LightningTrainer(FrontEnd):
    repeats = ()
    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        import shardwise.lightning as ours

        precision = {"precision_plugin": ours.ShardedPrecision("16-mixed")} if self.program.half else {}
        self.trainer = trainer(
            getattr(ours, self.name)(**self.options, **precision),
            max_epochs=max(self.program.steps) + 1,
            accumulate_grad_batches=self.program.passes,
            gradient_clip_val=self.program.clip or None,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            num_sanity_val_steps=int(self.program.evaluate),
            limit_val_batches=int(self.program.evaluate),
        )

    def run(self) -> Result:
        module = lightning_module()(self.net, self.program)
        load = f"{self.program.load}/saved.ckpt" if self.program.load else None
        self.trainer.fit(module, ckpt_path=load)
        if self.program.save:
            self.trainer.save_checkpoint(f"{self.program.save}/saved.ckpt")
        state = {name.removeprefix("net."): value for name, value in weights(self.trainer).items()}
        return Result(state, self.net.outputs)

    def close(self) -> None:
        self.trainer.strategy.unshard()


class LightningDeepSpeed(LightningTrainer):
    name, options = "DeepSpeedStrategy", {"stage": 3, "initial_scale_power": 6}


class LightningColossalAI(LightningTrainer):
    name, options = "ColossalAIStrategy", {"chunk_size": 100, "initial_scale": 64.0}


class LightningFullySharded(LightningTrainer):
    name = "DDPFullyShardedStrategy"


class Scored(nn.Module):
    """A model that computes its loss, as models of transformers do."""

    def __init__(self, net: Net, program: Program) -> None:
        super().__init__()
        self.net, self.program, self.calls = net, program, 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        step = self.program.steps[0]
        if self.training:
            step += self.calls // self.program.passes
            self.net.arm(self.program, step)
            self.calls += 1
        output = self.net(inputs)
        loss = loss_of(output, labels)
        return {"loss": loss * float("inf") if overflows(self.program, step) else loss, "logits": output}


class HuggingFaceTrainer(FrontEnd):
    repeats = ()

    @classmethod
    @contextmanager
    def context(cls) -> Iterator[None]:
        with launched(), quiet():
            yield

    def setup(self, optimizer: torch.optim.Optimizer) -> None:
        from transformers import TrainingArguments

        from shardwise.huggingface import ShardwiseTrainer

        class InOrder(ShardwiseTrainer):
            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return SequentialSampler(train_dataset)

        steps = max(self.program.steps) + 1
        arguments = TrainingArguments(
            self.program.save or f"{self.folder}/output",
            max_steps=steps,
            per_device_train_batch_size=ROWS // dist.get_world_size(),
            per_device_eval_batch_size=ROWS // dist.get_world_size(),
            gradient_accumulation_steps=self.program.passes,
            max_grad_norm=self.program.clip,
            lr_scheduler_type="constant",
            fp16=self.program.half,
            eval_strategy="steps" if self.program.evaluate else "no",
            eval_steps=1,
            eval_on_start=self.program.evaluate,
            save_strategy="steps" if self.program.save else "no",
            save_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        self.scored = Scored(self.net, self.program)
        self.trainer = InOrder(
            self.scored,
            arguments,
            plan=zero(3),
            train_dataset=items([micro for step in range(STEPS) for micro in batches(step, self.program.passes)]),
            eval_dataset=items(batches(99, 1)),
            optimizers=(optimizer, None),
        )

    def run(self) -> Result:
        checkpoints = sorted(Path(self.program.load).glob("checkpoint-*")) if self.program.load else []
        self.trainer.train(resume_from_checkpoint=os.fspath(checkpoints[-1]) if checkpoints else None)
        state = self.trainer.session.module.state_dict()
        return Result(
            {name.removeprefix("net."): value.detach().float().clone() for name, value in state.items()},
            self.net.outputs,
        )

    def close(self) -> None:
        self.trainer.accelerator.close()


def items(micro_batches: list[Batch]) -> list[dict[str, Tensor]]:
    """Return the rows of micro-batches as a dataset for transformers."""
    return [
        {"inputs": inputs, "labels": labels} for each in micro_batches for inputs, labels in zip(*each, strict=True)
    ]


FRONT_ENDS: dict[str, type[FrontEnd]] = {
    "shard": Shard,
    "booster-ddp": TorchDDP,
    "booster-fsdp": TorchFSDP,
    "booster-zero": Zero,
    "booster-gemini": Gemini,
    "booster-hybrid": Hybrid,
    "lightning-deepspeed": LightningDeepSpeed,
    "lightning-colossalai": LightningColossalAI,
    "lightning-fully-sharded": LightningFullySharded,
    "fabric": Fabric,
    "deepspeed": DeepSpeed,
    "sharded-model": ShardedModel,
    "huggingface": HuggingFaceTrainer,
    "accelerate": Accelerate,
}
