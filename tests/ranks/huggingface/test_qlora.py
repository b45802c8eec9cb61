"""QLoRA: adapters over packed weights of bitsandbytes on two ranks train and save bit for bit as in one process.

Source: Dettmers et al., arXiv 2305.14314; transformers' ``BitsAndBytesConfig``; peft's
``prepare_model_for_kbit_training``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import told
from tests.support.huggingface_setup import launched
from tests.support.packed_setup import (
    HIDDEN,
    INNER,
    LAYERS,
    LENGTH,
    TARGETS,
    VOCABULARY,
    adamw,
    adapted,
    base,
    packed,
    silent,
    train,
)
from tests.support.sets import full

for needed in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(needed)

RANKS = 2
Way = tuple[int, int, bool, bool]  # bits, stage, whether on a disk, whether activations are recomputed
SAVED: list[Way] = [(4, 3, False, True), (8, 3, False, True)]
OTHERS: list[Way] = [
    (4, 0, False, True),
    (4, 3, False, False),
    (4, 3, True, True),
    (8, 3, False, False),
    (8, 3, True, False),
]
State = dict[str, Tensor]


Ended = tuple[list[float], State, Tensor]


def trained(model: nn.Module, backward: Callable[[Tensor], object], optimizer: Any) -> Ended:
    """Return losses, the state, and logits of an evaluation, where layers may pack their weights in another order."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = train(model, backward, update)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        return losses, state, model(input_ids=torch.arange(LENGTH)[None]).logits


def plainly(where: str, bits: int, checkpointing: bool) -> Ended:
    model = adapted(where, bits, checkpointing)
    packs_for_evaluation(model, False)  # the kernel of bitsandbytes wants full blocks per row, and computes in bf16
    return trained(model, lambda loss: loss.backward(), adamw(model))


