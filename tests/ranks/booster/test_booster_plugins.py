"""The Booster's plugins in a run:

* the published examples run as printed, and ``prepare_dataloader`` splits the data;
* arguments of the torch plugins, and of the engine's plugins (``update="backward"``, ``verbose``, NVMe offload);
* BatchNorm on two ranks;
* FSDP shards on another device than their mesh's, as with ``cpu_offload``: clipping, saving, loading, repointing. The
  tests have no GPU, so the devices are swapped: the mesh is the CPU's with gloo, and the shards lie on a late device,
  whose tensors gloo cannot send.
"""

import contextlib
import copy
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.booster.plugin.base import ShardedPlugin, updates_early
from shardwise.booster.plugin.fsdp_state import TorchFSDPOptimizer, full_model_state, load_full_model_state, repoint
from shardwise.core.optim import HybridAdam
from shardwise.testing import RankPool, assert_close
from tests.support.booster_setup import batch
from tests.support.late import late_device
from tests.support.launching import printed
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full

GPU = torch.device("cuda", 0)
NORMS = [2.0, 1.0, math.inf]
SHAPES = [(5, 3), (1,), (4,)]
"""Shards of the first are unequal on two ranks; one of the ranks has an empty shard of the second."""


class Net(nn.Module):
    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(values)


