"""Tests of the Booster in one process: ``boost``, mixed precision, tiers of the plans, data loaders, the fp16
scaler.
"""

import contextlib
import math
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shardwise.booster import BF16MixedPrecision, Booster, FP16TorchMixedPrecision
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.booster.plugin.base import ShardedPlugin, with_optimizer
from shardwise.core.memory.trace.stats import MemStats, Moment
from shardwise.plan import DiskPlan, Plan, zero
from tests.support.on_ranks import raises


@pytest.mark.parametrize("name", ["fp16_apex", "fp16_naive", "fp8"])
def test_defect_8_unbuildable_mixed_precision_names_its_replacement(name: str) -> None:
    raises(NotImplementedError, f"{name}.*use mixed_precision=", lambda: Booster(mixed_precision=name))


def test_defect_8_mixed_precision_strings() -> None:
    assert isinstance(Booster(mixed_precision="bf16").mixed_precision, BF16MixedPrecision)
    assert isinstance(Booster(mixed_precision="fp16").mixed_precision, FP16TorchMixedPrecision)
    own = FP16TorchMixedPrecision(init_scale=4.0)
    assert Booster(mixed_precision=own).mixed_precision is own
    raises(ValueError, "fp64", lambda: Booster(mixed_precision="fp64"))


def test_arguments_that_a_plugin_overrides_warn() -> None:
    with pytest.warns(UserWarning, match="device='cpu' has no effect"):
        assert Booster(device="cpu", plugin=TorchDDPPlugin()).device is None
    with pytest.warns(UserWarning, match="mixed_precision has no effect"):
        assert Booster(mixed_precision="bf16", plugin=GeminiPlugin()).mixed_precision is None
    with warnings.catch_warnings(action="error"):
        assert Booster(mixed_precision="bf16", plugin=TorchDDPPlugin()).mixed_precision is not None
    raises(TypeError, "plugin=", lambda: Booster(plugin=LowLevelZeroPlugin))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(torch.randn(6, 4), torch.randn(6, 2)), 3), nn.MSELoss()


HOST: dict[str, Any] = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}
SMALL: dict[str, Any] = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 1}


def test_defect_15_boost_returns_what_the_examples_unpack() -> None:
    model, optimizer, dataloader, criterion = parts()
    booster = Booster()
    a, b, c, d = booster.boost(model, optimizer, dataloader, criterion)
    assert (a, b.optim, c, d) == (model, optimizer, dataloader, criterion)
    a, b, c, d, e = booster.boost(model, optimizer, criterion, dataloader)
    assert (a, b.optim, c, d, e) == (model, optimizer, criterion, dataloader, None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert booster.boost(model, optimizer, dataloader, criterion, scheduler)[2:] == (dataloader, criterion, scheduler)
    assert booster.boost(model) == (model, None, None, None, None)
    batches = list(dataloader)
    assert booster.boost(model, optimizer, batches, criterion)[2:] == (batches, criterion)
    assert booster.boost(model, optimizer, criterion=criterion)[2:] == (criterion, None, None)
    raises(TypeError, "model=", lambda: booster.boost("model"))
    raises(TypeError, "optimizer=", lambda: booster.boost(model, criterion))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float32),
        ({"mixed_precision": "bf16"}, torch.bfloat16),
        ({"mixed_precision": "fp16"}, torch.float16),
        ({"plugin": TorchDDPPlugin()}, torch.float32),
        ({"plugin": GeminiPlugin(precision="fp32", **SMALL)}, torch.float32),
        ({"plugin": LowLevelZeroPlugin(2, "bf16", cpu_offload=True, master_weights=False)}, torch.bfloat16),
        ({"plugin": GeminiPlugin(precision="bf16", **HOST, device_memory="64KiB")}, torch.bfloat16),
        ({"plugin": HybridParallelPlugin(tp_size=1, pp_size=1)}, torch.float16),
    ],
    ids=["none", "bf16", "fp16", "ddp", "gemini", "zero2-offload", "gemini-offload", "hybrid"],
)
def test_training_in_one_process_without_a_launcher(given: dict[str, Any], dtype: torch.dtype) -> None:
    model, optimizer, dataloader, criterion = parts()
    booster = Booster(**given)
    model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses = []
    for _ in range(4):
        for inputs, targets in dataloader:
            output = model(inputs)
            assert output.dtype is dtype
            loss = criterion(output.float(), targets)
            with contextlib.nullcontext() if "plugin" in given else booster.no_sync(model):
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        scheduler.step()
    assert losses[-2] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)
    assert "plugin" in given or next(model.parameters()).dtype is torch.float32


