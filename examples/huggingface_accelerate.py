"""accelerate with a sharded model: ``shardwise run --nproc 2 examples/huggingface_accelerate.py``."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shardwise.huggingface import ShardwiseAccelerator
from shardwise.plan import zero

accelerator = ShardwiseAccelerator(plan=zero(3), gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.arange(64).repeat(16).view(64, 16), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(4):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
accelerator.save_state("accelerate-state")
accelerator.end_training()
