"""Programs that do not import shardwise, under a DeepSpeed configuration, compared with plain runs:
TRL's trainers, and a program started by ``accelerate launch``.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.launcher_variables import without_launcher
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
data = rows(("text",) if kind == "SFT" else ("prompt", "chosen", "rejected"))
for resume in (None, f"{folder}/checkpoint-2"):
    args = getattr(trl, f"{kind}Config")(
        folder, use_cpu=True, report_to="none", save_steps=2, disable_tqdm=True, bf16=False, max_steps=3,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")), gradient_accumulation_steps=2,
        logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-3, max_length=32, gradient_checkpointing=False,
        deepspeed=config)
    model, options = llama(), {}
    if kind == "SFT":
        options["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    else:
        options["ref_model"] = copy.deepcopy(model)
    torch.manual_seed(2)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=args, train_dataset=data, processing_class=tokenizer(), **options)
    trainer.train(resume_from_checkpoint=resume)
    if resume is None:
        trainer.accelerator.free_memory()
trainer.save_model(folder)
if trainer.accelerator.is_main_process:
    names = ("loss", "grad_norm", "rewards/margins")
    history = [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]
    open(f"{folder}/history.json", "w").write(json.dumps(history[:3]))
"""
STAGE_3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
    },
    "bf16": {"enabled": "auto"},
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
    """SFT trains adapters; DPO trains all weights with a reference model that is sharded, too."""
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


LAUNCH_PROGRAM = """
import sys
import torch
from accelerate import Accelerator, PartialState

PartialState(cpu=True)
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
rows = [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(16)]
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2))


def passes():
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


passes()
accelerator.save_state(f"{sys.argv[1]}-state")
passes()
accelerator.load_state(f"{sys.argv[1]}-state")
stage, ranks = accelerator.state.deepspeed_plugin.zero_stage, accelerator.num_processes
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save({"stage": stage, "ranks": ranks, "state": state}, sys.argv[1])
"""
FILE = """
{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 2}}
"""


def plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(16)]
    for inputs, targets in DataLoader(rows, batch_size=8):  # type: ignore[arg-type]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


@pytest.mark.full
def test_launched_program_trains_as_a_plain_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LAUNCH_PROGRAM)
    (tmp_path / "ds.json").write_text(FILE)
    given = ["--use_deepspeed", "--num_processes", "2", "--deepspeed_config_file", "ds.json"]
    launch = ["shardwise.cli.run_as_library", "deepspeed", "-m", "accelerate.commands.launch", *given]
    environment = {
        name: value for name, value in without_launcher(os.environ).items() if not name.startswith("ACCELERATE_")
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = subprocess.run(
        [sys.executable, "-m", *launch, "--main_process_port", port, "program.py", str(tmp_path / "found.pt")],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert (found["stage"], found["ranks"]) == (2, 2)
    for name, value in plain().items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-5, atol=1e-6)