def whole(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def away(value: torch.Tensor, replicas: bool) -> torch.Tensor:
    """Return a DTensor sharded over the CPU mesh, with its shards on the late device."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1) if replicas else (ranks,))
    placements = [Replicate(), Shard(0)] if replicas else [Shard(0)]
    return distribute_tensor(value, mesh, placements, src_data_rank=None).to(GPU)


def both(kind: type[torch.optim.Optimizer], replicas: bool) -> tuple[Net, Any, Net, Any]:
    """Return a plain model and its optimizer, and a sharded copy; both were stepped once before sharding."""
    plain, old = Net(whole(0)), Net(whole(0))
    ours, theirs = kind(plain.parameters(), lr=0.1), kind(old.parameters(), lr=0.1)  # type: ignore[call-arg]
    for model, optimizer in ((plain, ours), (old, theirs)):
        for parameter, gradient in zip(model.parameters(), whole(1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    sharded = Net([away(parameter.detach(), replicas) for parameter in old.parameters()])
    repoint(theirs, {id(p): name for name, p in old.named_parameters()}, dict(sharded.named_parameters()))
    return plain, ours, sharded, TorchFSDPOptimizer(theirs)


def run(kind: type[torch.optim.Optimizer], replicas: bool) -> None:
    with late_device(0):
        plain, ours, sharded, theirs = both(kind, replicas)
        held = [value for entry in theirs.state.values() for value in entry.values() if isinstance(value, DTensor)]
        assert held and all(value.device == GPU for value in held)
        for norm in NORMS:
            for parameter, gradient in zip(sharded.parameters(), whole(2), strict=True):
                parameter.grad = away(gradient, replicas)
            for parameter, gradient in zip(plain.parameters(), whole(2), strict=True):
                parameter.grad = gradient
            assert not theirs._all_zero()
            found = theirs.clip_grad_by_norm(0.5, norm)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
            assert float(found) == pytest.approx(float(expected), rel=1e-6)
            ours.step()
            theirs.step()
        for parameter in sharded.parameters():
            parameter.grad = away(torch.zeros(parameter.shape), replicas)
        assert theirs._all_zero()
        with pytest.raises(RuntimeError, match="non-finite"):
            next(sharded.parameters()).grad = away(torch.full(SHAPES[0], math.nan), replicas)
            theirs.clip_grad_by_norm(0.5, error_if_nonfinite=True)
        model, state = full_model_state(sharded, sharded.state_dict()), theirs.state_dict()
        expected_state = ours.state_dict()
        assert_close(model, plain.state_dict(), 1e-6, "parameters")
        for index, entry in expected_state["state"].items():
            assert_close(state["state"][index], entry, 1e-6, f"state of {index}")
        # Loading puts the values on the device of the shards.
        fresh = Net([away(value, replicas) for value in whole(7)])
        again = TorchFSDPOptimizer(kind(fresh.parameters(), lr=0.1))  # type: ignore[call-arg]
        load_full_model_state(fresh, model, strict=True)
        again.load_state_dict(state)
        assert all(p.device == GPU for p in fresh.parameters())
        assert_close(full_model_state(fresh, fresh.state_dict()), plain.state_dict(), 1e-6, "loaded parameters")
        for index, entry in expected_state["state"].items():
            assert_close(again.state_dict()["state"][index], entry, 1e-6, f"loaded state of {index}")
        again.step()


@pytest.mark.parametrize("replicas", [False, *full(True)], ids=["shards", "replicas"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, *full(torch.optim.Adagrad)])
def test_shards_away_from_their_mesh(own_pool: RankPool, kind: type[torch.optim.Optimizer], replicas: bool) -> None:
    """The ranks ran no backward pass yet: autograd starts its device threads at the first one."""
    assert own_pool.run(run, kind, replicas) == [None, None]


RANKS = 2
PRINTED = Path(__file__).parents[3] / "examples" / "booster_plugins"


def parts() -> tuple[nn.Module, TensorDataset, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    return model, dataset, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.MSELoss()


def epochs(booster: Booster, model: Any, optimizer: Any, train_dataloader: DataLoader[Any], criterion: Any) -> None:
    """Train after a printed example: the loss falls, and every rank has the same model."""
    losses = []
    for epoch in range(6):
        train_dataloader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, targets in train_dataloader:
            loss = criterion(model(inputs).float(), targets)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    batches = len(train_dataloader)
    mean = torch.stack([sum(losses[:batches]), sum(losses[-batches:])])  # of the first and last epoch
    dist.all_reduce(mean)
    assert mean[1] < mean[0]
    for value in model.state_dict().values():
        mine, first = value.float(), value.float().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first)


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["low_level_zero.py", "ddp.py", *full("gemini.py", "fsdp.py")])
def test_printed_examples_run_as_printed(name: str) -> None:
    shown, names = printed(PRINTED / name)
    epochs(*(names[part] for part in ("booster", "model", "optimizer", "train_dataloader", "criterion")))
    assert 0.5 < float(shown.removeprefix("loss ")) < 3.0  # four classes: a random guess has log(4) = 1.4


# -- data loaders and schedulers


def _divided(seed: int, drop_last: bool) -> list[list[int]]:
    """Return the rows that each rank's loader yields."""
    rows: Any = list(range(11))
    loader = LowLevelZeroPlugin().prepare_dataloader(rows, 2, shuffle=True, seed=seed, drop_last=drop_last)
    return everywhere([int(i) for batch in loader for i in batch])


@on_ranks(RANKS)
def test_seed_of_prepare_dataloader_shuffles() -> None:
    first, second = _divided(1, False)
    assert len(first) == len(second) == 6 and set(first) | set(second) == set(range(11))
    assert _divided(1, False) == [first, second] != _divided(2, False)
    first, second = _divided(1, True)
    assert len(first) == len(second) == 4 and not set(first) & set(second)


@on_ranks(RANKS)
@pytest.mark.parametrize(
    "make", [TorchDDPPlugin, *full(TorchFSDPPlugin), functools.partial(GeminiPlugin, precision="bf16")]
)
def test_a_scheduler_may_be_built_after_boost(make: Callable[[], Plugin]) -> None:
    model, _, optimizer, _ = parts()
    booster = Booster(plugin=make())
    model, optimizer, *_ = booster.boost(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.5e-3]


# -- arguments of the torch plugins


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


@on_ranks(RANKS)
def test_ddp_find_unused_parameters() -> None:
    for find in (True, False):
        model = PartlyUsed()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, optimizer, *_ = Booster(plugin=TorchDDPPlugin(find_unused_parameters=find)).boost(model, optimizer)
        optimizer.backward(boosted(torch.ones(1, 4)).sum())
        optimizer.step()
        if find:
            optimizer.backward(boosted(torch.ones(1, 4)).sum())
        else:
            raises(RuntimeError, "find_unused_parameters", boosted, torch.ones(1, 4))


@on_ranks(RANKS)
def test_fsdp_arguments() -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    # ignored modules are not sharded, and param groups do not change
    model, _, _, _ = parts()
    model[0].requires_grad_(False)
    groups = [{"params": [model[2].weight], "lr": 0.5}, {"params": [model[2].bias], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    booster = Booster(plugin=TorchFSDPPlugin(ignored_modules=[model[0]], auto_wrap_policy=policy))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    assert not isinstance(model[0].weight, DTensor) and isinstance(model[2].weight, DTensor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert optimizer.param_groups[0]["params"][0] is model[2].weight
    optimizer.backward(boosted(torch.ones(1, 4)).sum())
    whole = model[2].bias.grad.full_tensor()
    assert optimizer.clip_grad_by_norm(0.1) > 0.1
    optimizer.clip_grad_by_value(0.01)
    assert model[2].bias.grad.full_tensor().abs().max() <= 0.01 < whole.abs().max()
    optimizer.step()

    # all ranks have rank 0's values, bf16 compute, fp32 BatchNorm
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    own = model[0].weight.detach().clone()
    dist.broadcast(own, src=0)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = TorchFSDPPlugin(mixed_precision=mixed, sync_module_states=True, auto_wrap_policy=policy)
    boosted, *_ = Booster(plugin=plugin).boost(model)
    assert torch.equal(boosted.state_dict()["0.weight"], own)
    output = boosted(torch.randn(6, 4))
    assert output.dtype is torch.bfloat16 and model[1].running_mean.dtype is torch.float32
    output.sum().backward()
    assert model[1].weight.grad is not None

    # integer and fp64 buffers are not cast
    model = nn.Sequential(nn.Linear(4, 2))
    for name, dtype in (("whole", torch.int32), ("wide", torch.float64), ("single", torch.float32)):
        model.register_buffer(name, torch.zeros(1, dtype=dtype))
    Booster(plugin=TorchFSDPPlugin(mixed_precision=MixedPrecision(buffer_dtype=torch.float16))).boost(model)
    assert [each.dtype for each in model.buffers()] == [torch.int32, torch.float64, torch.float16]

    # param_init_fn initializes meta parameters
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def ones(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    boosted, optimizer, *_ = Booster(plugin=TorchFSDPPlugin(param_init_fn=ones)).boost(model, optimizer)
    assert boosted(torch.ones(1, 4)).tolist() == [[41.0, 41.0]]
    assert all(isinstance(parameter, DTensor) for parameter in optimizer.param_groups[0]["params"])


@on_ranks(RANKS)
def test_fsdp_process_groups() -> None:
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    hybrid = ShardingStrategy.HYBRID_SHARD
    for plugin, local in (
        (TorchFSDPPlugin(process_group=everyone), 4),
        (TorchFSDPPlugin(process_group=(everyone, alone), sharding_strategy=hybrid), 4),
        (TorchFSDPPlugin(process_group=(alone, everyone), sharding_strategy=hybrid), 8),
    ):
        model, *_ = parts()
        boosted, *_ = Booster(plugin=plugin).boost(model)
        assert model[0].weight.to_local().shape == (local, 4)
        boosted(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        gradient = model[2].weight.grad.full_tensor()
        first = gradient.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(gradient, first)
    assert plugin.data_parallel() == (dist.get_rank(), 2)
    assert TorchFSDPPlugin(process_group=alone).data_parallel() == (0, 1)


# -- updates during backward


CPU, EXAMPLES_GPU = torch.device("cpu"), torch.device("cuda")


def test_update_during_backward_needs_offloaded_state_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = LowLevelZeroPlugin(update="backward", precision="bf16")
    assert updates_early(plugin.plan(1), CPU) and not updates_early(plugin.plan(1), EXAMPLES_GPU)
    assert not updates_early(LowLevelZeroPlugin(cpu_offload=True).plan(1), EXAMPLES_GPU)
    for placed in (
        LowLevelZeroPlugin(update="backward", precision="bf16", cpu_offload=True),
        GeminiPlugin(update="backward", precision="bf16", offload_optim_frac=0.25),
        GeminiPlugin(update="backward", precision="bf16", placement_policy="auto"),
    ):
        assert updates_early(placed.plan(1), EXAMPLES_GPU)
    built = SimpleNamespace(module=nn.Linear(1, 1), optimizer=None, optimizers=())
    monkeypatch.setattr("shardwise.session.build", lambda *arguments, **names: built)
    vars(plugin)["_mesh"] = SimpleNamespace(size=1, device=EXAMPLES_GPU, mesh_group=SimpleNamespace(size=1))
    with pytest.warns(UserWarning, match="update='backward' updates nothing during backward.*on cuda") as caught:
        plugin.configure(nn.Linear(1, 1))
    assert len(caught) == 1


# -- verbose


SEARCHED = "chunk search: 121 elements a chunk (242 bytes of float16), chunks: 3, empty: 4 of 728 bytes (0.55%)"
SKIPPED = "step skipped: the gradient of 0.weight is not finite (loss scale 4.29497e+09)"


@on_ranks(RANKS)
@pytest.mark.parametrize(("kind", "lines"), [(LowLevelZeroPlugin, [SKIPPED]), (GeminiPlugin, [SEARCHED, SKIPPED])])
def test_verbose_prints_once(kind: type[ShardedPlugin], lines: list[str]) -> None:
    """Rank 0 prints each line once while a model is boosted and one step is skipped."""
    given = {"hidden_dim": 11, "min_chunk_size_m": 1e-4, "search_range_m": 1} if kind is GeminiPlugin else {}
    for verbose in (True, False):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            model = nn.Sequential(nn.Linear(10, 11), nn.Linear(11, 10), nn.Linear(10, 11))
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            booster = Booster(plugin=kind(initial_scale=2.0**32, verbose=verbose, **given))  # type: ignore[call-arg]
            boosted, optimizer, *_ = booster.boost(model, optimizer)
            booster.backward(boosted(torch.ones(1, 10)).float().sum(), optimizer)
            optimizer.step()
        assert optimizer.last_step_skipped
        assert said.getvalue().splitlines() == (lines if verbose and dist.get_rank() == 0 else [])


# -- sessions, as docs/booster.md describes them


@on_ranks(RANKS)
def test_session_of_a_boosted_model(tmp_path: Path) -> None:
    model = nn.Linear(4, 8)
    optimizer = HybridAdam(model.parameters(), lr=0.1, nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path))
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)  # type: ignore[assignment]
    session = plugin.session(boosted)
    assert session.module is boosted and session.optimizer is optimizer
    found = []
    for _ in range(2):
        session.reset_traffic()
        booster.backward(boosted(torch.ones(3, 4)).sum(), optimizer)
        optimizer.step()
        found.append(session.traffic())
    assert found[0]["reduce_scatter"] == found[1]["reduce_scatter"] > 0
    assert found[1]["disk_read"] > 0 and found[1]["disk_write"] > 0
    for other in (nn.Linear(1, 1), Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1))[0]):
        words = rf"session\({type(other).__name__}\): give the model that boost returned"
        raises(ValueError, words, plugin.session, other)


RTOL, STEPS, MICRO, MAX_NORM = 1e-6, 3, 2, 0.3
make_adam = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-2)


# -- BatchNorm. Parameters agree within RTOL in fp32, relative to the largest element of each tensor: with Adam's large
# epsilon, the rounding error of a gradient does not become a step of the full learning rate. No bias precedes a
# normalization, because its gradient would be rounding errors only.

NORM: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "ddp-own-buffers": functools.partial(TorchDDPPlugin, broadcast_buffers=False),
    "fsdp": TorchFSDPPlugin,
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "gemini": functools.partial(GeminiPlugin, precision="fp32", chunk_config_dict={RANKS: {"chunk_size": 30}}),
}


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def share(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch(step)
    return inputs[rank::RANKS] * (rank + 1), targets[rank::RANKS]


def each_with_its_own(broadcast: bool) -> list[dict[str, torch.Tensor]]:
    """Train one copy per rank in one process: each normalizes over its own batch, all apply the mean gradient."""
    copies = [net() for _ in range(RANKS)]
    optimizers = [make_adam(model.parameters()) for model in copies]
    for step in range(STEPS):
        for rank, model in enumerate(copies):
            if rank == 0:
                before = copy.deepcopy(list(model.buffers()))
            elif broadcast:
                for mine, first in zip(model.buffers(), before, strict=True):
                    mine.copy_(first)
            inputs, targets = share(step, rank)
            nn.functional.mse_loss(model(inputs), targets).backward()
        for several in zip(*(model.parameters() for model in copies), strict=True):
            mean = torch.stack([parameter.grad for parameter in several]).mean(0)  # type: ignore[misc]
            for parameter in several:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [dict(model.state_dict()) for model in copies]


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["ddp", "ddp-own-buffers", "zero2", *full("fsdp", "zero1", "gemini")])
def test_each_rank_normalizes_over_its_own_batch(name: str, tmp_path: Path) -> None:
    """Parameters, and the buffers of each rank, equal the reference."""
    expected = each_with_its_own(broadcast=name == "ddp")
    assert not torch.equal(expected[0]["1.running_mean"], expected[1]["1.running_mean"])
    model = net()
    booster = Booster(plugin=NORM[name]())
    boosted, optimizer, criterion, *_ = booster.boost(model, make_adam(model.parameters()), nn.MSELoss())
    for step in range(STEPS):
        inputs, targets = share(step, dist.get_rank())
        booster.backward(criterion(boosted(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(boosted, tmp_path / "model.safetensors")
    found = dict(boosted.state_dict()) | dict(model.named_buffers())
    found = {key.removeprefix("module."): value for key, value in found.items()}
    assert_close(found, expected[dist.get_rank()], RTOL, "this rank's")
    dist.barrier()
    assert_close(load_file(tmp_path / "model.safetensors"), expected[0], RTOL, "the file has rank 0's buffers")
