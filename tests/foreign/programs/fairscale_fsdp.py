"""FairScale's FullyShardedDataParallel, with layers wrapped on their own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fairscale.nn.wrap import auto_wrap, enable_wrap, wrap
from task import RATE, build_loader, build_model

dist.init_process_group("gloo")
model = build_model()
with enable_wrap(wrapper_cls=FSDP, flatten_parameters=True):
    model.layers = auto_wrap(model.layers)
    model.head = wrap(model.head)
model = FSDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
for x, y in build_loader(dist.get_rank(), dist.get_world_size()):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    model.clip_grad_norm_(1e6)
    optimizer.step()
    optimizer.zero_grad()
weights = model.state_dict()
plain = build_model()
plain.load_state_dict(weights)
loss = F.mse_loss(plain(x), y).detach()
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print(f"loss={loss.item() / dist.get_world_size():.7f}")
