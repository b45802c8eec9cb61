"""TRL's own trainers with a DeepSpeed configuration, in a program that does not know us, against those without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launching import ROOT, finished
from tests.support.sets import campaign

PROGRAM = """
import copy, json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, ROOT)
import torch, trl
from peft import LoraConfig
from tests.support.trl_setup import llama, rows, tokenizer

kind, folder, config = sys.argv[1], sys.argv[2], sys.argv[3] or None
args = getattr(trl, f"{kind}Config")(
    folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, bf16=False, max_steps=3,
    per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")), gradient_accumulation_steps=2,
    logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-3, max_length=32, gradient_checkpointing=False,
    deepspeed=config)
model, options = llama(), {}
if kind == "SFT":
    options["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
else:
    options["ref_model"] = copy.deepcopy(model)
torch.manual_seed(2)
data = rows(("text",) if kind == "SFT" else ("prompt", "chosen", "rejected"))
trainer = getattr(trl, f"{kind}Trainer")(
    model=model, args=args, train_dataset=data, processing_class=tokenizer(), **options)
trainer.train()
trainer.save_model(folder)
if trainer.accelerator.is_main_process:
    names = ("loss", "grad_norm", "rewards/margins")
    history = [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]
    open(f"{folder}/history.json", "w").write(json.dumps(history[:3]))
"""
STAGE_3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def run(program: Path, kind: str, config: str, *launch: str) -> tuple[list[list[float]], dict[str, Any]]:
    from safetensors.torch import load_file

    folder = program.parent / f"{kind}-{'ours' if config else 'plain'}"
    folder.mkdir()
    status, shown = finished("shardwise", "run", *launch, str(program), kind, str(folder), config, log=folder / "log")
    assert status == 0, shown[-4000:]
    name = "adapter_model.safetensors" if kind == "SFT" else "model.safetensors"
    return json.loads((folder / "history.json").read_text()), load_file(folder / name)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["SFT", *campaign("DPO")])
def test_trainers_of_trl_under_deepspeed(kind: str, tmp_path: Path) -> None:
    """Adapters by SFT, and whole weights by DPO with a reference that is sharded, too."""
    for needed in ("trl", "datasets"):
        pytest.importorskip(needed, reason="pip install 'shardwise[trl]'")
    (tmp_path / "program.py").write_text(PROGRAM.replace("insert(0, ROOT)", f"insert(0, {str(ROOT)!r})"))
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    program = tmp_path / "program.py"
    history, saved = run(program, kind, "", "--nproc", "1")
    ours, found = run(program, kind, str(tmp_path / "ds.json"), "--as", "deepspeed", "--nproc", "2")
    assert len(history) == 3 and found.keys() == saved.keys()
    for mine, theirs in zip(ours, history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for name, value in saved.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
