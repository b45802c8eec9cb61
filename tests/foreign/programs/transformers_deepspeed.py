"""transformers' Trainer with a DeepSpeed configuration, as the documentation of both shows it."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

stage = int(sys.argv[1])
ds_config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
args = TrainingArguments(
    output_dir="out",
    deepspeed=ds_config if stage else None,
    per_device_train_batch_size=2 if stage else 4,
    max_steps=3,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_steps=2,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    seed=0,
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens for _ in range(3)]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model("final")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss={losses[-1]:.7f}")
