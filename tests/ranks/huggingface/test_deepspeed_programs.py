"""Unmodified programs for DeepSpeed: transformers' Trainer and an accelerate loop, compared with plain training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launching import finished

PROGRAM = """
import json, sys
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

folder, config = sys.argv[1], sys.argv[2] or None
generator = torch.Generator().manual_seed(1)
rows = [torch.randint(17, (9,), generator=generator) for _ in range(32)]
ranks = PartialState(cpu=True).num_processes


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def arguments(steps, **changes):
    return TrainingArguments(
        f"{folder}/trainer", per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2, max_steps=steps,
        learning_rate=1e-2, warmup_steps=1, max_grad_norm=0.5, weight_decay=0.01, save_steps=2, logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, deepspeed=config, **changes)


def trained(steps, resume=None):
    args = arguments(steps)
    model = GPT2LMHeadModel.from_pretrained(f"{folder}/init")
    trainer = InOrder(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry], trainer


first, trainer = trained(4)
trainer.accelerator.free_memory()
again, trainer = trained(4, f"{folder}/trainer/checkpoint-2")
trainer.accelerator.free_memory()

from accelerate.state import AcceleratorState
AcceleratorState._reset_state()
options = {}
if config:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    unset_hf_deepspeed_config()
    low = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
           "train_micro_batch_size_per_gpu": 4 // ranks}
    options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=low)
accelerator = Accelerator(gradient_accumulation_steps=2, **options)
model = GPT2LMHeadModel.from_pretrained(f"{folder}/init")
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.utils.data.DataLoader(rows, batch_size=4 // ranks))


def passes(count):
    for number, batch in enumerate(loader):
        if number == count:
            return
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


passes(4)
accelerator.save_state(f"{folder}/state")
passes(2)
accelerator.load_state(f"{folder}/state")
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save({name: value.float() for name, value in state.items()}, f"{folder}/accelerate.pt")
    json.dump([first, again], open(f"{folder}/norms.json", "w"))
accelerator.end_training()
"""
ZERO = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def run(folder: Path, initial: Any, config: str, *launch: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    from safetensors.torch import load_file

    folder.mkdir()
    initial.save_pretrained(folder / "init")
    (folder / "program.py").write_text(PROGRAM)
    command = ["shardwise", "run", *launch, str(folder / "program.py"), str(folder), config]
    status, shown = finished(*command, log=folder / "log")
    assert status == 0, shown[-4000:]
    norms = json.loads((folder / "norms.json").read_text())
    state = torch.load(folder / "accelerate.pt", weights_only=True)
    return load_file(folder / "final" / "model.safetensors"), state, norms


@pytest.mark.full
def test_programs_for_deepspeed_train_as_plain_ones(tmp_path: Path) -> None:
    from tests.support.huggingface_setup import gpt2

    initial = gpt2()
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    plain = run(tmp_path / "plain", initial, "", "--nproc", "1")
    ours = run(tmp_path / "ours", initial, str(tmp_path / "ds.json"), "--as", "deepspeed", "--nproc", "2")
    for want, found in zip(plain[:2], ours[:2], strict=True):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    for want, found in zip(plain[2], ours[2], strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
