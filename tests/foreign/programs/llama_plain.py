"""Prints the expected loss of the programs with a Llama."""

import torch
from task import build_llama, build_tokens

model, tokens = build_llama(), build_tokens()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss={loss.item():.7f}")
