"""The published example of this plugin: ``shardwise run --nproc 4 examples/booster_plugins/hybrid_parallel.py``. Two
stages of a model of transformers, with the parts of their layers on two ranks each."""

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
plugin = HybridParallelPlugin(tp_size=2, pp_size=2)

train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size=8)
booster = Booster(plugin=plugin)
model, optimizer, criterion, train_dataloader, _ = booster.boost(model, optimizer, criterion, train_dataloader)

for _ in range(6):
    batches = iter(train_dataloader)
    for _ in range(len(train_dataloader)):
        result = booster.execute_pipeline(
            batches, model, lambda outputs, inputs: outputs.loss, optimizer, broadcast_loss=True
        )
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {result['loss'].item():.3f}")
