"""The published example of this plugin, without a pipeline: ``shardwise run --nproc 4
examples/booster_plugins/hybrid_parallel.py``. Two ranks hold the parts of each layer of a model of transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2, use_cache=False
)
model = LlamaForCausalLM(config)
starts = torch.arange(64)
train_dataset = [{"input_ids": ids, "labels": ids} for ids in (3 * starts[:, None] + torch.arange(12)) % 97]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = None  # the model has its own
plugin = HybridParallelPlugin(tp_size=2, pp_size=1)

train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size=8)
booster = Booster(plugin=plugin)
model, optimizer, criterion, train_dataloader, _ = booster.boost(model, optimizer, criterion, train_dataloader)

for _ in range(6):
    for batch in train_dataloader:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
