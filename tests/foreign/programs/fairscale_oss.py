"""FairScale's sharded optimizer with its data-parallel wrapper."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.oss import OSS
from task import RATE, build_loader, build_model

dist.init_process_group("gloo")
model = build_model()
optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=RATE, weight_decay=0.0)
model = ShardedDDP(model, optimizer)
for x, y in build_loader(dist.get_rank(), dist.get_world_size()):
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
optimizer.consolidate_state_dict(recipient_rank=0)
if dist.get_rank() == 0:
    assert len(optimizer.state_dict()["state"]) == 6
with torch.no_grad():
    loss = F.mse_loss(model(x), y)
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print(f"loss={loss.item() / dist.get_world_size():.7f}")
