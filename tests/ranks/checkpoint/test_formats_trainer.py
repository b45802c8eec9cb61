"""Checkpoints of Hugging Face's own Trainer and of accelerate go on in sharded sessions as in plain torch.

torch DCP with real FSDP2 at two ranks: what it saves is read, and what is written here it loads.

Checkpoints of other formats load into sharded sessions of any kind.
"""

import os
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


RANKS = 2


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
    # A copy: step counts are changed in place by the next step.
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def _save(folder: str, flat: bool) -> dict[str, torch.Tensor]:
    model, optimizer = _built(1)
    for _ in range(3):
        _step(model, optimizer)
    states, optimized = _states(model, optimizer, flat)
    # torchtitan has the model's names at the top.
    content = {**states, "optimizer": optimized} if flat else {"model": states, "optim": optimized}
    if flat:
        content["train_state"] = {"step": torch.tensor(3)}
    dcp.save(content, checkpoint_id=folder)
    truth = {f"model/{name}": _full(value) for name, value in states.items()}
    nested = _states(model, optimizer, False)[1]
    for name, entry in nested["state"].items():
        truth |= {f"optimizer/0/{name}/{key}": _full(value) for key, value in entry.items()}
    return truth


def _load(folder: str, flat: bool) -> tuple[dict[str, Any], list[Any], float]:
    model, optimizer = _built(2)
    states, optimized = _states(model, optimizer, flat)
    content = {**states, "optimizer": optimized} if flat else {"model": states, "optim": optimized}
    dcp.load(content, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, {k: content[k] for k in states} if flat else content["model"])
    loaded = content["optimizer" if flat else "optim"]
    set_optimizer_state_dict(model, optimizer, loaded, options=options)
    again = get_optimizer_state_dict(model, optimizer)
    found = {f"model/{name}": _full(value) for name, value in get_model_state_dict(model).items()}
    for name, entry in again["state"].items():
        found |= {f"optimizer/0/{name}/{key}": _full(value) for key, value in entry.items()}
    _step(model, optimizer)
    loss = model(torch.arange(6).view(2, 3) % 7).item()
    return found, again["param_groups"], loss


def _continued(folder: str) -> tuple[list[Any], float]:
    model, optimizer = _built(1)
    for _ in range(3):
        _step(model, optimizer)
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    _step(model, optimizer)
    dist.barrier()
    return groups, model(torch.arange(6).view(2, 3) % 7).item()


@pytest.mark.parametrize("flat", [False, *full(True)], ids=["fsdp2", "torchtitan"])
def test_fsdp2_comes_and_goes(flat: bool, tmp_path: Path) -> None:
    truth = run_ranks(RANKS, _save, str(tmp_path / "theirs"), flat)[0]
    source = open_checkpoint(tmp_path / "theirs")
    small = source.state()["optimizers"][0]["small"]
    tensors = source.tensors()
    for name, expected in truth.items():
        if name.endswith("/step"):
            assert small[name.split("/")[2]] == {"step": {"dtype": "float32", "value": 3.0}}
            continue
        fact = tensors[name]
        got = source.read(name, 0, fact.numel).reshape(fact.shape)
        assert torch.equal(got, expected) and got.dtype == expected.dtype, name
        for start in range(0, fact.numel, 3):
            count = min(5, fact.numel - start)
            assert torch.equal(source.read(name, start, count), expected.reshape(-1)[start : start + count]), name
    assert set(tensors) == {name for name in truth if not name.endswith("/step")}
    write_dcp(source, tmp_path / "ours", "torchtitan" if flat else "fsdp2")
    groups, loss = run_ranks(RANKS, _continued, "")[0]
    for found, again, next_loss in run_ranks(RANKS, _load, str(tmp_path / "ours"), flat):
        assert set(found) == set(truth)
        wrong = [name for name in truth if not torch.equal(found[name], truth[name])]
        assert not wrong
        assert again == groups
        assert next_loss == loss, "the next step is the one that would have followed"


class Tied(nn.Module):
    """Embedding and head share a weight; a buffer and an odd size beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embed(x)))) * self.scale[0]


def reference(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Tied()
    model.scale.fill_(float(seed))
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(path: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(99)
    model = Tied()
    session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(stage))  # type: ignore[arg-type]
    restored = session.checkpoints.load(path)
    assert restored is not None and restored.missing == () and restored.unexpected == ()
    state = session.module.state_dict()
    session.backward(session.module(torch.tensor([1, 2, 3])).sum())
    assert session.optimizer is not None
    session.optimizer.step()  # and it can be trained
    session.close()
    return state


RUNS = [(1, 2), (2, 3), (3, 1)]
QUICK = [(kind, *RUNS[number]) for number, kind in enumerate(("once", "twice", "torch"))]
CASES = [(kind, *run) for kind in ("once", "twice", "torch") for run in RUNS]


@pytest.mark.parametrize(("kind", "ranks", "stage"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_weights_of_others(tmp_path: Path, kind: str, ranks: int, stage: int) -> None:
    expected = reference(7)
    if kind == "torch":
        path = tmp_path / "model.pt"
        torch.save(expected, path)
    else:
        path = tmp_path / "model.safetensors"
        stored = {name: value.contiguous().clone() for name, value in expected.items()}
        if kind == "once":
            del stored["head.weight"]
        save_file(stored, str(path))
    for state in run_ranks(ranks, load, str(path), stage):
        assert_close(state, expected, 0.0, f"{kind} into stage {stage}")


def test_a_foreign_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wrong = reference(7)
    wrong["body.weight"] = torch.zeros(5, 6)
    del wrong["head.weight"]
    save_file(wrong, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"body\.weight.*\(5, 6\).*\(6, 6\)"):
        build_and_load(str(tmp_path))


def build_and_load(path: str) -> None:
    session = build(Tied(), None, zero(3))
    try:
        session.checkpoints.load(path)
    finally:
        session.close()
