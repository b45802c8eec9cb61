"""``load_best_model_at_end`` and resuming of adapters (peft) that are sharded: what the file has, to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.plan import Plan, zero
from shardwise.testing import assert_close
from tests.support.huggingface_setup import RANKS, arguments, gpt2, launched, quiet, rows
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")


def trainer_of(folder: str, plan: Plan, several: bool = False, prompts: bool = False) -> Any:
    """The first checkpoint is the best one: losses fall, and the largest is asked for (those of prompts rise)."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    from shardwise.huggingface import ShardwiseTrainer

    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"])
    if prompts:
        model = get_peft_model(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    else:
        model = get_peft_model(gpt2(), lora)
    if several:
        model.add_adapter("other", lora)
        for param in model.parameters():
            param.requires_grad_(param.requires_grad)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": not prompts}
    args = arguments(folder, 4, **best)
    data = rows() if not prompts else [{name: value[:6] for name, value in row.items()} for row in rows()]
    return ShardwiseTrainer(model, args, plan=plan, train_dataset=data[:24], eval_dataset=data[24:])


def file_of(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(str(Path(folder) / "adapter_model.safetensors"))


@on_ranks(RANKS, timeout=200.0)
@pytest.mark.parametrize(
    ("plan", "several"),
    [*full((zero(3), False)), (zero(3, torch.bfloat16), True), *full((zero(2, torch.bfloat16), False))],
)
def test_the_best_adapter_is_loaded(plan: Plan, several: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with launched(), quiet():
        trainer = trainer_of(folder, plan, several)
        trainer.train()
        dtype = str(next(p.dtype for name, p in trainer.model.named_parameters() if "lora_" in name))
        trainer.save_model(f"{folder}/model")
        dist.barrier()
        found = {"best": file_of(trainer.state.best_model_checkpoint), "last": file_of(f"{folder}/checkpoint-4")}
        found |= {"saved": file_of(f"{folder}/model"), "dtype": dtype, "loss": trainer.evaluate()["eval_loss"]}
        found["then"] = next(e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e)
        # The model is sharded already: resuming puts the last one back, and there is nothing left to do.
        trainer.args.load_best_model_at_end = False
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        trainer.save_model(f"{folder}/resumed")
        dist.barrier()
        found["resumed"] = file_of(f"{folder}/resumed")
        trainer.accelerator.close()
    key = next(key for key in found["best"] if "lora_B" in key)
    assert not torch.equal(found["best"][key], found["last"][key])
    assert_close(found["saved"], found["best"], 0.0, "the best adapter")
    assert_close(found["resumed"], found["last"], 0.0, "the last adapter")
    assert found["loss"] == pytest.approx(found["then"], rel=1e-6) and math.isfinite(found["loss"])
    bf16 = plan.precision.param_dtype is torch.bfloat16
    assert found["dtype"] == ("torch.bfloat16" if bf16 else "torch.float32")
    if bf16:  # the file has the masters' values, and they are loaded
        assert any(not torch.equal(each, each.bfloat16().float()) for each in found["saved"].values())