def packs_for_evaluation(model: nn.Module, packs: bool) -> None:
    """Pretend that the CPU is, or is not, one on which bitsandbytes packs weights for evaluation."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = packs


def on_rank(where: str, folder: str, ways: list[Way], wanted: dict[tuple[int, bool], Ended]) -> None:
    with launched(), silent():
        for number, way in enumerate(ways):
            bits, stage, disk, checkpointing = way
            losses, state, logits = wanted[bits, checkpointing]
            model = adapted(where, bits, checkpointing)
            packs_for_evaluation(model, True)
            offload = os.path.join(folder, f"disk-{number}") if disk else None
            if offload is not None:
                os.makedirs(offload, exist_ok=True)
            session = shardwise.shard(model, adamw(model), stage=stage, offload=offload)
            found_losses, found, found_logits = trained(session.module, session.backward, session.optimizer)
            assert found_losses == losses and list(found) == list(state), way
            differ = [name for name in state if not torch.equal(state[name], found[name])]
            assert not differ and torch.equal(found_logits, logits), (way, differ[:3])
            held = {tier: each.get("parameters", 0) for tier, each in session.memory().by_tier.items()}
            assert held["disk" if disk else "device"] == formula(bits, stage), way
            assert not any(held[tier] for tier in ("host", "device" if disk else "disk")), way
            if ways == SAVED:
                session.checkpoints.save(folder, f"bits-{bits}")
                save_as_theirs(session, where, folder, bits)
            session.close()
            session.mesh.close()


def save_as_theirs(session: Session, where: str, folder: str, bits: int) -> None:
    """Save the adapter alone, and a base model, whose packed weights transformers requests from the model."""
    state, first = session.module.state_dict(), session.mesh.rank == 0
    if first:
        session.module.unwrap().save_pretrained(os.path.join(folder, f"adapter-{bits}"), state_dict=state)
    model = packed(where, bits)
    base_alone = shardwise.shard(model, stage=3)
    with base_alone.module.gathered():
        if first:
            model.save_pretrained(os.path.join(folder, f"packed-{bits}"))
    base_alone.close()
    base_alone.mesh.close()


def formula(bits: int, stage: int) -> int:
    """Return the bytes of parameters on a rank: packed numbers, the other parameters in fp32, and the trained ones."""
    square, narrow, wide = HIDDEN * HIDDEN, HIDDEN * HIDDEN // 2, HIDDEN * INNER
    weights = LAYERS * (2 * square + 2 * narrow + 3 * wide) * bits // 8
    others = 4 * (2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN)
    adapters = 4 * LAYERS * 4 * (2 * HIDDEN + HIDDEN + HIDDEN // 2 + INNER + HIDDEN)
    return (weights + others + adapters) // (RANKS if stage == 3 else 1)


@pytest.mark.parametrize("ways", [SAVED, *full(OTHERS)], ids=["saved", "others"])
def test_packed_weights_are_sharded_and_adapters_train_as_in_one_process(ways: list[Way], tmp_path: Path) -> None:
    with silent():
        where = base(str(tmp_path))
        wanted = {key: plainly(where, *key) for key in {(bits, checkpointing) for bits, _, _, checkpointing in ways}}
    run_ranks(RANKS, on_rank, where, str(tmp_path), ways, wanted, timeout=300.0)
    if ways == SAVED:
        back_again(where, str(tmp_path), {bits: state for (bits, _), (_, state, _) in wanted.items()})


def back_again(where: str, folder: str, saved: dict[int, State]) -> None:
    """Load what two ranks saved in one process, by shardwise, peft and transformers; check what is refused."""
    from peft import PeftModel

    with silent():
        for bits, state in saved.items():
            model = adapted(where, bits)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            session = shardwise.shard(model, adamw(model), stage=3)
            session.checkpoints.load(folder, f"bits-{bits}")
            loaded = session.module.state_dict()
            assert all(torch.equal(loaded[name], state[name]) for name in state)
            refused(session, loaded)
            session.close()
            session.mesh.close()
            own, read = packed(where, bits).state_dict(), packed(os.path.join(folder, f"packed-{bits}"), bits)
            assert all(torch.equal(value, own[name]) for name, value in read.state_dict().items())
            adapter = PeftModel.from_pretrained(read, os.path.join(folder, f"adapter-{bits}")).state_dict()
            assert set(adapter) == set(state)
            assert all(torch.equal(adapter[name], state[name]) for name in state)


def refused(session: Session, state: State) -> None:
    name = "base_model.model.model.layers.0.self_attn.k_proj.weight"
    assert f"{name}: torch.float32 instead of" in told(
        lambda: session.module.load_state_dict(state | {name: state[name].float()})
    )
    for key in (key for key in state if key.startswith(name + ".quant_state.")):
        assert f"{key} is recomputed whenever the model is saved" in told(
            lambda key=key: session.module.load_state_dict(state | {key: state[key] + 1}), ValueError
        )


def boosted(where: str, bits: int) -> None:
    """Let the Booster pack the weights: they equal those of ``from_pretrained``, and train in the same way."""
    from accelerate.utils import BnbQuantizationConfig
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    how: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        how["bnb_4bit_compute_dtype"] = torch.float32
    lora = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    plain = LlamaForCausalLM.from_pretrained(where, dtype=torch.float32)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    models = []
    for make in (
        lambda: get_peft_model(packed(where, bits), lora),
        lambda: booster.enable_lora(plain, None, lora, BnbQuantizationConfig(**how), quantize=True),
    ):
        torch.manual_seed(1)
        models.append(make().train())
    theirs, own = (dict(each.named_parameters()) for each in models)
    assert list(theirs) == list(own)
    codes = 0
    for name, value in theirs.items():
        codes += value.dtype in (torch.uint8, torch.int8)
        assert type(own[name]) is type(value) and torch.equal(own[name].data, value.data), name
        assert own[name].requires_grad == value.requires_grad == ("lora_" in name), name
    assert codes == 7 * LAYERS
    expected = adamw(models[0])
    model, optimizer, *_ = booster.boost(models[1], adamw(models[1]))
    for seed in range(3):
        rows = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        losses = [each(input_ids=rows, labels=rows).loss for each in (models[0], model)]
        losses[0].backward()
        booster.backward(losses[1], optimizer)
        for each in (expected, optimizer):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0.0)
    booster.close()


@pytest.mark.parametrize("bits", [4, *full(8)])
def test_the_booster_packs(bits: int, tmp_path: Path) -> None:
    run_ranks(2, boosted, base(str(tmp_path)), bits, timeout=200.0)
