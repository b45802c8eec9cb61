"""A user's script for the launcher tests: it trains, tests and saves, and rank 0 writes the final weights.

Run it as ``lightning_program.py DIRECTORY START_METHOD``, with Python itself or with torchrun.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.lightning import DDPFullyShardedStrategy


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(directory: str, start_method: str) -> None:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :2].sin()), batch_size=4)
    model = Net()
    trainer = pl.Trainer(
        strategy=DDPFullyShardedStrategy(start_method=start_method),  # type: ignore[arg-type]
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(model, loader)
    spawned = start_method == "spawn"
    state = model.state_dict() if spawned else trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        assert Path(best).is_dir(), best
        torch.save({"state": state, "loss": trainer.callback_metrics["loss"]}, f"{directory}/result.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
