"""Train a byte-level GPT on this file, sharded: ``shardwise run --nproc 2 examples/booster_gpt.py``."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.cli.demo_model import ByteGPT, ModelSize

text = torch.tensor(list(Path(__file__).read_bytes()))
model = ByteGPT(ModelSize(width=64, depth=2, heads=4, context=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
plugin = LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=1.0)
loader = plugin.prepare_dataloader(text.unfold(0, 65, 8), batch_size=8, shuffle=True)
booster = Booster(plugin=plugin)
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
for epoch in range(10):
    for batch in loader:
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if loader.sampler.rank == 0:  # one line an epoch, not one a rank
        print(f"epoch {epoch}: loss {loss.item():.3f}")
booster.save_model(model, "booster_gpt.safetensors", use_safetensors=True)
