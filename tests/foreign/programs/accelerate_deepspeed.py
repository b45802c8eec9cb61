"""accelerate's loop with its DeepSpeed plugin."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from task import BATCH, RATE, build_dataset, build_model

plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1, gradient_clipping=1e6)
PartialState(cpu=not torch.cuda.is_available())  # accelerate takes cpu= of Accelerator for "without DeepSpeed"
accelerator = Accelerator(deepspeed_plugin=plugin)
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
loader = torch.utils.data.DataLoader(build_dataset(), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
    if number == 3:
        accelerator.save_state("state")
        accelerator.load_state("state")
with torch.no_grad():
    loss = accelerator.reduce(F.mse_loss(model(x), y), "mean")
assert len(accelerator.get_state_dict(model)) == 6 or not accelerator.is_main_process
accelerator.print(f"loss={loss.item():.7f}")
