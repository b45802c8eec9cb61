"""Train a byte-level GPT on this file, sharded: ``shardwise run --nproc 2 examples/booster_gpt.py``."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from shardwise import init_distributed
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin


class GPT(nn.Module):
    def __init__(self, width=64, depth=2, heads=4, context=64):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.blocks(self.embed(text) + self.position, mask, is_causal=True))


device = init_distributed()
text = torch.tensor(list(Path(__file__).read_bytes()))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
plugin = LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=1.0)
loader = plugin.prepare_dataloader(text.unfold(0, 65, 8), batch_size=8, shuffle=True)
booster = Booster(plugin=plugin)
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
for epoch in range(10):
    for batch in loader:
        batch = batch.to(device)
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if loader.sampler.rank == 0:  # one line an epoch, not one a rank
        print(f"epoch {epoch}: loss {loss.item():.3f}")
booster.save_model(model, "booster_gpt.safetensors", use_safetensors=True)
