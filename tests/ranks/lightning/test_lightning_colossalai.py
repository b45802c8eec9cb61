"""What only ColossalAIStrategy has: its arguments' effects, its collectives, its steps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_cases import Recipe, check_same, ended, run
from torch import Tensor

from shardwise.strategies.colossalai import ColossalAI
from shardwise.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace, build
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, since, toy, trainer, weights

RANKS = 2


def _made(ns: Namespace = LIGHTNING, **arguments: Any) -> Any:
    import importlib

    return importlib.import_module(ns.home).ColossalAIStrategy(**arguments)


# ---- arguments


class _Small(ColossalAI):
    """On a device of 64 KiB."""

    def _plan(self, module: Any) -> Any:
        return super()._plan(module).but(device_capacity_bytes=2**16)


def _traced(margin: float) -> tuple[dict[str, Tensor], dict[str, bool]]:
    cls = build(LIGHTNING, _Small, "strategies.ddp.DDPStrategy", "Small")
    made = trainer(cls(chunk_size=100, gpu_margin_mem_ratio=margin), max_epochs=2)
    model = toy()
    made.validate(model, data(1, seed=1), verbose=False)
    made.fit(model, data(3))
    session = made.strategy.session
    on_device = session.memory().by_tier.get("device", {})
    facts = {"traced": session.memory_stats() is not None, "state moved": on_device.get("optimizer state", 0) > 0}
    made.predict(model, data(1))
    return ended(made).weights, facts


def test_auto_places_by_the_trace_of_a_first_step_even_after_validation() -> None:
    """ColossalAI had to train a step before anything else. The numbers are those of a run without limits."""
    expected = run_ranks(RANKS, run, "colossalai", Recipe(batches=3))[0].weights
    for margin in (0.0, 1.0):
        for found, facts in run_ranks(RANKS, _traced, margin):
            assert facts == {"traced": True, "state moved": margin > 0}
            assert all(torch.equal(value, found[name]) for name, value in expected.items())


class _ShowsOutputs(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])  # type: ignore[operator]
        loss = nn_loss(output, batch[1])
        self.seen += [str(batch[0].dtype), str(output.dtype), str(loss.dtype)]
        return {"loss": loss, "output": output}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [str(outputs["loss"].dtype), str(outputs["output"].dtype)]


def nn_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _outputs(force: bool) -> list[str]:
    model = toy(body=_ShowsOutputs)
    made = trainer(_made(force_outputs_fp32=force), precision="bf16-mixed")
    made.fit(model, data(1))
    close(made)
    return [each.removeprefix("torch.") for each in model.seen]


def test_force_outputs_fp32_casts_what_a_step_returns() -> None:
    assert run_ranks(RANKS, _outputs, False) == [["bfloat16"] * 5] * RANKS
    assert run_ranks(RANKS, _outputs, True) == [["bfloat16"] + ["float32"] * 4] * RANKS


def test_what_has_no_effect_is_said_once() -> None:
    with pytest.warns(UserWarning, match="chunk_size=8 without effect: use_chunk=False") as caught:
        _made(use_chunk=False, chunk_size=8)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"gpu_margin_mem_ratio=0.5 without effect: for placement_policy='auto'"):
        _made(placement_policy="cuda", gpu_margin_mem_ratio=0.5)
    with pytest.raises(ValueError, match="placement_policy='const'"):
        _made(placement_policy="const")


# ---- fp16


# ---- between ranks


def _ready(**arguments: Any) -> Any:
    made = trainer(_made(**arguments))
    made.fit(toy(), data(1))
    return made


def _gathers() -> dict[str, Any]:
    made = _ready()
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    part = (torch.arange(6.0).reshape(2, 3) + 10 * rank).requires_grad_()
    plain = made.strategy.all_gather(part)
    found["rows"], found["tracked"] = plain.tolist(), plain.requires_grad
    found["scalar"] = made.strategy.all_gather(torch.tensor(float(rank))).tolist()
    found["by module"] = made.lightning_module.all_gather(torch.full((1, 2), rank)).tolist()
    whole = made.strategy.all_gather(part, sync_grads=True)
    weight = torch.arange(12.0).reshape(4, 3) * (rank + 1)
    (whole * weight).sum().backward()
    found["grad"] = None if part.grad is None else part.grad.tolist()
    found["group"] = made.strategy.all_gather(torch.ones(2), group=dist.group.WORLD).shape
    close(made)
    return found


def test_all_gather_concatenates_and_lets_gradients_through() -> None:
    """ColossalAI joined along dimension 0 and refused ``sync_grads``."""
    for rank, found in enumerate(run_ranks(RANKS, _gathers)):
        assert found["rows"] == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]]
        assert found["tracked"] is False and found["scalar"] == [0, 1] and found["by module"] == [[0, 0], [1, 1]]
        # The sum over ranks of what each did to this rank's rows: weights times 1 and times 2.
        own = torch.arange(12.0).reshape(4, 3)[2 * rank : 2 * rank + 2] * 3
        assert found["grad"] == own.tolist()
        assert tuple(found["group"]) == (4,)


def _reduces() -> dict[str, Any]:
    made = _ready()
    reduce, rank = made.strategy.reduce, dist.get_rank()
    given = torch.tensor([1.0, 2.0]) * (rank + 1)
    found = {
        "default": reduce(given).tolist(),
        "mean": reduce(given, reduce_op="mean").tolist(),
        "max": reduce(given, reduce_op="max").tolist(),
        "op": reduce(given, reduce_op=dist.ReduceOp.SUM).tolist(),
        "given": given.tolist(),
        "text": reduce("left"),
    }
    close(made)
    return found


def test_reduce_gives_its_result_to_every_rank() -> None:
    """ColossalAI gave it to rank 0 only."""
    for rank, found in enumerate(run_ranks(RANKS, _reduces)):
        assert found["default"] == found["op"] == [3.0, 6.0]
        assert found["mean"] == [1.5, 3.0] and found["max"] == [2.0, 4.0] and found["text"] == "left"
        assert found["given"] == [1.0 + rank, 2.0 + 2 * rank], "the input is left as it is"


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

        if self.way == "one":
            strategy.optimizer_step(optimizer, 0, closure)
        elif self.way == "one, model":
            strategy.optimizer_step(optimizer, 0, closure, self)
        elif self.way == "two, model":
            strategy.optimizer_step(optimizer, closure, self)
        elif self.way == "named":
            strategy.optimizer_step(optimizer, closure=closure, model=self)
        else:
            strategy.optimizer_step(optimizer, closure)


def _called(way: str) -> Any:
    model = toy(body=_Calls)
    model.way = way
    made = trainer(_made())
    made.fit(model, data(3))
    return ended(made)


@pytest.mark.full
def test_optimizer_step_takes_the_arguments_of_lightning_1_and_2() -> None:
    expected = run_ranks(RANKS, _called, "two")
    assert float(expected[0].weights["net.0.weight"].abs().sum()) > 0
    for way in ("one", "one, model", "two, model", "named"):
        check_same(run_ranks(RANKS, _called, way), expected, 0.0)
    trained = run_ranks(RANKS, run, "colossalai", Recipe(batches=3, epochs=1))
    assert torch.equal(trained[0].weights["net.0.weight"], expected[0].weights["net.0.weight"])


# ---- steps and state


def _states() -> tuple[dict[str, list[int]], bool]:
    made = trainer(_made(chunk_size=100), precision="bf16-mixed")
    made.fit(toy(), data(1))
    full = made.strategy.lightning_module_state_dict()
    first = made.strategy.lightning_module_state_dict(rank_zero_only=True)
    same = list(full) == list(first) and all(torch.equal(full[name], value) for name, value in first.items())
    assert all(value.dtype == torch.float32 and value.device.type == "cpu" for value in full.values())
    close(made)
    return {name: list(value.shape) for name, value in first.items()}, same


def test_the_state_of_rank_0_alone() -> None:
    (shapes, same), (empty, other) = run_ranks(RANKS, _states)
    assert same and not other
    assert shapes["net.0.weight"] == [16, 6] and list(shapes) == list(empty)
    assert all(shape == [0] for shape in empty.values())


def _namesake(ns: Namespace) -> dict[str, Tensor]:
    # Lightning 2.2 takes "colossalai" for a package of its own.
    made = trainer("colossalai" if since(2, 3) else "shardwise_colossalai", ns, max_epochs=1)
    assert type(made.strategy).__module__ == ns.home
    made.fit(toy(ns), data(2))
    found = weights(made)
    close(made)
    return found


def test_by_name_under_both_packages() -> None:
    import shardwise.lightning
    import shardwise.pytorch_lightning  # noqa: F401  registers the name

    one, other = run_ranks(RANKS, _namesake_of, "lightning"), run_ranks(RANKS, _namesake_of, "pytorch_lightning")
    assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())


def _namesake_of(package: str) -> dict[str, Tensor]:
    import importlib

    importlib.import_module(f"shardwise.{package}")
    return _namesake({"lightning": LIGHTNING, "pytorch_lightning": PYTORCH_LIGHTNING}[package])
