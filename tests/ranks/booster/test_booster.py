"""The Booster on two ranks, end to end: every plugin against one plain process, and the printed examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import full
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.testing import run_ranks

RANKS = 2
SMALL = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 0.01}

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": functools.partial(TorchFSDPPlugin, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    "fsdp-grad-op": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp-no-shard": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp-hybrid": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "fsdp-offload": functools.partial(TorchFSDPPlugin, cpu_offload=CPUOffload(offload_params=True)),
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32", overlap_communication=False),
    "zero1-late": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32", overlap_allgather=True),
    "zero2-offload": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32", cpu_offload=True),
    "gemini": functools.partial(GeminiPlugin, precision="fp32", **SMALL),
    "gemini-half": functools.partial(GeminiPlugin, precision="fp32", shard_param_frac=0.5, max_prefetch=1, **SMALL),
    "gemini-replicas": functools.partial(GeminiPlugin, precision="fp32", extra_dp_size=2, **SMALL),
    "gemini-kept": functools.partial(
        GeminiPlugin, precision="fp32", chunk_config_dict={2: {"chunk_size": 64, "keep_gathered": True}}
    ),
    "gemini-offload": functools.partial(
        GeminiPlugin,
        precision="fp32",
        offload_optim_frac=0.5,
        offload_param_frac=0.5,
        chunk_config_dict={2: {"chunk_size": 40}},
    ),
}


class Net(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, hidden)
        self.tied = nn.Linear(hidden, hidden, bias=False)
        self.again = nn.Linear(hidden, hidden)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(hidden, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.tied(torch.tanh(self.first(inputs))))))
        output: torch.Tensor = self.last(hidden) + self.frozen
        return output


Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def start(make: Optimizers | None = None) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = Net()
    if make is not None:
        optimizer = make(model.parameters())
    else:
        first = list(model.first.parameters())
        rest = [p for p in model.parameters() if all(p is not f for f in first) and p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": first, "lr": 3e-2}, {"params": rest, "weight_decay": 0.1}], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def plain(steps: int, micro: int = 1, make: Optimizers | None = None) -> dict[str, torch.Tensor]:
    """The state after ``steps`` in one ordinary process over whole batches; ``micro`` backward passes a step."""
    model, optimizer, scheduler = start(make)
    for step in range(steps):
        for index in range(micro):
            inputs, targets = batch(step * micro + index)
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def mine(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch(step)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[share], targets[share]


class Run:
    """A boosted run with the calls that users make."""

    def __init__(self, plugin: Plugin, make: Optimizers | None = None) -> None:
        self.model, self.optimizer, self.scheduler = start(make)
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(  # type: ignore[assignment]
            self.model, self.optimizer, nn.MSELoss(), lr_scheduler=self.scheduler
        )

    def backward(self, step: int) -> None:
        inputs, targets = mine(step)
        self.booster.backward(self.criterion(self.model(inputs), targets), self.optimizer)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.finish()

    def save(self, folder: Path) -> None:
        self.booster.save_model(self.model, folder / "model.safetensors")
        self.booster.save_optimizer(self.optimizer, folder / "optimizer.safetensors")
        self.booster.save_lr_scheduler(self.scheduler, folder / "scheduler.json")

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, folder / "model.safetensors")
        self.booster.load_optimizer(self.optimizer, folder / "optimizer.safetensors")
        self.booster.load_lr_scheduler(self.scheduler, folder / "scheduler.json")


def assert_same(state: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


# -- training equals one process


def _parity(name: str) -> None:
    run = Run(PLUGINS[name]())
    run.steps(0, 4)
    assert_same(run.model.state_dict(), plain(4))


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "fsdp", "zero2", "zero1-late", "gemini", "gemini-offload"),
        *full("fsdp-grad-op", "fsdp-no-shard", "fsdp-hybrid", "fsdp-offload", "zero1", "zero2-offload"),
        *full("gemini-half", "gemini-replicas", "gemini-kept"),
    ],
)
def test_training_equals_one_process(name: str) -> None:
    run_ranks(RANKS, _parity, name)


def _accumulation(name: str) -> None:
    run = Run(PLUGINS[name]())
    for step in range(2):
        for index in range(3):
            run.backward(step * 3 + index)
        run.finish()
    assert_same(run.model.state_dict(), plain(2, micro=3))


@pytest.mark.parametrize("name", ["zero1", "gemini-half", *full("ddp", "fsdp", "zero2", "gemini")])
def test_several_backward_passes_add_up(name: str) -> None:
    run_ranks(RANKS, _accumulation, name)


def test_defect_2_kept_chunks_over_count_accumulated_gradients() -> None:
    run_ranks(RANKS, _accumulation, "gemini-kept")


def _no_sync(name: str, give: str) -> None:
    run = Run(PLUGINS[name]())
    for step in range(2):
        with run.booster.no_sync(**{give: getattr(run, give)}):
            run.backward(step * 3)
            run.backward(step * 3 + 1)
        run.backward(step * 3 + 2)
        run.finish()
    assert_same(run.model.state_dict(), plain(2, micro=3))


@pytest.mark.parametrize(
    ("name", "give"), [("fsdp", "model"), ("zero1", "optimizer"), *full(("ddp", "model"), ("zero1", "model"))]
)
def test_no_sync(name: str, give: str) -> None:
    run_ranks(RANKS, _no_sync, name, give)


def _no_sync_refused(name: str) -> None:
    run = Run(PLUGINS[name]())
    with pytest.raises(RuntimeError, match="accumulate by calling backward several times"):
        run.booster.no_sync(run.model, run.optimizer)


@pytest.mark.parametrize("name", ["zero2", *full("gemini")])
def test_no_sync_says_where_it_cannot_help(name: str) -> None:
    run_ranks(RANKS, _no_sync_refused, name)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
}


def _any_optimizer(name: str, optimizer: str) -> None:
    run = Run(PLUGINS[name](), OPTIMIZERS[optimizer])
    run.steps(0, 3)
    assert_same(run.model.state_dict(), plain(3, make=OPTIMIZERS[optimizer]))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("gemini", "adam"), ("zero2", "rmsprop")),
        *full(*(("gemini", name) for name in ("sgd", "rmsprop", "adagrad"))),
        *full(*(("zero2", name) for name in ("sgd", "adagrad", "adam"))),
    ],
)
def test_defect_16_any_torch_optimizer_works(name: str, optimizer: str) -> None:
    run_ranks(RANKS, _any_optimizer, name, optimizer)


# -- fp16

FP16: dict[str, Callable[..., Plugin]] = {
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2),
    "gemini": functools.partial(GeminiPlugin, **SMALL),
}
fp16 = pytest.mark.parametrize("name", ["zero2", *full("zero1", "gemini")])


def _linear(plugin: Plugin, lr: float = 1.0) -> tuple[Booster, nn.Linear, Any, Any]:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    booster = Booster(plugin=plugin)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    return booster, model, boosted, wrapped


def _update_norms(name: str) -> list[float]:
    booster, _, model, optimizer = _linear(FP16[name](initial_scale=16.0, growth_interval=2), lr=0.25)
    norms = []
    for _ in range(6):
        before = model.state_dict()["weight"]
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float((model.state_dict()["weight"] - before).norm()))
    return norms


@fp16
def test_defect_1_scaler_is_updated_before_unscaling(name: str) -> None:
    for norms in run_ranks(RANKS, _update_norms, name):
        assert norms == pytest.approx([0.5] * 6)


def _grad_norm(name: str, norm_type: float, max_norm: float) -> tuple[float, float]:
    plugin = FP16[name](initial_scale=64.0, max_norm=max_norm, norm_type=norm_type)
    booster, _, model, optimizer = _linear(plugin)
    inputs = torch.tensor([[1.0, 2.0, 2.0, 4.0]])
    before = model.state_dict()["weight"]
    booster.backward(model(inputs).sum(), optimizer)
    optimizer.step()
    return optimizer.get_grad_norm(), float((model.state_dict()["weight"] - before).abs().max())


@pytest.mark.parametrize(
    ("norm_type", "norm", "name"),
    [
        *((2.0, 5.0, "gemini"), (math.inf, 4.0, "zero1")),
        *full((2.0, 5.0, "zero1"), (2.0, 5.0, "zero2"), (math.inf, 4.0, "zero2"), (math.inf, 4.0, "gemini")),
        *full((1.0, 9.0, "zero1"), (1.0, 9.0, "zero2"), (1.0, 9.0, "gemini")),
    ],
)
def test_defect_11_get_grad_norm_is_unscaled(name: str, norm_type: float, norm: float) -> None:
    for found, update in run_ranks(RANKS, _grad_norm, name, norm_type, 0.0):
        assert (found, update) == pytest.approx((norm, 4.0))
    for found, update in run_ranks(RANKS, _grad_norm, name, norm_type, 1.0):  # the norm before clipping
        assert (found, update) == pytest.approx((norm, 4.0 / norm), rel=1e-5)


def _skipped_steps(given: dict[str, Any]) -> int:
    booster, _, model, optimizer = _linear(LowLevelZeroPlugin(**given), lr=1e-3)
    skipped = 0
    for _ in range(4):
        booster.backward(model(torch.full((2, 4), 0.1)).float().mean(), optimizer)
        optimizer.step()
        skipped += optimizer.last_step_skipped
    return skipped


def test_defect_9_default_scale_wastes_no_steps() -> None:
    assert run_ranks(RANKS, _skipped_steps, {}) == [0, 0]
    assert run_ranks(RANKS, _skipped_steps, {"initial_scale": 2**32}) == [4, 4]


def _scaler_resumes(name: str, folder: str) -> tuple[float, float]:
    files = Path(folder)
    booster, _, model, optimizer = _linear(FP16[name](initial_scale=16.0, growth_interval=1))
    for _ in range(3):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
    scale = optimizer.scaler.scale
    booster.save_optimizer(optimizer, files / "optimizer.safetensors")
    other, _, _, fresh = _linear(FP16[name](initial_scale=16.0, growth_interval=1))
    other.load_optimizer(fresh, files / "optimizer.safetensors")
    return scale, fresh.scaler.scale


@fp16
def test_defect_10_scaler_state_survives_a_resume(name: str, tmp_path: Path) -> None:
    assert run_ranks(RANKS, _scaler_resumes, name, str(tmp_path)) == [(128.0, 128.0)] * 2


def _ddp_precision(name: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    booster = Booster(mixed_precision=name, plugin=TorchDDPPlugin())
    boosted, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    losses = []
    for _ in range(5):
        inputs, targets = mine(0)
        output = boosted(inputs)
        assert output.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
        loss = criterion(output, targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.weight.flatten().tolist()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_defect_8_mixed_precision_strings_work_with_ddp(name: str) -> None:
    (first, weights), (second, same) = run_ranks(RANKS, _ddp_precision, name)
    assert first[-1] < first[0] and second[-1] < second[0]
    assert weights == same


# -- checkpoints


def _exchange(writer: str, reader: str, folder: str) -> None:
    run = Run(PLUGINS[writer]())
    run.steps(0, 2)
    run.save(Path(folder))
    torch.manual_seed(99)
    again = Run(PLUGINS[reader]())
    again.load(Path(folder))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("gemini", "fsdp"),
        *full(("ddp", "gemini"), ("fsdp", "zero2"), ("zero2", "zero1"), ("zero1", "ddp")),
    ],
)
def test_any_plugin_reads_what_another_wrote(writer: str, reader: str, tmp_path: Path) -> None:
    run_ranks(RANKS, _exchange, writer, reader, str(tmp_path))
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "scheduler.json",
    ]
    plain_model, optimizer, scheduler = start()
    booster = Booster()
    booster.load_model(plain_model, tmp_path / "model.safetensors")
    booster.load_optimizer(optimizer, tmp_path / "optimizer.safetensors")
    booster.load_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    assert_same(plain_model.state_dict(), plain(2))
    assert [group["lr"] for group in optimizer.param_groups] == [1.5e-2, 5e-3]


def _shape_mismatch(name: str, folder: str) -> str:
    run = Run(PLUGINS[name]())
    before = run.model.state_dict()
    other = Net(hidden=6)
    Booster().save_model(other, Path(folder) / "other.safetensors")
    with pytest.raises(ValueError) as error:
        run.booster.load_model(run.model, Path(folder) / "other.safetensors")
    assert_same(run.model.state_dict(), before, tolerance=0)
    return str(error.value)


@pytest.mark.parametrize("name", ["ddp", "zero1", *full("fsdp", "gemini")])
def test_defect_5_shape_mismatch_is_not_skipped(name: str, tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _shape_mismatch, name, str(tmp_path)):
        for line in (
            "first.weight: (6, 5) in the checkpoint, (7, 5)",
            "tied.weight",
            "again.bias",
            "last.weight",
        ):
            assert line in message
        assert "last.bias" not in message


def _another_boosters_optimizer(folder: str) -> None:
    run = Run(PLUGINS["zero2"]())
    run.steps(0, 1)
    other = Booster()
    other.save_optimizer(run.optimizer, Path(folder) / "optimizer.safetensors")
    other.load_optimizer(run.optimizer, Path(folder) / "optimizer.safetensors")
    run.steps(1, 3)
    assert_same(run.model.state_dict(), plain(3))


def test_another_booster_saves_and_loads_the_optimizer(tmp_path: Path) -> None:
    run_ranks(RANKS, _another_boosters_optimizer, str(tmp_path))


def _misfit_optimizer(name: str, folder: str) -> str:
    narrow = Net(hidden=6)
    Booster().save_optimizer(torch.optim.SGD(narrow.parameters(), lr=0.1), Path(folder) / "optimizer.safetensors")
    run = Run(PLUGINS[name](), OPTIMIZERS["sgd"])
    with pytest.raises(ValueError) as error:
        run.booster.load_optimizer(run.optimizer, Path(folder) / "optimizer.safetensors")
    return str(error.value)


@pytest.mark.parametrize("name", ["fsdp", *full("gemini")])
def test_an_optimizer_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _misfit_optimizer, name, str(tmp_path)):
        assert "shape (6, 5) in the checkpoint, (7, 5) in the optimizer" in message


def _failing_save(folder: str) -> tuple[str, str]:
    run = Run(PLUGINS["zero1"]())
    (Path(folder) / "file").touch()
    with pytest.raises(Exception) as error:
        run.booster.save_model(run.model, Path(folder) / "file" / "model.safetensors")
    run.steps(0, 1)  # the ranks are still in step
    return type(error.value).__name__, str(error.value)


def test_a_failure_of_rank_0_reaches_every_rank(tmp_path: Path) -> None:
    for kind, message in run_ranks(RANKS, _failing_save, str(tmp_path)):
        assert kind == "CheckpointError"
        assert "rank 0 could not save the model" in message and str(tmp_path / "file") in message
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def _missing_on_one_rank(folder: str) -> str:
    run = Run(PLUGINS["gemini"]())
    file = Path(folder) / f"{'here' if dist.get_rank() == 0 else 'missing'}.safetensors"
    run.booster.save_model(run.model, Path(folder) / "here.safetensors")
    with pytest.raises(Exception) as error:
        run.booster.load_model(run.model, file)
    return type(error.value).__name__


def test_a_file_that_one_rank_cannot_read_is_an_error_everywhere(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _missing_on_one_rank, str(tmp_path)) == ["CheckpointError"] * 2
