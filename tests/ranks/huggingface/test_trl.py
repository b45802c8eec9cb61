"""TRL's SFT and DPO trainers with a plan, on ``datasets``, compared with the same trainers in one process.

Covers full weights and LoRA with a fully trained layer; DPO with a fixed reference model, with one that follows the
policy, and with the adapter disabled as reference. Logged values agree within 1e-5 (relative) in fp32, saved weights
within 1e-5 of each tensor's largest element.
"""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.plan import zero
from shardwise.testing import assert_close, run_ranks
from tests.support.huggingface_setup import launched, quiet
from tests.support.sets import full
from tests.support.trl_setup import llama, rows, tokenizer

RTOL = 1e-5
SYNC = ("DPO with a reference that follows", False)
CASES = [*((kind, lora) for kind in ("SFT", "DPO") for lora in (False, True)), SYNC]
Run = tuple[int, tuple[str, bool]]  # stage, and how the model is trained
REFERENCE: list[Run] = [(3, CASES[2])]
OTHERS: list[Run] = [*((3, case) for case in CASES if case != CASES[2]), (2, CASES[0]), (2, CASES[3])]
ONE: list[Run] = [(3, CASES[3])]
LOGGED = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins", "logps/chosen", "entropy")


Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]


@mock.patch.dict(os.environ, HF_HUB_OFFLINE="1")
def train(kind: str, lora: bool, folder: str, stage: int | None) -> Outcome:
    """Return the logged values of each step and the saved weights; with ``stage=None`` TRL's own trainer in one
    process."""
    import trl
    from peft import LoraConfig
    from safetensors.torch import load_file

    from shardwise.huggingface import sharded_trainer

    with launched(), quiet():
        base, config = getattr(trl, f"{kind[:3]}Trainer"), getattr(trl, f"{kind[:3]}Config")
        ranks = dist.get_world_size() if stage is not None and dist.is_initialized() else 1
        where = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        size = {"max_steps": 3, "per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 2}
        given = {"logging_steps": 1, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "max_length": 32}
        options: dict[str, Any] = {}
        if kind == SYNC[0]:
            given |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
        kind = kind[:3]
        model = llama()
        if lora:
            targets = ["q_proj", "down_proj"]
            options["peft_config"] = LoraConfig(r=2, target_modules=targets, modules_to_save=["lm_head"])
        elif kind == "DPO":
            options["ref_model"] = copy.deepcopy(model)
        if stage is not None:
            base, options["plan"] = sharded_trainer(base), zero(stage)
        data = rows(("text",) if kind == "SFT" else ("prompt", "chosen", "rejected"))
        args = config(folder, **where, **size, **given, gradient_checkpointing=lora)
        torch.manual_seed(2)
        trainer = base(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **options)
        trainer.train()
        trainer.save_model(folder)
        if stage is not None:
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.close()
        if "ref_model" in options:
            assert all(bool(param.isfinite().all()) for param in trainer.ref_model.parameters())
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert Path(folder, "config.json").exists() is not lora
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    return [{key: entry[key] for key in LOGGED if key in entry} for entry in history], load_file(Path(folder, name))


def on_rank(folder: str, runs: Sequence[Run]) -> list[Outcome]:
    return [train(*case, f"{folder}/{case}-{stage}", stage) for stage, case in runs]


@pytest.mark.parametrize("runs", [REFERENCE, *full(OTHERS)], ids=["a reference", "others"])
def test_trl_trains_sharded_as_in_one_process(runs: list[Run], tmp_path: Path) -> None:
    for needed in ("trl", "datasets"):
        pytest.importorskip(needed, reason="pip install 'shardwise[trl]'")
    wanted = {case: train(*case, f"{tmp_path}/{case}-plain", None) for case in {case for _, case in runs}}
    assert {len(history) for history, _ in wanted.values()} == {3}
    found = [(runs, each) for each in run_ranks(2, on_rank, str(tmp_path / "two"), runs, timeout=300.0)]
    if runs == OTHERS:
        found.append((ONE, on_rank(str(tmp_path / "one"), ONE)))
    for made, outcomes in found:
        for run, (history, saved) in zip(made, outcomes, strict=True):
            for mine, theirs in zip(history, wanted[run[1]][0], strict=True):
                assert mine == pytest.approx(theirs, rel=RTOL, abs=1e-6), run
            assert_close(saved, wanted[run[1]][1], RTOL, str(run))
