"""Fabric with its DeepSpeed strategy."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from task import RATE, build_loader, build_model

fabric = Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=2, process_group_backend="gloo"))
fabric.launch()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(build_loader(fabric.global_rank, fabric.world_size), use_distributed_sampler=False)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1e6)
    optimizer.step()
    optimizer.zero_grad()
state = {"model": model, "optimizer": optimizer, "step": 8}
fabric.save("checkpoint", state)
fabric.load("checkpoint", state)
with torch.no_grad():
    loss = fabric.all_reduce(F.mse_loss(model(x), y))
fabric.print(f"loss={loss.item():.7f}")
