"""The strategies by name, and runs that are repeated with each strategy and with Lightning's own ``ddp``."""

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.strategies.lightning_packages import LIGHTNING
from tests.support.lightning_setup import Toy, close, data, stock, toy, trainer, weights, worst
from tests.support.sets import campaign, full

SMALL = {"reduce_bucket_size": 100, "allgather_bucket_size": 100}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "colossalai": ("ColossalAIStrategy", {"chunk_size": 100}),
    "colossalai_cpu": ("ColossalAIStrategy", {"chunk_size": 100, "placement_policy": "cpu"}),
    "colossalai_cuda": ("ColossalAIStrategy", {"placement_policy": "cuda"}),
    "colossalai_tensors": ("ColossalAIStrategy", {"use_chunk": False, "placement_policy": "cuda"}),
    "colossalai_whole": ("ColossalAIStrategy", {"enable_distributed_storage": False, "chunk_size": 100}),
    "deepspeed_0": ("DeepSpeedStrategy", {"zero_optimization": False}),
    "deepspeed_1": ("DeepSpeedStrategy", {"stage": 1, **SMALL}),
    "deepspeed_2": ("DeepSpeedStrategy", {"stage": 2, **SMALL}),
    "deepspeed_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_3_offload": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "fully_sharded": ("DDPFullyShardedStrategy", {}),
    "fully_sharded_cpu": ("DDPFullyShardedStrategy", {"cpu_offload": True}),
    "fully_sharded_tensors": ("DDPFullyShardedStrategy", {"flatten_parameters": False}),
    "fully_sharded_kept": ("DDPFullyShardedStrategy", {"reshard_after_forward": False}),
}
MAIN = ("colossalai", "deepspeed_1", "deepspeed_2", "deepspeed_3", "fully_sharded")
"""One strategy of each engine plan; the others differ in the tiers of their data."""
THREE = ("colossalai", "deepspeed_3", "fully_sharded")
TWO = THREE[:2]
"""The engine and the base class do the same for the third strategy, whose own tests repeat much of it."""
STOCK = "stock"


class Partly(Toy):
    """A model whose first layer is frozen."""

    def build(self) -> None:
        super().build()
        assert isinstance(self.net, nn.Sequential)
        self.net[0].requires_grad_(False)


def rows(cases: Iterable[Any], quick: Collection[Any], more: Collection[Any] = ()) -> list[Any]:
    """Return the cases in order: those in ``quick``, those in ``more`` for the full set, and the rest for the
    campaign."""
    found: list[Any] = []
    for case in cases:
        found += [case] if case in quick else full(case) if case in more else campaign(case)
    return found


def kinds(quick: str, *more: str, of: tuple[str, ...] = THREE) -> list[Any]:
    """Return rows of strategies, one of them quick, since the engine and the base class are the same for all."""
    assert {quick, *more} <= {*of}
    return rows(of, [quick], more)


def strategy(kind: str, **changes: Any) -> Any:
    """Return a strategy of ``lightning.pytorch`` by its name in :data:`KINDS`; ``"stock"`` is Lightning's own
    ``ddp``."""
    if kind == STOCK:
        return stock() if not changes else LIGHTNING.load("strategies.ddp.DDPStrategy")(**changes)
    import shardwise.lightning as ours

    name, arguments = KINDS[kind]
    with warnings.catch_warnings(action="ignore"):
        return getattr(ours, name)(**{**arguments, **changes})


@dataclass(frozen=True)
class Recipe:
    """A run: the arguments of the Trainer and of the toy model."""

    batches: int = 5
    epochs: int = 2
    accumulate: int = 1
    clip: float | None = None
    algorithm: str | None = None
    optimizer: str = "adamw"
    schedule: bool = False
    where: str = "init"
    precision: str = "32-true"


@dataclass(frozen=True)
class Ended:
    """The final state of a run on one rank."""

    weights: dict[str, Tensor]
    global_step: int
    expected_steps: float
    metrics: dict[str, float]


def run(kind: str, recipe: Recipe, model: Any = None, **arguments: Any) -> Ended:
    """Run ``recipe`` with the strategy ``kind`` on this rank; ``arguments`` are the Trainer's."""
    made = trainer(
        strategy(kind),
        max_epochs=recipe.epochs,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
        gradient_clip_algorithm=recipe.algorithm,
        precision=recipe.precision,
        **arguments,
    )
    if model is None:
        model = toy(optimizer=recipe.optimizer, schedule=recipe.schedule, where=recipe.where)
    made.fit(model, data(recipe.batches), data(2, seed=1))
    return ended(made)


def ended(made: Any) -> Ended:
    """Return the final state of a Trainer after ``fit``, and end its sharding."""
    found = Ended(
        weights(made),
        made.global_step,
        made.estimated_stepping_batches if made.state.fn.value == "fit" else float("nan"),
        {name: float(value) for name, value in made.callback_metrics.items()},
    )
    close(made)
    return found


def check_same(found: Ended, expected: Ended, most: float = 1e-6) -> None:
    """Check that this rank ended as the oracle did: weights, steps, and logged values."""
    difference = worst(found.weights, expected.weights)
    assert difference <= most, f"weights differ by {difference}"
    assert found.global_step == expected.global_step
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in found.metrics.items():
        assert abs(value - expected.metrics[name]) <= max(most, 1e-5 * abs(value)), name
