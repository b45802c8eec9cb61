"""Tensor parallelism under Lightning's Trainer, by a DeepSpeed configuration: fp64 against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.lightning_deepspeed_setup import strategy
from tests.support.lightning_setup import close, trainer
from tests.support.sets import campaign, full

RANKS, BATCH, TP = 4, 2, 2
REPLICAS = RANKS // TP


class Language(LIGHTNING.load("LightningModule")):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = made("llama")
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen.append(batch["input_ids"])
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net)


def shuffled(count: int) -> Subset[dict[str, Tensor]]:
    """The texts in an order that Trainer's shuffling of the first epoch puts right."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return Subset(Texts(count), order.argsort().tolist())


def _fitted(stage: int, directory: Path) -> None:
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": MAX_NORM}
    ours = strategy(config=config | {"tensor_parallel": {"autotp_size": TP}})
    made_trainer = trainer(ours, max_epochs=1, precision="64-true")
    model = Language()
    made_trainer.fit(model, DataLoader(shuffled(STEPS * BATCH * REPLICAS), BATCH))
    assert ours.distributed_sampler_kwargs == {"num_replicas": REPLICAS, "rank": dist.get_rank() // TP}
    assert ours.session.mesh.tensor.size == TP and len(model.seen) == STEPS
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, torch.stack(model.seen))
    assert torch.equal(told[0], told[1]) and torch.equal(told[2], told[3]) and not torch.equal(told[0], told[2])
    *_, (_, _, values) = plain("llama", REPLICAS, BATCH, True)
    whole = {name.removeprefix("net."): value for name, value in ours.lightning_module_state_dict().items()}
    if dist.get_rank() == 0:
        assert_close(whole, values, 1e-9, "parameters")
    made_trainer.save_checkpoint(directory / "last.ckpt")
    close(made_trainer)
    again = trainer(strategy(config=config), max_epochs=1, precision="64-true")
    other = Language()
    again.fit(other, DataLoader(Texts(STEPS * BATCH * RANKS), BATCH), ckpt_path=directory / "last.ckpt")
    assert not other.seen, "its only epoch is over"
    whole = {name.removeprefix("net."): value for name, value in again.strategy.lightning_module_state_dict().items()}
    if dist.get_rank() == 0:
        assert_close(whole, values, 1e-9, "parameters without tensor parallelism")
    close(again)


@pytest.mark.parametrize("stage", [*full(1), *campaign(3)])
def test_a_configuration_with_tensor_parallelism(stage: int, tmp_path: Path) -> None:
    run_ranks(RANKS, _fitted, stage, tmp_path, timeout=120.0)
