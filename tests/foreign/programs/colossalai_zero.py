"""ColossalAI without the Booster: wrappers of model and optimizer, and a model made lazily."""

import sys

import colossalai
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from task import RATE, build_loader, build_model, print_mean

colossalai.launch_from_torch()
stage = int(sys.argv[1])
if stage == 3:
    config = {"device": get_current_device(), "placement_policy": "static"}
    config |= {"pin_memory": False, "mixed_precision": torch.float32}
    with LazyInitContext(default_device=get_current_device()):
        model = build_model()
    model = LazyInitContext.materialize(model)
else:
    config = None
    model = build_model()
model = zero_model_wrapper(model, stage, config)
optimizer = zero_optim_wrapper(model, HybridAdam(model.parameters(), lr=RATE), initial_scale=1.0)
for x, y in build_loader(dist.get_rank(), dist.get_world_size()):
    loss = F.mse_loss(model(x), y)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    loss = F.mse_loss(model(x), y)
print_mean(loss)