def test_unavailable_methods_raise() -> None:
    booster = Booster()
    model, optimizer, _, criterion = parts()
    raises(NotImplementedError, "HybridParallelPlugin", lambda: booster.execute_pipeline(iter([]), model, criterion))
    raises(ValueError, "enable_lora first", lambda: LowLevelZeroPlugin().add_lora_params_to_optimizer(model, optimizer))
    raises(TypeError, "boost returned", lambda: booster.backward(torch.zeros(()), optimizer))


# -- tiers

STATS = MemStats([Moment(0, "a", "forward", 10, 5)], "cpu")
KEPT: dict[str, Any] = {"chunk_config_dict": {4: {"chunk_size": 8, "keep_gathered": True}}}
AUTO, LATE = {"placement_policy": "auto"}, {"enable_async_reduce": False}
STATIC_ONLY = {"shard_param_frac": 0.0, "offload_optim_frac": 0.5, "offload_param_frac": 0.25}


def gemini_plan(**given: Any) -> Plan:
    with warnings.catch_warnings(action="error"):
        return GeminiPlugin(**given).plan(4)


@pytest.mark.parametrize(
    ("given", "named", "reason", "same_as"),
    [
        ({"memstats": STATS, "gpu_margin_mem_ratio": 0.5}, ["memstats", "gpu_margin_mem_ratio"], "'auto' only", {}),
        (AUTO | STATIC_ONLY, [f"{name}={value}" for name, value in STATIC_ONLY.items()], "'static' only", AUTO),
        (AUTO | KEPT, ["chunk_config_dict"], "'auto' decides", AUTO | {"chunk_config_dict": {4: {"chunk_size": 8}}}),
        ({"max_prefetch": 4, **LATE}, ["max_prefetch=4"], "ahead with enable_async_reduce=False", LATE),
        ({"max_prefetch": 4, "shard_param_frac": 0.0}, ["max_prefetch=4"], "stay gathered", {"shard_param_frac": 0.0}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_arguments_without_effect_warn_once(given: Any, named: list[str], reason: str, same_as: Any) -> None:
    with pytest.warns(UserWarning, match=reason) as caught:
        plan = GeminiPlugin(**given).plan(4)
    assert plan == gemini_plan(**same_as)
    assert [warning.filename for warning in caught] == [__file__]
    message = str(caught[0].message)
    assert "without effect" in message and all(name in message for name in named)


def test_pin_memory_without_offload_warns() -> None:
    with pytest.warns(UserWarning, match="pin_memory=True without effect: nothing is offloaded"):
        plan = GeminiPlugin(pin_memory=True, enable_async_reduce=False).plan(4)
    assert plan == gemini_plan(enable_async_reduce=False).but(pin_memory=True)


def test_old_placement_policies_name_their_replacement() -> None:
    host = r"offload_optim_frac=1\.0, offload_param_frac=1\.0"
    for old, now in (("cuda", "'static' as it is"), ("cpu", host), ("const", "'auto'$")):
        raises(ValueError, f"placement_policy='{old}'.*{now}", GeminiPlugin, placement_policy=old)


@pytest.mark.parametrize(
    ("wanted", "run", "given", "fits"),
    [
        ("cuda", "cuda:1", {}, True),
        ("cuda", "cpu", {}, False),
        ("cpu", "cuda", {"offload_optim_frac": 1.0}, False),
        ("cpu", "cuda", {"offload_param_frac": 0.5}, True),
    ],
)
def test_chunk_init_device_must_match_the_chunks(wanted: str, run: str, given: dict[str, Any], fits: bool) -> None:
    plugin = GeminiPlugin(chunk_init_device=torch.device(wanted), **given)
    refusal = f"chunk_init_device.*{wanted}.*kept, here on {run}"
    with contextlib.nullcontext() if fits else pytest.raises(NotImplementedError, match=refusal):
        plugin.check_device(torch.device(run))


class DiskSGD(torch.optim.SGD):
    """An optimizer with the attributes by which our Adams ask for NVMe offload."""

    def __init__(self, fraction: float, directory: Any = None) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.nvme_offload_fraction, self.nvme_offload_dir = fraction, directory

    def take_offload(self) -> None:
        self.nvme_offload_fraction = 0.0


@pytest.mark.parametrize(("host", "fraction"), [(0.0, 1.0), (0.25, 0.5), (1.0, 0.1)])
def test_optimizer_with_nvme_offload_changes_the_plan(host: float, fraction: float) -> None:
    plan = zero(3).but(state_host_fraction=host, param_host_fraction=0.5)
    shares = {"state_host_fraction": min(host, 1.0 - fraction), "state_disk_fraction": fraction}
    expected = plan.but(disk=DiskPlan(directory="/nvme"), **shares, pin_memory=True)
    for folder in ("/nvme", Path("/nvme")):
        assert with_optimizer(plan, DiskSGD(fraction, folder)) == expected


def test_optimizer_without_offload_keeps_the_plan() -> None:
    plan = zero(3).but(state_host_fraction=0.5)
    auto = GeminiPlugin(**AUTO).plan(1)
    for optimizer in (None, torch.optim.SGD([torch.zeros(1)], lr=1.0), DiskSGD(0.0, "/nvme")):
        assert with_optimizer(plan, optimizer) is plan and with_optimizer(auto, optimizer) is auto


def test_nvme_offload_defaults_and_errors() -> None:
    plan = zero(2).but(overlap=False)
    tiers = with_optimizer(plan, DiskSGD(1.0)).tiers
    assert tiers.disk == DiskPlan(directory=tempfile.gettempdir()) and not tiers.pin_memory
    assert with_optimizer(plan.but(pin_memory=True), DiskSGD(1.0)).tiers.pin_memory
    for wrong in (1.5, -0.5, math.nan):
        raises(ValueError, f"DiskSGD's nvme_offload_fraction={wrong}", with_optimizer, plan, DiskSGD(wrong))
    refusal, auto = r"nvme_offload_fraction=1\.0.*placement_policy='static'", GeminiPlugin(**AUTO).plan(1)
    raises(NotImplementedError, refusal, with_optimizer, auto, DiskSGD(1.0))


def asked(monkeypatch: pytest.MonkeyPatch, plugin: ShardedPlugin, optimizer: Any) -> tuple[Plan, list[MemStats]]:
    """Return the plan that the engine gets from ``boost``, and the memory traces."""
    plans: list[Plan] = []
    traces: list[MemStats] = []

    def build(model: nn.Module, optimizer: Any, plan: Plan, mesh: Any, names: object) -> Any:
        plans.append(plan)
        return SimpleNamespace(
            module=model, optimizer=optimizer, optimizers=(), use_memory_stats=traces.append, checkpoints=plugin
        )

    monkeypatch.setattr("shardwise.session.build", build)
    Booster(plugin=plugin).boost(nn.Linear(1, 1), optimizer)
    (plan,) = plans
    return plan, traces


@pytest.mark.parametrize("plugin", [LowLevelZeroPlugin(cpu_offload=True), GeminiPlugin(offload_optim_frac=0.75)])
def test_boost_uses_the_offload_of_the_optimizer(monkeypatch: pytest.MonkeyPatch, plugin: ShardedPlugin) -> None:
    optimizer = DiskSGD(0.5, "/nvme")
    expected = with_optimizer(plugin.plan(1), optimizer)
    plan, traces = asked(monkeypatch, plugin, optimizer)
    assert plan == expected != plugin.plan(1) and traces == []
    assert optimizer.nvme_offload_fraction == 0.0  # the optimizer itself no longer offloads
    assert (plan.tiers.state_host_fraction, plan.tiers.state_disk_fraction) == (0.5, 0.5)


def test_memstats_reach_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    STATS.save(path)
    for given in (STATS, path, str(path)):
        plan, traces = asked(monkeypatch, GeminiPlugin(**AUTO, memstats=given), None)
        assert plan == gemini_plan(**AUTO) and traces == [STATS]
    assert asked(monkeypatch, GeminiPlugin(**AUTO), None)[1] == []
    with pytest.warns(UserWarning, match="memstats"):
        static = GeminiPlugin(memstats=path)
    assert asked(monkeypatch, static, None)[1] == []


def test_invalid_memstats(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    raises(TypeError, r"memstats=\[1\]", GeminiPlugin, **AUTO, memstats=[1])
    raises(FileNotFoundError, "nowhere", GeminiPlugin, **AUTO, memstats=tmp_path / "nowhere")
    raises(ValueError, r"other.*not a memory trace", GeminiPlugin, **AUTO, memstats=tmp_path / "other")


# -- data loaders


def order(loader: DataLoader[Any]) -> list[int]:
    return [int(i) for batch in loader for i in batch]


def test_defect_13_seed_changes_the_shuffling() -> None:
    plugin = TorchDDPPlugin()
    data = list(range(20))
    first, same, other = (order(plugin.prepare_dataloader(data, 4, shuffle=True, seed=s)) for s in (1, 1, 2))  # type: ignore[arg-type]
    assert first == same != other and sorted(first) == sorted(other) == data
    loader = plugin.prepare_train_dataloader(data, batch_size=4, shuffle=True, seed=1)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert order(loader) != first


def test_dataloader_arguments() -> None:
    plugin = GeminiPlugin()
    loader = plugin.prepare_dataloader(list(range(10)), 4, drop_last=True, timeout=0)  # type: ignore[arg-type]
    assert loader.drop_last and loader.sampler.drop_last and len(loader) == 2  # type: ignore[attr-defined]

    class Reversed(DistributedSampler[int]):
        def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool) -> None:
            super().__init__(dataset, num_replicas, rank, shuffle)

    with pytest.warns(UserWarning, match="no drop_last"):
        loader = plugin.prepare_dataloader([1, 2], 1, drop_last=True, distributed_sampler_cls=Reversed)  # type: ignore[arg-type]
    assert isinstance(loader.sampler, Reversed)
    raises(ValueError, "batch_sampler", lambda: plugin.prepare_dataloader([1], 1, batch_sampler=[[0]]))

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

    raises(TypeError, "Stream has no length", lambda: plugin.prepare_dataloader(Stream(), 1))


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_seeded_workers_repeat_runs_but_not_epochs() -> None:
    def run() -> list[torch.Tensor]:
        loader = TorchDDPPlugin().prepare_dataloader(Noise(), 4, seed=3, num_workers=1)
        return [batch for _ in range(2) for batch in loader]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)


def scaled(width: int, lr: float, **scale: float) -> tuple[Booster, nn.Linear, Any, Any]:
    """Return a booster, a linear map to one number with weights of 1, and the boosted model and optimizer."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.ones_(model.weight)
    booster = Booster(mixed_precision=FP16TorchMixedPrecision(**scale))  # type: ignore[arg-type]
    boosted, wrapped, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr))
    return booster, model, boosted, wrapped


def test_defect_1_scale_is_updated_after_unscaling() -> None:
    booster, model, boosted, wrapped = scaled(3, 1.0, init_scale=8.0, growth_interval=2)
    for _ in range(6):
        before = model.weight.detach().clone()
        booster.backward(boosted(torch.ones(1, 3)).sum(), wrapped)
        assert wrapped.clip_grad_by_norm(1e9) == pytest.approx(math.sqrt(3))  # the unscaled norm (defect 11)
        assert wrapped.get_grad_norm() == pytest.approx(math.sqrt(3))
        wrapped.step()
        wrapped.zero_grad()
        assert float((model.weight.detach() - before).norm()) == pytest.approx(math.sqrt(3))


def test_fp16_skips_a_step_that_is_not_finite() -> None:
    model, optimizer, *_ = parts()
    boosted, wrapped, *_ = Booster(mixed_precision="fp16").boost(model, optimizer)
    before = model.weight.detach().clone()
    wrapped.backward(boosted(torch.full((1, 4), 1e4)).sum() * 1e4)
    wrapped.step()
    assert wrapped.last_step_skipped and torch.equal(model.weight, before)
    assert wrapped.scaler.get_scale() == 2.0**15
    raises(ValueError, "closure", lambda: wrapped.step(lambda: 0.0))


def spiking(dropped: str) -> tuple[list[float], float]:
    """Return the gradients of the steps that are not dropped, and the final loss scale."""
    booster, model, boosted, wrapped = scaled(2, 0.0, init_scale=2.0**10, growth_interval=1000)
    seen = []
    for size in (1.0, 20.0, 2.0, 1e4, 3.0, 0.5):
        booster.backward(boosted(torch.full((1, 2), size)).sum() * (1e4 if size == 1e4 else 1.0), wrapped)
        norm = wrapped.clip_grad_by_norm(1e9)
        if not norm < 25.0:
            to_zero = dropped == "model, to zero"
            (wrapped if dropped == "optimizer" else model).zero_grad(set_to_none=not to_zero)
            continue
        assert model.weight.grad is not None
        seen += model.weight.grad[0].tolist()
        wrapped.step()
        assert not wrapped.last_step_skipped
        wrapped.zero_grad()
    return seen, wrapped.scaler.get_scale()


@pytest.mark.parametrize("dropped", ["optimizer", "model", "model, to zero"])
def test_fp16_gradients_dropped_after_clipping(dropped: str) -> None:
    # The one overflow lowers the scale although its step is dropped.
    assert spiking(dropped) == ([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 0.5, 0.5], 2.0**9)
