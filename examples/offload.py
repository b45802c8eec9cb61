"""A GPT that does not fit its device: ``shardwise run --nproc 2 examples/offload.py``.

On GPUs leave ``device_memory`` out, or lower it to try a smaller device.
"""

import torch
import torch.distributed as dist
from demo.model import ByteGPT, ModelSize

from shardwise import init_distributed, shutdown, tiers_text
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin

device = init_distributed()
torch.manual_seed(0)
model = ByteGPT(ModelSize(width=256, depth=8, heads=4, context=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plugin = GeminiPlugin(
    precision="fp32",
    device_memory="32MiB",  # of each rank; unsharded, this model's training needs 97 MiB
    offload_optim_frac=1.0,  # masters, moments and reduced gradients on the host
    offload_param_frac=1.0,  # parameters there too: on the device only while they are used
    max_prefetch=1,
    search_range_m=1,
    min_chunk_size_m=0.25,
)
booster = Booster(plugin=plugin)
model, optimizer, *_ = booster.boost(model, optimizer)

text = torch.randint(256, (2, 65), device=device)
for _ in range(10):
    logits = model(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    booster.backward(loss, optimizer)
    held = model.memory()
    optimizer.step()
    optimizer.zero_grad()
if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
    print(tiers_text(held.by_tier, {"device": held.device_capacity_bytes}))
shutdown()
