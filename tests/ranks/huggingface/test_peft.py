"""peft adapters on models sharded over two ranks, compared with an unsharded model (equal in fp32 to 1e-6).

Calls that must come before the model is sharded raise an error that says so. ``load_best_model_at_end`` and resuming
load adapters bit for bit.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close
from tests.support.huggingface_setup import RANKS, arguments, gpt2, launched, quiet, rows
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

pytest.importorskip("peft")
TOKENS = torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(5))
TOO_LATE = "and add adapters or parametrizations before sharding"


def config(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **changes)


def adapted(*more: str, **changes: Any) -> Any:
    """Return GPT-2 with one adapter, or several by name, that change its outputs."""
    from peft import get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(gpt2(), config(**changes))
    for name in more:
        model.add_adapter(name, config(**changes))
    return model


def adapters(model: Any) -> list[Any]:
    return [param for name, param in model.named_parameters() if "lora_" in name or "modules_to_save" in name]


def train(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None]) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


class Both:
    """A model on two ranks and the same model unsharded, both trained for a step."""

    def __init__(self, make: Callable[[], Any], stage: int) -> None:
        self.model, self.plain = make(), make()
        self.optimizer = torch.optim.AdamW(adapters(self.plain) or self.plain.parameters(), lr=0.1)
        optimizer = torch.optim.AdamW(adapters(self.model) or self.model.parameters(), lr=0.1)
        self.session: Session = shardwise.shard(self.model, optimizer, stage=stage)
        self.step()

    def step(self) -> None:
        ours = train(self.session.module, self.session.optimizer, self.session.backward)
        assert ours == pytest.approx(train(self.plain, self.optimizer, lambda loss: loss.backward()), rel=1e-6)

    def agree(self, plain: Any = None, model: Any = None) -> None:
        with torch.no_grad():
            wanted = (plain or self.plain)(input_ids=TOKENS).logits
            found = (model or self.session.module)(input_ids=TOKENS).logits
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)

    def close(self) -> None:
        self.session.close()
        self.session.mesh.close()


def switched(stage: int) -> None:
    """Disable and enable adapters, switch, merge and unmerge them; train a layer in full."""
    both = Both(lambda: adapted(modules_to_save=["lm_head"]), stage)
    with both.session.module.disable_adapter(), both.plain.disable_adapter():
        both.agree()
    both.step()
    with both.session.module.gathered(write_back=True):
        both.model.merge_adapter()
    both.agree()
    with both.session.module.gathered(write_back=True):
        both.model.unmerge_adapter()
    both.step()
    with both.session.module.gathered():
        both.agree(both.plain, both.model.merge_and_unload())
    both.close()

    def two() -> Any:
        made = adapted("other")
        for param in adapters(made):
            param.requires_grad_()
        return made

    both = Both(two, stage)
    for name in ("other", "default"):
        both.model.set_adapter(name)
        both.plain.set_adapter(name)
        both.step()
    both.session.unshard()
    both.agree(both.plain, both.model.merge_and_unload())
    both.session.mesh.close()


def saved_and_loaded(stage: int, folder: str) -> None:
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    first, own, gathered = dist.get_rank() == 0, f"{folder}/own-{stage}", f"{folder}/gathered-{stage}"
    both = Both(adapted, stage)
    state = both.session.module.state_dict()
    if first:
        both.model.save_pretrained(own, state_dict=state)
    with both.session.module.gathered():
        if first:
            both.model.save_pretrained(gathered)
    dist.barrier()
    for each in (own, gathered):
        both.agree(PeftModel.from_pretrained(gpt2(), each))
    again = Both(adapted, stage)
    again.step()  # from another directory
    with again.session.module.gathered(write_back=True):
        again.model.load_adapter(own, "default")
    again.agree(both.plain)
    again.plain.load_adapter(own, "default")
    again.model.set_adapter("default")
    again.plain.set_adapter("default")
    with again.session.module.gathered(write_back=True):
        set_peft_model_state_dict(again.model, {k: v / 2 for k, v in get_peft_model_state_dict(both.plain).items()})
    set_peft_model_state_dict(again.plain, {k: v / 2 for k, v in get_peft_model_state_dict(both.plain).items()})
    again.agree()
    again.session.module.load_state_dict(
        {k: v for k, v in both.plain.state_dict().items() if "lora_" in k}, strict=False
    )
    again.agree(both.plain)
    # An adapter that was added later is for evaluation: each rank has all of it.
    base = Both(gpt2, stage)
    with base.session.module.gathered(write_back=True):
        later = PeftModel.from_pretrained(base.model, own)
    base.agree(PeftModel.from_pretrained(base.plain, own), later)
    for each in (both, again, base):
        each.close()


def refused(stage: int, folder: str) -> None:
    from peft import PeftModel, get_peft_model

    words = f"lora_A.default.weight[\\s\\S]*{TOO_LATE}"
    both = Both(gpt2, stage)
    model = get_peft_model(both.model, config())
    raises(
        RuntimeError, r"lora_A.default.weight \(2, 8\) was added to the model after sharding: ", model, input_ids=TOKENS
    )
    raises(RuntimeError, TOO_LATE, both.session.module.state_dict)
    both.close()
    both = Both(gpt2, stage)
    own = f"{folder}/own-{stage}"
    raises(RuntimeError, words, lambda: PeftModel.from_pretrained(both.model, own, is_trainable=True))
    both.close()
    both = Both(adapted, stage)
    both.model.add_adapter("other", config())
    both.step()  # it is not active
    if stage == 3:  # peft reads the state first, which no rank has in full
        words = r"state_dict\(\) of the sharded PeftModel itself would[\s\S]*inside its gathered\("
        raises(RuntimeError, words, both.model.load_adapter, own, "default")
    else:
        for each in (both.model, both.plain):
            each.load_adapter(own, "default")
        both.agree()
    both.model.set_adapter("other")
    raises(RuntimeError, TOO_LATE, both.step)
    both.close()
    both = Both(adapted, stage)
    both.model.delete_adapter("default")
    raises(RuntimeError, "was removed from the sharded model", both.session.module, input_ids=TOKENS)
    both.close()


@on_ranks(2, timeout=300.0)
@pytest.mark.parametrize("stage", [*full(2), 3])
def test_adapters_of_a_sharded_model_equal_those_of_an_unsharded_one(stage: int, tmp_path: Path) -> None:
    with quiet():
        switched(stage)
        saved_and_loaded(stage, str(tmp_path))
        refused(stage, str(tmp_path))


pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def trainer_of(folder: str, plan: Plan, several: bool) -> Any:
    """Return a trainer whose first checkpoint counts as the best: losses fall, and the largest is the best here."""
    from peft import LoraConfig, get_peft_model

    from shardwise.huggingface import ShardwiseTrainer

    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"])
    model = get_peft_model(gpt2(), lora)
    if several:
        model.add_adapter("other", lora)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    args = arguments(folder, 4, **best)
    return ShardwiseTrainer(model, args, plan=plan, train_dataset=rows()[:24], eval_dataset=rows()[24:])


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
        bf16 = plan.precision.param_dtype is torch.bfloat16
        dtypes = {param.dtype for name, param in trainer.model.named_parameters() if "lora_" in name}
        assert dtypes == {torch.bfloat16 if bf16 else torch.float32}
        trainer.save_model(f"{folder}/model")
        dist.barrier()
        paths = trainer.state.best_model_checkpoint, f"{folder}/checkpoint-4", f"{folder}/model"
        best, last, saved = map(file_of, paths)
        loss = trainer.evaluate()["eval_loss"]
        then = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        assert loss == pytest.approx(then, rel=1e-6) and math.isfinite(loss)
        # The model is sharded already: resuming loads the last checkpoint, and no step is left to train.
        trainer.args.load_best_model_at_end = False
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        trainer.save_model(f"{folder}/resumed")
        dist.barrier()
        assert_close(file_of(f"{folder}/resumed"), last, 0.0, "the last adapter")
        trainer.accelerator.close()
    key = next(key for key in best if "lora_B" in key)
    assert not torch.equal(best[key], last[key])
    assert_close(saved, best, 0.0, "the best adapter")
    # The file has the masters' values, and these are loaded.
    assert not bf16 or any(not torch.equal(each, each.bfloat16().float()) for each in saved.values())
