"""Checkpoints of Hugging Face's own Trainer and of accelerate go on in sharded sessions as in plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.cli.main import main
from shardwise.core.checkpoint.formats import detect_format
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.sets import full

STEPS = 3


def tokens(number: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(number))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of Trainer: with weight decay, without."""
    named = list(model.named_parameters())
    outside = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    kept = [name for name, p in named if id(p) not in outside and "bias" not in name]
    return [
        {"params": [p for name, p in named if name in kept], "weight_decay": 0.1},
        {"params": [p for name, p in named if name not in kept], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(decayed(model), lr=1e-2)


def linear(optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0 / (1 + step)] * 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-2 and checkpoint-12, so that the last by number is not the last by name."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("trainer")
    arguments = transformers.TrainingArguments(
        output_dir=str(root), max_steps=12, save_steps=2, save_total_limit=6, per_device_train_batch_size=1,
        report_to=[], use_cpu=True, weight_decay=0.1, learning_rate=1e-2, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for number in range(4) for row in tokens(number)]
    transformers.Trainer(model=gpt2(), args=arguments, train_dataset=data).train()
    return root


def go_on(model: Any, backward: Any, optimizer: Any, scheduler: Any) -> None:
    for number in range(STEPS):
        optimizer.zero_grad()
        batch = tokens(100 + number)
        backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        scheduler.step()


def plain(path: Path) -> dict[str, Tensor]:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(path)
    optimizer = adamw(model)
    scheduler = linear(optimizer)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    scheduler.load_state_dict(torch.load(path / "scheduler.pt", weights_only=True))
    go_on(model.train(), Tensor.backward, optimizer, scheduler)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def resumed(path: str, stage: int, tag: str | None) -> tuple[dict[str, Tensor], int, str, Tensor]:
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = adamw(model)
    session = build(model, optimizer, zero(stage))  # type: ignore[arg-type]
    assert session.optimizer is not None
    scheduler = linear(session.optimizer)
    restored = session.checkpoints.load(path, tag, lr_schedulers=[scheduler])
    assert restored is not None and not restored.missing and not restored.unexpected
    drawn = torch.rand(3)
    go_on(session.module, session.backward, session.optimizer, scheduler)
    state = session.module.state_dict()
    session.close()
    return state, restored.step, restored.tag, drawn


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), *full((1, 2))])
def test_a_trainers_directory_goes_on_as_in_torch(trained: Path, ranks: int, stage: int) -> None:
    last = trained / "checkpoint-12"
    expected = plain(last)
    torch.set_rng_state(torch.load(last / "rng_state.pth", weights_only=False)["cpu"])
    first = torch.rand(3)
    for rank, (state, step, tag, drawn) in enumerate(run_ranks(ranks, resumed, str(trained), stage, None)):
        assert_close(state, expected, 0.0, f"stage {stage}, {ranks} ranks")
        assert (step, tag) == (12, "checkpoint-12")
        assert torch.equal(drawn, first) == (rank == 0), "the saved generators are rank 0's"


def through_booster(path: str) -> dict[str, Tensor]:
    model = gpt2()
    optimizer = adamw(model)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    scheduler = linear(optimizer)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    booster.load_model(model, path)
    booster.load_optimizer(optimizer, path)
    booster.load_lr_scheduler(scheduler, path)
    go_on(model, lambda loss: booster.backward(loss, optimizer), optimizer, scheduler)
    full = {name: value.clone() for name, value in model.state_dict().items()}
    booster.close()
    return full


def test_the_parts_of_a_trainers_directory_one_by_one(trained: Path) -> None:
    for state in run_ranks(2, through_booster, str(trained)):
        assert_close(state, plain(trained / "checkpoint-12"), 1e-6, "Booster")


def test_convert_and_inspect_of_a_trainers_directory(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert detect_format(trained) == "trainer" == detect_format(trained / "checkpoint-4")
    assert main(["checkpoint", "inspect", str(trained)]) == 0
    said = capsys.readouterr()
    assert "optimizer 0 : groups of 10, 18 parameters" in said.out and "lr_schedulers" in said.out
    assert "training_args.bin" in said.err
    target = tmp_path / "step-12"
    assert main(["checkpoint", "convert", str(trained), str(target), "--to", "native"]) == 0
    for state, step, *_ in run_ranks(2, resumed, str(target), 3, None):
        assert_close(state, plain(trained / "checkpoint-12"), 0.0, "converted, still numbered")
        assert step == 12


# -- accelerate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def two_optimizers(model: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.AdamW(model.first.parameters(), lr=1e-2), torch.optim.SGD(
        model.second.parameters(), lr=1e-2, momentum=0.9
    )


def batch(number: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def update(model: Any, backward: Any, optimizers: Any, number: int) -> None:
    for each in optimizers:
        each.zero_grad()
    backward(model(batch(number)).square().mean())
    for each in optimizers:
        each.step()


@pytest.fixture(scope="module", params=[True, *full(False)], ids=["safetensors", "bin"])
def accelerated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """checkpoints/checkpoint_0 to _10, and the weights that the run had three updates after the last."""
    accelerate = pytest.importorskip("accelerate")
    root = tmp_path_factory.mktemp("accelerate")
    config = accelerate.utils.ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    torch.manual_seed(1)
    net = Net()
    model, *optimizers = accelerator.prepare(net, *two_optimizers(net))
    for number in range(11):
        update(model, accelerator.backward, optimizers, number)
        accelerator.save_state(safe_serialization=request.param)
    for number in range(50, 53):
        update(model, accelerator.backward, optimizers, number)
    return root, {name: value.detach().clone() for name, value in net.state_dict().items()}


def resume_accelerated(path: str, stage: int) -> tuple[dict[str, Tensor], int]:
    model = Net()
    session = build(model, list(two_optimizers(model)), zero(stage))  # type: ignore[arg-type]
    assert session.checkpoints.load(path) is not None
    updates = session.checkpoints.steps
    for number in range(50, 53):
        update(session.module, session.backward, session.optimizers, number)
    state = session.module.state_dict()
    session.close()
    return state, updates


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_directory_goes_on(accelerated: tuple[Path, dict[str, Tensor]], stage: int) -> None:
    root, expected = accelerated
    assert detect_format(root) == "accelerate" == detect_format(root / "checkpoints" / "checkpoint_3")
    for state, updates in run_ranks(2, resume_accelerated, str(root), stage):
        assert_close(state, expected, 1e-6, f"{os.fspath(root)} at stage {stage}")
        assert updates == 11
