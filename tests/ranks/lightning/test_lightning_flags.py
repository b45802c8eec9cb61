"""Trainer flags and tools: the model summary, ``init_module``, throughput, precision, and ``weights_only``.

Each test is about a fault of the old strategies, or of using one in Lightning, that no other test would detect.
"""

import pickle
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning_cases import STOCK, THREE, TWO, Partly, ended, kinds, rows, strategy

from shardwise.strategies.lightning_packages import LIGHTNING
from tests.support.lightning_setup import HIDDEN, OUT, WIDTH, Toy, close, data, fit, since, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks

RANKS = 2


# ---- the summary


class _Partly(Partly):
    def configure_model(self) -> None:
        self.build()


Summary = tuple[list[str], list[int], int, int, float]


def _summaries(kind: str, where: str) -> tuple[list[Summary], list[Any]]:
    """Return what ``summarize`` reports at the start of a run and within it, and what ``ModelSummary`` shows."""
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


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("colossalai"))
def test_model_summary_counts_unsharded_parameters(kind: str) -> None:
    """Under the old strategies it counted shards. A model on the meta device is counted, too."""
    frozen, numel = WIDTH * HIDDEN + HIDDEN, HIDDEN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    for where in ("init", "configure_model"):
        seen, shown = found = _summaries(kind, where)
        assert found == _summaries(STOCK, where)
        assert len(seen) == 4 and len(shown) == (dist.get_rank() == 0), "rank 0 shows it, once"
        for names, numels, total, trainable, size in seen:
            assert (names[0], numels[0], total, trainable) == ("net", frozen + numel, frozen + numel, numel)
            assert size == pytest.approx((frozen + numel) * 4e-6)


# ---- init_module


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_init_module(kind: str, tmp_path: Path) -> None:
    """DeepSpeed refused ``empty_init=False`` at stage 3. Empty models are for checkpoints that fill them."""
    warnings.simplefilter("ignore")
    plain = trainer(strategy(kind))
    plain.fit(toy(), data())
    plain.save_checkpoint(tmp_path / "one.ckpt")
    expected = ended(plain).weights
    torch.manual_seed(3)  # the dtype of the model
    undrawn = torch.rand(1)
    for empty in (None, False, True):
        made = trainer(strategy(kind))
        with made.init_module(empty_init=empty):
            model = toy()
            assert torch.equal(torch.rand(1), undrawn) == (empty is True), "nothing is drawn"
        if empty:
            made.test(model, data(1), ckpt_path=tmp_path / "one.ckpt", verbose=False)
        else:
            made.fit(model, data())
        assert worst(ended(made).weights, expected) == 0.0
    half = trainer(strategy(kind), precision="bf16-true")
    with half.init_module():
        model = toy()
    assert next(model.parameters()).dtype is torch.bfloat16
    half.fit(model, data())
    assert half.global_step == 4
    close(half)


# ---- precision


FLOPS = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3}


def _flops(device: torch.device, dtype: torch.dtype) -> int:
    return FLOPS[dtype]


FORMATS = (("32-true", 1), ("bf16-mixed", 2), ("64-true", 3))
MEASURED = [(kind, *case) for kind, case in zip(THREE, FORMATS, strict=True)]


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("kind", "precision", "flops"), rows(((kind, *case) for kind in THREE for case in FORMATS), MEASURED[1:2], MEASURED)
)
def test_throughput_uses_the_dtype_of_the_plugin(kind: str, precision: str, flops: int) -> None:
    """Lightning looks the dtype up by the class of the precision plugin, and took the library's plugins for fp32."""
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
        made = trainer(strategy(kind), precision=precision, callbacks=[Monitor(batch_size_fn=len)])
        made.fit(toy(), data(1), data(1))
        close(made)
    assert seen == [flops] * 3


EXACT = 1.0 + 2.0**-12  # a value that 16 bits cannot represent


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", of=TWO))
def test_rounding_of_weights_by_an_evaluation_warns(kind: str) -> None:
    for trained_before in (False, True):
        model = toy(optimizer="sgd", lr=0.0)
        torch.nn.init.constant_(model.net[0].weight, EXACT)
        made = trainer(strategy(kind), precision="bf16-mixed")
        said = []
        for run_one in [made.fit] * trained_before + [made.validate, made.fit]:
            with warnings.catch_warnings(record=True, action="always") as caught:
                run_one(model, data(1))
            said.append(sum("was sharded without an optimizer" in str(each.message) for each in caught))
        close(made)
        # masters have the exact values
        assert said == ([0, 0, 0] if trained_before else [0, int(dist.get_rank() == 0)])
        evaluator = trainer(strategy(kind), precision="bf16-mixed")
        evaluator.test(model, data(1), verbose=False)
        close(evaluator)
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert trained_before or float(model.net[0].weight[0, 0]) == 1.0


class _ByTrainer(Toy):
    def make_optimizer(self) -> torch.optim.Optimizer:
        params = self.trainer.model.parameters()  # type: ignore[attr-defined]
        return torch.optim.AdamW(params, lr=self.lr, weight_decay=0.1, eps=1e-3)


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("fully_sharded", "colossalai"))
def test_optimizers_accept_parameters_of_the_trainers_model_and_of_the_module(kind: str) -> None:
    """FairScale's strategy accepted those of ``self.trainer.model`` only, ColossalAI's those of the module only."""
    assert worst(fit(strategy(kind), toy(body=_ByTrainer)), fit(strategy(STOCK), toy())) <= 1e-6


@on_ranks(RANKS)
@pytest.mark.full
def test_file_with_classes_names_weights_only(tmp_path: Path) -> None:
    """``weights_only`` of ``fit`` and ``test`` does not reach a strategy that restores after its setup."""
    warnings.simplefilter("ignore")
    path = tmp_path / "one.ckpt"
    source = trainer(strategy(STOCK))
    source.fit(toy(), data(1))
    source.save_checkpoint(path)
    if dist.get_rank() == 0:
        whole = torch.load(path, weights_only=False)
        torch.save({**whole, "hyper_parameters": {"options": Namespace(sizes=1)}}, path)
    dist.barrier()
    made = trainer(strategy("deepspeed_3"))
    if since(2, 6) or not since(2, 4):  # versions between these read any file
        with pytest.raises(pickle.UnpicklingError, match="weights_only") as caught:
            made.test(toy(), data(1), ckpt_path=path, verbose=False)
        assert "allow the classes by torch.serialization.add_safe_globals" in " ".join(caught.value.__notes__)
    with torch.serialization.safe_globals([Namespace]):
        made.test(toy(seed=9), data(1), ckpt_path=path, verbose=False)
    assert worst(weights(made), weights(source)) == 0.0
    close(made)
