"""The published example of this plugin: ``shardwise run --nproc 2 examples/booster_plugins/gemini.py``."""

import torch

from shardwise import init_distributed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin

device = init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
train_dataset = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = torch.nn.CrossEntropyLoss()
plugin = GeminiPlugin()

train_dataloader = plugin.prepare_dataloader(train_dataset, batch_size=8)
booster = Booster(plugin=plugin)
model, optimizer, train_dataloader, criterion = booster.boost(model, optimizer, train_dataloader, criterion)

for inputs, labels in train_dataloader:
    inputs, labels = inputs.to(device), labels.to(device)
    loss = criterion(model(inputs).float(), labels)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
