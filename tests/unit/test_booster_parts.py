"""The Booster without other ranks: argument orders, autocast and its scaler, data loaders."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shardwise.booster import BF16MixedPrecision, Booster, FP16TorchMixedPrecision
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin


@pytest.mark.parametrize("name", ["fp16_apex", "fp16_naive", "fp8"])
def test_defect_8_unbuildable_mixed_precision_names_its_replacement(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}.*use mixed_precision="):
        Booster(mixed_precision=name)


def test_defect_8_mixed_precision_strings() -> None:
    assert isinstance(Booster(mixed_precision="bf16").mixed_precision, BF16MixedPrecision)
    assert isinstance(Booster(mixed_precision="fp16").mixed_precision, FP16TorchMixedPrecision)
    own = FP16TorchMixedPrecision(init_scale=4.0)
    assert Booster(mixed_precision=own).mixed_precision is own
    with pytest.raises(ValueError, match="fp64"):
        Booster(mixed_precision="fp64")
    with pytest.raises(TypeError, match="mixed_precision=3"):
        Booster(mixed_precision=3)  # type: ignore[arg-type]


def test_arguments_that_a_plugin_overrules_are_said() -> None:
    with pytest.warns(UserWarning, match="device='cpu' has no effect"):
        assert Booster(device="cpu", plugin=TorchDDPPlugin()).device is None
    with pytest.warns(UserWarning, match="mixed_precision has no effect"):
        assert Booster(mixed_precision="bf16", plugin=GeminiPlugin()).mixed_precision is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Booster(mixed_precision="bf16", plugin=TorchDDPPlugin()).mixed_precision is not None
    with pytest.raises(TypeError, match="plugin="):
        Booster(plugin=LowLevelZeroPlugin)  # type: ignore[arg-type]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(torch.randn(6, 4), torch.randn(6, 2)), 3), nn.MSELoss()


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
    with pytest.raises(TypeError, match="model="):
        booster.boost("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer="):
        booster.boost(model, criterion)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, "bf16", "fp16"])
def test_pluginless_training(name: str | None) -> None:
    model, optimizer, dataloader, criterion = parts()
    booster = Booster(mixed_precision=name)
    model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses = []
    for _ in range(4):
        for inputs, targets in dataloader:
            output = model(inputs)
            if name is not None:
                assert output.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
            loss = criterion(output, targets.to(output.dtype))
            with booster.no_sync(model):
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        scheduler.step()
    assert losses[-2] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)
    assert next(model.parameters()).dtype is torch.float32


def fp16_steps(growth_interval: int, steps: int = 6) -> list[float]:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    booster = Booster(mixed_precision=FP16TorchMixedPrecision(init_scale=8.0, growth_interval=growth_interval))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    updates = []
    for _ in range(steps):
        before = model.weight.detach().clone()
        booster.backward(boosted(torch.ones(1, 3)).sum(), wrapped)
        assert wrapped.clip_grad_by_norm(1e9) == pytest.approx(math.sqrt(3))  # defect 11: the true norm
        assert wrapped.get_grad_norm() == pytest.approx(math.sqrt(3))
        wrapped.step()
        wrapped.zero_grad()
        updates.append(float((model.weight.detach() - before).norm()))
    return updates


def test_defect_1_scaler_changes_after_unscaling() -> None:
    assert fp16_steps(growth_interval=2) == pytest.approx([math.sqrt(3)] * 6)


def test_fp16_skips_a_step_that_is_not_finite() -> None:
    model, optimizer, _, _ = parts()
    boosted, wrapped, *_ = Booster(mixed_precision="fp16").boost(model, optimizer)
    before = model.weight.detach().clone()
    wrapped.backward(boosted(torch.full((1, 4), 1e4)).sum() * 1e4)
    wrapped.step()
    assert wrapped.last_step_skipped and torch.equal(model.weight, before)
    assert wrapped.scaler.get_scale() == 2.0**15
    with pytest.raises(ValueError, match="closure"):
        wrapped.step(lambda: 0.0)


def test_what_is_not_there_says_so() -> None:
    booster = Booster()
    model, optimizer, _, criterion = parts()
    with pytest.raises(NotImplementedError, match="HybridParallelPlugin"):
        booster.execute_pipeline(iter([]), model, criterion)
    with pytest.raises(NotImplementedError, match="enable_lora"):
        booster.enable_lora(model)
    with pytest.raises(NotImplementedError, match="shard=True"):
        booster.save_model(model, "m.safetensors", shard=True)
    with pytest.raises(NotImplementedError, match="gather_dtensor"):
        booster.save_optimizer(optimizer, "o.safetensors", gather_dtensor=False)
    with pytest.raises(NotImplementedError, match="add_lora"):
        LowLevelZeroPlugin().add_lora_params_to_optimizer(model, optimizer)
    with pytest.raises(TypeError, match="boost returned"):
        booster.backward(torch.zeros(()), optimizer)


# -- data loaders


def order(loader: DataLoader[Any]) -> list[int]:
    return [int(i) for batch in loader for i in batch]


def test_defect_13_seed_reaches_the_shuffling() -> None:
    plugin = TorchDDPPlugin()
    data = list(range(20))
    first, same, other = (order(plugin.prepare_dataloader(data, 4, shuffle=True, seed=s)) for s in (1, 1, 2))  # type: ignore[arg-type]
    assert first == same != other and sorted(first) == sorted(other) == data
    loader = plugin.prepare_train_dataloader(data, batch_size=4, shuffle=True, seed=1)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert order(loader) != first


def test_dataloader_arguments_reach_their_places() -> None:
    plugin = GeminiPlugin()
    loader = plugin.prepare_dataloader(list(range(10)), 4, drop_last=True, timeout=0)  # type: ignore[arg-type]
    assert loader.drop_last and loader.sampler.drop_last and len(loader) == 2  # type: ignore[attr-defined]

    class Reversed(DistributedSampler[int]):
        def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool) -> None:
            super().__init__(dataset, num_replicas, rank, shuffle)

    with pytest.warns(UserWarning, match="no drop_last"):
        loader = plugin.prepare_dataloader([1, 2], 1, drop_last=True, distributed_sampler_cls=Reversed)  # type: ignore[arg-type]
    assert isinstance(loader.sampler, Reversed)
    with pytest.raises(ValueError, match="batch_sampler"):
        plugin.prepare_dataloader([1], 1, batch_sampler=[[0]])  # type: ignore[arg-type]

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(TypeError, match="Stream has no length"):
        plugin.prepare_dataloader(Stream(), 1)


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_repeat_a_run_but_not_an_epoch() -> None:
    def run() -> list[torch.Tensor]:
        loader = TorchDDPPlugin().prepare_dataloader(Noise(), 4, seed=3, num_workers=1)
        return [batch for _ in range(2) for batch in loader]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)


@pytest.mark.parametrize(
    "plugin",
    [
        TorchDDPPlugin(),
        LowLevelZeroPlugin(stage=1, precision="fp32"),
        LowLevelZeroPlugin(stage=2, precision="bf16"),
        GeminiPlugin(precision="fp32", min_chunk_size_m=1e-4, hidden_dim=8, search_range_m=1),
        GeminiPlugin(),
    ],
    ids=["ddp", "zero1", "zero2", "gemini", "gemini-fp16"],
)
def test_plugins_work_in_one_process_without_a_launcher(plugin: Plugin) -> None:
    model, optimizer, dataloader, criterion = parts()
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
    losses = []
    for _ in range(3):
        for inputs, targets in dataloader:
            output = model(inputs)
            loss = criterion(output.float(), targets)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-2] < losses[0]
