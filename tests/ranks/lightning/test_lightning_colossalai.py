"""ColossalAIStrategy: its arguments, its collectives, and its steps."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_cases import Recipe, ended, run
from torch import Tensor

from shardwise.lightning import ColossalAIStrategy
from shardwise.strategies.colossalai import ColossalAI
from shardwise.strategies.lightning_packages import LIGHTNING, PYTORCH_LIGHTNING, build
from tests.support.lightning_setup import Toy, close, data, fit, since, toy, trainer, worst
from tests.support.on_ranks import on_ranks

RANKS = 2


# ---- arguments


class _Small(ColossalAI):
    """A model for a device of 64 KiB."""

    def _plan(self, module: Any) -> Any:
        return super()._plan(module).but(device_capacity_bytes=2**16)


@on_ranks(RANKS)
def test_auto_placement_after_validation() -> None:
    """The trace of the first step decides, and results equal those without limits. ColossalAI had to train a step
    first."""
    expected = run("colossalai", Recipe(batches=3)).weights
    cls = build(LIGHTNING, _Small, "strategies.ddp.DDPStrategy", "Small")
    for margin in (0.0, 1.0):
        made = trainer(cls(chunk_size=100, gpu_margin_mem_ratio=margin), max_epochs=2)
        model = toy()
        made.validate(model, data(1, seed=1), verbose=False)
        made.fit(model, data(3))
        session = made.strategy.session
        on_device = session.memory().by_tier.get("device", {})
        assert session.memory_stats() is not None and (on_device.get("optimizer state", 0) > 0) == (margin > 0)
        made.predict(model, data(1))
        assert worst(ended(made).weights, expected) == 0.0


class _ShowsOutputs(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])  # type: ignore[operator]
        loss = (output - batch[1]).square().mean()
        self.seen += [batch[0].dtype, output.dtype, loss.dtype]  # type: ignore[list-item]
        return {"loss": loss, "output": output}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [outputs["loss"].dtype, outputs["output"].dtype]


@on_ranks(RANKS)
def test_force_outputs_fp32_casts_what_a_step_returns() -> None:
    for force, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        model = toy(body=_ShowsOutputs)
        fit(ColossalAIStrategy(force_outputs_fp32=force), model, loader=data(1), precision="bf16-mixed")
        assert model.seen == [torch.bfloat16] + [dtype] * 4


def test_arguments_without_effect_warn_once() -> None:
    with pytest.warns(UserWarning, match="chunk_size=8 without effect: use_chunk=False") as caught:
        ColossalAIStrategy(use_chunk=False, chunk_size=8)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"gpu_margin_mem_ratio=0.5 without effect: for placement_policy='auto'"):
        ColossalAIStrategy(placement_policy="cuda", gpu_margin_mem_ratio=0.5)
    with pytest.raises(ValueError, match="placement_policy='const'"):
        ColossalAIStrategy(placement_policy="const")  # type: ignore[arg-type]


# ---- between ranks


@on_ranks(RANKS)
def test_all_gather_and_reduce() -> None:
    """``all_gather`` concatenates along dimension 0, as ColossalAI's, and supports ``sync_grads``, which that refused.

    ``reduce`` returns its result on every rank; ColossalAI reduced to rank 0 only.
    """
    made = trainer(ColossalAIStrategy())
    made.fit(toy(), data(1))
    gather, reduce, rank = made.strategy.all_gather, made.strategy.reduce, dist.get_rank()
    part = (torch.arange(6.0).reshape(2, 3) + 10 * rank).requires_grad_()
    plain = gather(part)
    assert plain.tolist() == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]] and not plain.requires_grad
    assert gather(torch.tensor(float(rank))).tolist() == [0, 1]
    assert made.lightning_module.all_gather(torch.full((1, 2), rank)).tolist() == [[0, 0], [1, 1]]
    weight = torch.arange(12.0).reshape(4, 3)
    (gather(part, sync_grads=True) * weight * (rank + 1)).sum().backward()
    # The sum over ranks of the factors that each applied to this rank's rows: 1 and 2.
    assert part.grad is not None and torch.equal(part.grad, weight[2 * rank : 2 * rank + 2] * 3)
    assert tuple(gather(torch.ones(2), group=dist.group.WORLD).shape) == (4,)
    given = torch.tensor([1.0, 2.0]) * (rank + 1)
    assert reduce(given).tolist() == reduce(given, reduce_op=dist.ReduceOp.SUM).tolist() == [3.0, 6.0]
    assert reduce(given, reduce_op="mean").tolist() == [1.5, 3.0]
    assert reduce(given, reduce_op="max").tolist() == [2.0, 4.0] and reduce("left") == "left"
    assert given.tolist() == [1.0 + rank, 2.0 + 2 * rank], "the input is left as it is"
    close(made)


# The arguments of Lightning 1 and 2, of a closure and a model.
WAYS: dict[str, Callable[..., Any]] = {
    "two": lambda step, own, closure, model: step(own, closure),
    "one": lambda step, own, closure, model: step(own, 0, closure),
    "one, model": lambda step, own, closure, model: step(own, 0, closure, model),
    "two, model": lambda step, own, closure, model: step(own, closure, model),
    "named": lambda step, own, closure, model: step(own, closure=closure, model=model),
}


class _Calls(Toy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy  # type: ignore[attr-defined]
        (optimizer,) = strategy.optimizers

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)  # type: ignore[attr-defined]
            return loss

        WAYS[self.way](strategy.optimizer_step, optimizer, closure, self)


@on_ranks(RANKS)
@pytest.mark.full
def test_optimizer_step_takes_the_arguments_of_lightning_1_and_2() -> None:
    found = []
    for way in WAYS:
        model = toy(body=_Calls)
        model.way = way
        found.append(fit(ColossalAIStrategy(), model, loader=data(3)))
        assert worst(found[0], found[-1]) == 0.0, way
    trained = run("colossalai", Recipe(batches=3, epochs=1)).weights
    assert torch.equal(trained["net.0.weight"], found[0]["net.0.weight"])


# ---- steps and state


@on_ranks(RANKS)
def test_state_of_rank_0_only() -> None:
    made = trainer(ColossalAIStrategy(chunk_size=100), precision="bf16-mixed")
    made.fit(toy(), data(1))
    full = made.strategy.lightning_module_state_dict()
    first = made.strategy.lightning_module_state_dict(rank_zero_only=True)
    assert all(value.dtype == torch.float32 and value.device.type == "cpu" for value in full.values())
    assert list(first) == list(full)
    for name, value in full.items():
        assert torch.equal(first[name], value) if dist.get_rank() == 0 else first[name].shape == (0,)
    close(made)


@on_ranks(RANKS)
def test_by_name_under_both_packages() -> None:
    found = []
    for ns in (LIGHTNING, PYTORCH_LIGHTNING):
        import_module(ns.home)  # registers the name
        # Lightning 2.2 takes "colossalai" for a package of its own.
        made = trainer("colossalai" if since(2, 3) else "shardwise_colossalai", ns)
        assert type(made.strategy).__module__ == ns.home
        made.fit(toy(ns), data(2))
        found.append(ended(made).weights)
    assert worst(*found) == 0.0
