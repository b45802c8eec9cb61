"""The Trainer's flags and tools around a run: the summary, ``init_module``, tuning, ``sync_batchnorm``, precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning_cases import STOCK, THREE, Ended, check_same, ended, kinds, off, rows, strategy
from torch import Tensor, nn

from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import HIDDEN, OUT, WIDTH, Toy, close, data, toy, trainer, weights

RANKS = 2


@pytest.fixture(scope="module")
def oracle() -> Callable[..., list[Any]]:
    """What a task gives with the stock strategy, each computed once."""

    @cache
    def result(task: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(RANKS, task, STOCK, *args)

    return result


def told(action: Callable[[], Any]) -> list[str]:
    """The texts of warnings in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught]


# ---- the summary


class _Partly(Toy):
    """Its first layer is frozen."""

    def build(self) -> None:
        super().build()
        assert isinstance(self.net, nn.Sequential)
        self.net[0].requires_grad_(False)

    def configure_model(self) -> None:
        self.build()


Summary = tuple[list[str], list[int], int, int, float]


def _summaries(kind: str, where: str) -> tuple[list[Summary], list[Any]]:
    """What ``summarize`` finds when a run begins and within it, and what ``ModelSummary`` shows."""
    warnings.simplefilter("ignore")
    summarize = LIGHTNING.load("utilities.model_summary.summarize")
    seen: list[Summary] = []
    shown: list[Any] = []

    def look(module: Any) -> None:
        s = summarize(module, max_depth=2)
        seen.append((s.layer_names, s.param_nums, s.total_parameters, s.trainable_parameters, s.model_size))

    class Watch(LIGHTNING.load("callbacks.Callback")):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            look(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            look(pl_module)

        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            look(pl_module)

    class Shown(LIGHTNING.load("callbacks.ModelSummary")):  # type: ignore[misc]
        @staticmethod
        def summarize(*args: Any, **kwargs: Any) -> None:
            shown.append(args)

    model = toy(body=_Partly, where=where)
    made = trainer(strategy(kind), callbacks=[Watch(), Shown(max_depth=2)], enable_model_summary=True)
    made.fit(model, data(2))
    made.test(model, data(1), verbose=False)
    close(made)
    return seen, shown


@pytest.mark.parametrize("kind", kinds("colossalai"))
def test_model_summary_counts_whole_parameters(kind: str, oracle: Callable[..., list[Any]]) -> None:
    """Under the old strategies it counted shards. Also of a model that has no memory before it is sharded."""
    frozen, numel = WIDTH * HIDDEN + HIDDEN, HIDDEN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    for where in ("init", "configure_model"):
        found = run_ranks(RANKS, _summaries, kind, where)
        assert found == oracle(_summaries, where)
        (seen, shown), (_, other) = found
        assert len(seen) == 4 and len(shown) == 1 and other == [], "rank 0 shows it, once"
        for names, numels, total, trainable, size in seen:
            assert (names[0], numels[0], total, trainable) == ("net", frozen + numel, frozen + numel, numel)
            assert size == pytest.approx((frozen + numel) * 4e-6)


# ---- init_module


def _initialised(kind: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    plain = trainer(strategy(kind))
    plain.fit(toy(), data())
    plain.save_checkpoint(f"{folder}/one.ckpt")
    expected = ended(plain)
    torch.manual_seed(3)  # that of the model
    undrawn = torch.rand(1)
    found: dict[str, Any] = {}
    for empty in (None, False, True):
        made = trainer(strategy(kind))
        with made.init_module(empty_init=empty):
            model = toy()
            found[f"{empty}, nothing drawn"] = bool(torch.equal(torch.rand(1), undrawn))
        if empty:
            made.test(model, data(1), ckpt_path=f"{folder}/one.ckpt", verbose=False)
        else:
            made.fit(model, data())
        found[f"{empty}"] = off(Ended(weights(made), 0, 0.0, {}), expected)
        close(made)
    half = trainer(strategy(kind), precision="bf16-true")
    with half.init_module():
        model = toy()
    found["dtype"] = str(next(model.parameters()).dtype)
    half.fit(model, data())
    found["steps"] = half.global_step
    close(half)
    return found


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_init_module(kind: str, tmp_path: Any) -> None:
    """DeepSpeed refused ``empty_init=False`` at stage 3. Empty models are for checkpoints that fill them."""
    for found in run_ranks(RANKS, _initialised, kind, str(tmp_path)):
        assert [found[f"{empty}, nothing drawn"] for empty in (None, False, True)] == [False, False, True]
        assert [found[f"{empty}"] for empty in (None, False, True)] == [0.0, 0.0, 0.0]
        assert (found["dtype"], found["steps"]) == ("torch.bfloat16", 4)


# ---- the batch size


class _Sized(Toy):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return data(2, batch_size=self.batch_size)


def _tuned(kind: str) -> tuple[str, str, float]:
    warnings.simplefilter("ignore")
    model = toy(body=_Sized)
    with pytest.raises(ValueError) as by_tuner:
        LIGHTNING.load("tuner.Tuner")(trainer(strategy(kind))).scale_batch_size(model)
    finder = LIGHTNING.load("callbacks.BatchSizeFinder")()
    with pytest.raises(LIGHTNING.load("utilities.exceptions.MisconfigurationException")) as by_callback:
        trainer(strategy(kind), callbacks=[finder]).fit(model)
    assert model.batch_size == 2
    after = trainer(strategy(kind))
    after.fit(model)
    expected = trainer(strategy(STOCK))
    expected.fit(toy(body=_Sized))
    return str(by_tuner.value), str(by_callback.value), off(ended(after), ended(expected))


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_the_batch_size_finder_is_refused_with_its_reason(kind: str) -> None:
    """Lightning's own rule for every distributed strategy, ``ddp`` included."""
    for by_tuner, by_callback, difference in run_ranks(RANKS, _tuned, kind):
        assert "the batch size is currently not supported with distributed strategies" in by_tuner
        assert "The Batch size finder is not supported with distributed strategies" in by_callback
        assert difference <= 1e-6, "the model trains on as if nobody had asked"


# ---- sync_batchnorm


class _Normed(Toy):
    def build(self) -> None:
        super().build()
        assert isinstance(self.net, nn.Sequential)
        self.net[1] = nn.BatchNorm1d(HIDDEN)


class _OverRanks(torch.autograd.Function):
    """The mean over ranks, of values and of gradients."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return _OverRanks.forward(None, grad)


class _Together(nn.BatchNorm1d):
    """Over the batches of all ranks, with a collective in both passes, as torch's SyncBatchNorm has them."""

    def forward(self, inputs: Tensor) -> Tensor:
        mean = _OverRanks.apply(inputs.mean(0))
        variance = _OverRanks.apply((inputs - mean).square().mean(0))
        return (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def _as(kind: type[nn.BatchNorm1d], given: nn.BatchNorm1d) -> nn.BatchNorm1d:
    made = kind(HIDDEN)
    made.weight, made.bias = given.weight, given.bias
    return made


def _synchronised(kind: str, plugin: bool) -> tuple[Ended, bool]:
    class Sync(LIGHTNING.load("plugins.layer_sync.LayerSync")):  # type: ignore[misc]
        def apply(self, model: Any) -> Any:
            model.net[1] = _as(_Together, model.net[1])
            return model

        def revert(self, model: Any) -> Any:
            model.net[1] = _as(nn.BatchNorm1d, model.net[1])
            return model

    model = toy(body=_Normed, optimizer="sgd")  # Adam would make much of the last bit
    made = trainer(strategy(kind), max_epochs=2, plugins=[Sync()] if plugin else [])
    made.fit(model, data(3))
    return ended(made), type(model.net[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_layers_may_be_synchronised_by_a_plugin(kind: str, oracle: Callable[..., list[Any]]) -> None:
    """The way that ``sync_batchnorm`` takes on GPUs: layers with collectives in forward and in backward."""
    found, expected = run_ranks(RANKS, _synchronised, kind, True), oracle(_synchronised, True)
    check_same([one for one, _ in found], [one for one, _ in expected])
    assert all(reverted for _, reverted in found)
    alone, _ = oracle(_synchronised, False)[0]
    name = "net.0.weight"
    assert float((alone.weights[name] - found[0][0].weights[name]).abs().max()) > 1e-4, "the plugin has an effect"


@pytest.mark.parametrize("kind", kinds("colossalai"))
def test_buffers_are_each_ranks_own(kind: str, oracle: Callable[..., list[Any]]) -> None:
    """As under DeepSpeed and FairScale. ``ddp`` begins every forward with those of rank 0, which has the same here."""
    found, expected = run_ranks(RANKS, _synchronised, kind, False), oracle(_synchronised, False)
    (first, _), (second, _) = found
    assert off(first, expected[0][0]) <= 1e-6
    for name, value in second.weights.items():
        differs = float((value - first.weights[name]).abs().max())
        assert differs > 1e-2 if "running" in name else differs == 0.0, name


# ---- precision


FLOPS = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3}


def _throughput(kind: str, precision: str, **changes: Any) -> list[float]:
    warnings.simplefilter("ignore")
    seen: list[float] = []

    class Monitor(LIGHTNING.load("callbacks.ThroughputMonitor")):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.extend(each.available_flops for each in (self, *self._throughputs.values()))
            super().on_train_start(trainer, *args)

    with (
        mock.patch.object(LIGHTNING.load_fabric("utilities.throughput"), "get_available_flops", _flops),
        mock.patch.object(LIGHTNING.load("callbacks.throughput_monitor"), "get_available_flops", _flops),
    ):
        made = trainer(strategy(kind, **changes), precision=precision, callbacks=[Monitor(batch_size_fn=len)])
        made.fit(toy(), data(1), data(1))
        close(made)
    return seen


def _flops(device: torch.device, dtype: torch.dtype) -> int:
    return FLOPS[dtype]


FORMATS = (("32-true", 1), ("bf16-mixed", 2), ("64-true", 3))
MEASURED = [(kind, *case) for kind, case in zip(THREE, FORMATS, strict=True)]


@pytest.mark.parametrize(
    ("kind", "precision", "flops"), rows(((kind, *case) for kind in THREE for case in FORMATS), MEASURED[1:2], MEASURED)
)
def test_throughput_is_measured_against_what_the_dtype_can_do(kind: str, precision: str, flops: int) -> None:
    """Lightning looks the dtype up by the class of the precision plugin, and took every one of ours for fp32."""
    assert run_ranks(RANKS, _throughput, kind, precision) == [[flops] * 3] * RANKS


def _throughput_in_bf16() -> list[float]:
    return _throughput("fully_sharded", "32-true", compute_dtype=torch.bfloat16)


def test_throughput_follows_compute_dtype() -> None:
    assert run_ranks(RANKS, _throughput_in_bf16) == [[2] * 3] * RANKS
