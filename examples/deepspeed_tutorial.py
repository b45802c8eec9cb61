"""A program for DeepSpeed with its import changed: ``shardwise run --nproc 2 examples/deepspeed_tutorial.py``."""

import argparse

import torch
from torch import nn

import shardwise.deepspeed as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--save", default=None, help="directory of checkpoints; training continues from the newest")
args = parser.parse_args()

ds_config = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "total_num_steps": 80, "warmup_type": "linear"},
    },
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": args.stage,
        "overlap_comm": True,
        "reduce_bucket_size": 5e5,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 1e4,
    },
}

torch.manual_seed(0)
angles = torch.rand(512, 2) * 6
dataset = torch.utils.data.TensorDataset(angles, torch.sin(angles[:, :1]) * torch.cos(angles[:, 1:]))

with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=args.stage == 3):
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

model_engine, optimizer, train_loader, lr_scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=dataset, config=ds_config
)
with deepspeed.zero.GatheredParameters(model[4].bias, modifier_rank=0):
    if model_engine.global_rank == 0:
        model[4].bias.data.zero_()

start = 0
if args.save is not None:
    _, client_state = model_engine.load_checkpoint(args.save)
    start = client_state["epoch"] if client_state is not None else 0

for epoch in range(start, args.epochs):
    train_loader.sampler.set_epoch(epoch)
    total = 0.0
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(model_engine.device).bfloat16(), targets.to(model_engine.device)
        loss = nn.functional.mse_loss(model_engine(inputs).float(), targets)
        model_engine.backward(loss)
        model_engine.step()
        total += loss.item()
    if model_engine.global_rank == 0:
        print(f"epoch {epoch}: loss {total / len(train_loader):.4f}")
    if args.save is not None:
        model_engine.save_checkpoint(args.save, client_state={"epoch": epoch + 1})
