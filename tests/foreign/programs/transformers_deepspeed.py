"""transformers' Trainer with a DeepSpeed configuration, as the documentation of both shows it."""

import sys

import torch
from task import build_llama, build_tokens
from transformers import Trainer, TrainingArguments

stage = int(sys.argv[1])
sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ds_config = {
    **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
}
often = {"max_steps": 3, "logging_steps": 1, "save_steps": 2, "report_to": []}
rate = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "seed": 0}
batch = {"per_device_train_batch_size": 2, "deepspeed": ds_config} if stage else {"per_device_train_batch_size": 4}
args = TrainingArguments("out", **often, **rate, **batch, use_cpu=not torch.cuda.is_available())
data = [{"input_ids": row, "labels": row} for row in build_tokens() for _ in range(3)]
trainer = Trainer(model=build_llama(), args=args, train_dataset=data)
trainer.train()
trainer.save_model("final")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss={losses[-1]:.7f}")
