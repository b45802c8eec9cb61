"""Ray Train with a sharded model: ``python examples/ray_train.py`` starts two workers of a local Ray."""

import os
from typing import Any

import torch
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import shardwise


def train_loop(config: dict[str, Any]) -> None:
    # Ray has made the process group of the workers.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    session = shardwise.shard(model, torch.optim.AdamW(model.parameters(), lr=config["lr"]), stage=3)
    inputs = torch.randn(64, 16, device=session.mesh.device)[session.data_rank :: session.data_ranks]
    for epoch in range(20):
        loss = torch.nn.functional.mse_loss(session.module(inputs), inputs.roll(1, dims=1))
        session.backward(loss)
        session.optimizer.step()
        session.optimizer.zero_grad()
        if epoch % 5 == 4:
            train.report({"loss": loss.item()})  # waits up to 2 seconds for Ray's controller
        if session.data_rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    session.checkpoints.save(config["folder"])
    session.close()


def main(workers: int = 2) -> None:
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 1e-2, "folder": os.path.abspath("ray-checkpoint")},  # that all workers share
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
