"""Checkpoints of other libraries in sharded sessions: training continues as in plain torch.

Formats: Hugging Face's Trainer, accelerate, torch DCP of FSDP2 and torchtitan (read and written), safetensors, torch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.cli.main import main
from shardwise.core.checkpoint.formats import detect_format, open_checkpoint, write_dcp
from shardwise.core.checkpoint.source import CheckpointSource
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks
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
    """Return Trainer's parameter groups: with and without weight decay."""
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
    """Train with checkpoints up to checkpoint-12, so that the last by number is not the last by name."""
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


@on_ranks()
@pytest.mark.parametrize(("ranks", "stage", "converted"), [(2, 3, False), (2, 3, True), *full((1, 2, False))])
def test_trainer_directory_resumes_as_in_torch(
    trained: Path, tmp_path: Path, ranks: int, stage: int, converted: bool
) -> None:
    """Load Trainer's directory, or its conversion to the native format, which keeps the step number."""
    last, root = trained / "checkpoint-12", trained
    if converted:
        root = tmp_path / "step-12"
        if dist.get_rank() == 0:
            assert main(["checkpoint", "convert", str(trained), str(root), "--to", "native"]) == 0
        dist.barrier()
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    session = build(model, adamw(model), zero(stage))  # type: ignore[arg-type]
    scheduler = linear(session.optimizer)
    restored = session.checkpoints.load(root, lr_schedulers=[scheduler])
    drawn = torch.rand(3)
    assert restored is not None and not restored.missing and not restored.unexpected and restored.step == 12
    assert converted or restored.tag == "checkpoint-12"
    go_on(session.module, session.backward, session.optimizer, scheduler)
    assert_close(session.module.state_dict(), plain(last), 0.0, f"stage {stage}, {ranks} ranks")
    session.close()
    torch.set_rng_state(torch.load(last / "rng_state.pth", weights_only=False)["cpu"])
    assert torch.equal(drawn, torch.rand(3)) == (dist.get_rank() == 0), "the saved generators are rank 0's"


@on_ranks(2)
def test_booster_loads_model_optimizer_and_scheduler_of_trainer(trained: Path) -> None:
    model: Any = gpt2()
    optimizer: Any = adamw(model)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=linear(optimizer))
    booster.load_model(model, trained)
    booster.load_optimizer(optimizer, trained)
    booster.load_lr_scheduler(scheduler, trained)
    go_on(model, lambda loss: booster.backward(loss, optimizer), optimizer, scheduler)
    assert_close(model.state_dict(), plain(trained / "checkpoint-12"), 1e-6, "Booster")
    booster.close()


def test_inspect_of_a_trainer_directory(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert detect_format(trained) == "trainer" == detect_format(trained / "checkpoint-4")
    assert main(["checkpoint", "inspect", str(trained)]) == 0
    said = capsys.readouterr()
    assert "optimizer 0 : groups of 10, 18 parameters" in said.out and "lr_schedulers" in said.out
    assert "training_args.bin" in said.err


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
    """Save checkpoint_0 to checkpoint_10; return the directory and the weights three updates later."""
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


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_directory_resumes(accelerated: tuple[Path, dict[str, Tensor]], stage: int) -> None:
    root, expected = accelerated
    assert detect_format(root) == "accelerate" == detect_format(root / "checkpoints" / "checkpoint_3")
    model = Net()
    session = build(model, list(two_optimizers(model)), zero(stage))  # type: ignore[arg-type]
    assert session.checkpoints.load(root) is not None
    assert session.checkpoints.steps == 11
    for number in range(50, 53):
        update(session.module, session.backward, session.optimizers, number)
    assert_close(session.module.state_dict(), expected, 1e-6, f"stage {stage}")
    session.close()


class Fsdp2Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens)) * self.scale.sum() + self.frozen.sum()
        return self.head(hidden).logsumexp(-1).mean()


def _built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Fsdp2Net()
    fully_shard(model.block)
    fully_shard(model)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6).view(2, 3) % 7).backward()
    optimizer.step()


def _states(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)


