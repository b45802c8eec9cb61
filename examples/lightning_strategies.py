"""One LightningModule under each strategy, on two CPU processes.

``python examples/lightning_strategies.py --strategy colossalai`` (or ``deepspeed``, ``ddp_fully_sharded``)
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.lightning import ColossalAIStrategy, DDPFullyShardedStrategy, DeepSpeedStrategy

STRATEGIES = {
    "colossalai": lambda: ColossalAIStrategy(placement_policy="cpu", chunk_size=65536),
    "deepspeed": lambda: DeepSpeedStrategy(stage=3, offload_optimizer=True),
    "ddp_fully_sharded": lambda: DDPFullyShardedStrategy(reshard_after_forward=True),
}


class Regression(pl.LightningModule):
    """Learns ``sin(x) * cos(y)``."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        # Runs at every fit, validate and test; what is built here has no memory until it is sharded.
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(2, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def loader(count: int, seed: int) -> DataLoader:
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 6
    return DataLoader(TensorDataset(points, torch.sin(points[:, :1]) * torch.cos(points[:, 1:])), batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="colossalai")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--directory", default="runs/lightning", help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true")
    args = parser.parse_args()

    torch.manual_seed(0)
    saver = ModelCheckpoint(dirpath=args.directory, monitor="val_loss", save_top_k=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=STRATEGIES[args.strategy](),
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
    )
    model, validation = Regression(), loader(256, seed=1)
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, loader(1024, seed=0), validation)
    after = trainer.validate(model, validation, ckpt_path="best", verbose=False)[0]["val_loss"]
    report = trainer.strategy.session.memory()
    if trainer.is_global_zero:
        size = sum(param.numel() for param in model.parameters())
        kept = f"rank 0 keeps {report.parameters_bytes} of {4 * size} bytes of parameters"
        print(f"{args.strategy}: validation loss {before:.4f} -> {after:.4f}; {kept}")
        print(f"best checkpoint, a directory that any number of ranks can read: {Path(saver.best_model_path).name}")


if __name__ == "__main__":
    main()
