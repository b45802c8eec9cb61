"""Lightning Fabric with a sharded model: ``python examples/fabric_strategies.py`` starts two CPU processes."""

import torch
from lightning.fabric import Fabric

from shardwise.fabric import DDPFullyShardedStrategy


def main(devices: int = 2) -> list[float]:
    fabric = Fabric(accelerator="cpu", strategy=DDPFullyShardedStrategy(), devices=devices)
    fabric.launch()
    fabric.seed_everything(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    inputs = torch.randn(64, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.roll(1, dims=1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=8))
    losses = []
    for epoch in range(5):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        losses.append(loss.item())
        fabric.print(f"epoch {epoch}: loss {losses[-1]:.3f}")
    fabric.save("fabric-checkpoint", {"model": model, "optimizer": optimizer})
    return losses


if __name__ == "__main__":
    main()