def _full(value: Any) -> Any:
    # A copy, because the next step changes step counts in place.
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return model and optimizer state under the names of the native format."""
    found = {f"model/{name}": _full(value) for name, value in get_model_state_dict(model).items()}
    for name, entry in get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"optimizer/0/{name}/{key}": _full(value) for key, value in entry.items()}
    return found


def _content(states: dict[str, Any], optimized: dict[str, Any], flat: bool) -> dict[str, Any]:
    """Return the content of a DCP checkpoint; torchtitan has the model's names at the top level."""
    return {**states, "optimizer": optimized} if flat else {"model": states, "optim": optimized}


def _loss(model: nn.Module) -> float:
    return model(torch.arange(6).view(2, 3) % 7).item()


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, *full(True)], ids=["fsdp2", "torchtitan"])
def test_fsdp2_checkpoints_are_read_and_written(flat: bool, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model, optimizer = _built(1)
    for _ in range(3):
        _step(model, optimizer)
    more = {"train_state": {"step": torch.tensor(3)}} if flat else {}
    dcp.save(_content(*_states(model, optimizer, flat), flat) | more, checkpoint_id=theirs)
    truth, groups = _flat(model, optimizer), get_optimizer_state_dict(model, optimizer)["param_groups"]
    _step(model, optimizer)
    next_loss = _loss(model)
    if dist.get_rank() == 0:
        with open_checkpoint(theirs) as source:
            _holds(source, truth)
            write_dcp(source, ours, "torchtitan" if flat else "fsdp2")
    dist.barrier()
    model, optimizer = _built(2)
    states, optimized = _states(model, optimizer, flat)
    content = _content(states, optimized, flat)
    dcp.load(content, checkpoint_id=ours)
    set_model_state_dict(model, {k: content[k] for k in states} if flat else content["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, content["optimizer" if flat else "optim"], options=options)
    assert_close(_flat(model, optimizer), truth, 0.0, "what they load")
    assert get_optimizer_state_dict(model, optimizer)["param_groups"] == groups
    _step(model, optimizer)
    assert _loss(model) == next_loss, "the next step is the one that would have followed"


def _holds(source: CheckpointSource, truth: dict[str, Tensor]) -> None:
    small, tensors = source.state()["optimizers"][0]["small"], source.tensors()
    counts = {name for name in truth if name.endswith("/step")}
    assert all(small[name.split("/")[2]] == {"step": {"dtype": "float32", "value": 3.0}} for name in counts)
    assert tensors.keys() == truth.keys() - counts
    for name, fact in tensors.items():
        got, expected = source.read(name, 0, fact.numel).reshape(fact.shape), truth[name]
        assert torch.equal(got, expected) and got.dtype == expected.dtype, name
        for start in range(0, fact.numel, 3):
            count = min(5, fact.numel - start)
            assert torch.equal(source.read(name, start, count), expected.reshape(-1)[start : start + count]), name


class Tied(nn.Module):
    """Embedding and head share a weight; there is a buffer of odd size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embed(x)))) * self.scale[0]


RUNS = [(1, 2), (2, 3), (3, 1)]
QUICK = [(kind, *RUNS[number]) for number, kind in enumerate(("once", "twice", "torch"))]
CASES = [(kind, *run) for kind in ("once", "twice", "torch") for run in RUNS]


@on_ranks()
@pytest.mark.parametrize(("kind", "ranks", "stage"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_safetensors_and_torch_weights_load(tmp_path: Path, kind: str, ranks: int, stage: int) -> None:
    expected, path = Tied(7).state_dict(), tmp_path / ("model.pt" if kind == "torch" else "model.safetensors")
    if dist.get_rank() == 0:
        stored = {n: v.clone() for n, v in expected.items() if kind != "once" or n != "head.weight"}
        torch.save(stored, path) if kind == "torch" else save_file(stored, path)
    dist.barrier()
    model = Tied(99)
    session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(stage))  # type: ignore[arg-type]
    restored = session.checkpoints.load(path)
    assert restored is not None and restored.missing == () and restored.unexpected == ()
    assert_close(session.module.state_dict(), expected, 0.0, f"{kind} into stage {stage}")
    session.backward(session.module(torch.tensor([1, 2, 3])).sum())
    session.optimizer.step()  # the loaded model can be trained
    session.close()
