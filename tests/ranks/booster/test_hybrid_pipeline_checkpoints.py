"""Checkpoints of a model in pipeline stages: files have full tensors, and a run continues under other layouts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.booster_setup import SMALL
from tests.support.hybrid_setup import MAX_NORM, Texts, loss_of, made, optimizer_of
from tests.support.sets import full

REPLICAS, BATCH, STEPS = 2, 2, 4
FP32: dict[str, Any] = {"precision": "fp32", "max_norm": MAX_NORM}
hybrid = functools.partial(HybridParallelPlugin, **FP32)
stages = functools.partial(hybrid, tp_size=1, pp_size=2, num_microbatches=1)


class Marked(nn.RMSNorm):
    """A norm with a buffer and extra state; it is in the last stage."""

    marks: Tensor

    def __init__(self) -> None:
        super().__init__(24)
        self.register_buffer("marks", torch.zeros(2))
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def model_of() -> Any:
    model = made("llama", num_hidden_layers=4, tie_word_embeddings=True)
    model.model.norm = Marked().double()
    return model


def batch_of(step: int, replica: int) -> dict[str, Tensor]:
    texts, first = Texts(STEPS * REPLICAS * BATCH), (step * REPLICAS + replica) * BATCH
    return {name: values[first : first + BATCH] for name, values in texts.items.items()}


@functools.cache
def plain() -> list[dict[str, Tensor]]:
    """Return the parameters after each step."""
    batches = [[[batch_of(step, replica) for replica in range(REPLICAS)]] for step in range(STEPS)]
    loss = functools.partial(loss_of, of_parts=False)
    return train_plain(model_of, loss, optimizer_of, batches, PlainRecipe(max_norm=MAX_NORM)).masters


def one_step(booster: Booster, model: Any, optimizer: Any, step: int) -> None:
    """Train one step on the batches of both replicas; a rank without a second replica takes both batches."""
    assert booster.plugin is not None
    replica, replicas = booster.plugin.data_parallel()
    weight = replicas / REPLICAS
    for own in (replica,) if replicas == REPLICAS else range(REPLICAS):
        batch = batch_of(step, own)
        if getattr(booster.plugin, "pp_size", 1) > 1:
            booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss * weight, optimizer)
        else:
            booster.backward(model(**batch).loss * weight, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _go_on(make: Callable[[], Plugin], step: int, folder: str) -> None:
    """Load the checkpoint of the step before, train one step, and save."""
    plugin = make()
    booster, model = Booster(plugin=plugin), model_of()
    if step:
        for param in model.parameters():
            nn.init.zeros_(param)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    norm = model.unwrap().model.norm
    (replica, _), last = plugin.data_parallel(), isinstance(norm, Marked)
    if step:
        restored = booster.load_checkpoint(f"{folder}/runs", model, optimizer)
        assert restored is not None and restored.step == step and restored.user_state == step
        assert set(restored.data_positions) <= {(step, own) for own in range(REPLICAS)}
        assert restored.data_position == (step, replica if replica < restored.world_size else 0)
        assert not last or (norm.marks.tolist() == [step, step + 1] and norm.seen == 10 * step)
    one_step(booster, model, optimizer, step)
    if last:
        norm.marks.copy_(torch.tensor([step + 1.0, step + 2.0]))
        norm.seen = 10 * (step + 1)
    position = (step + 1, replica)
    booster.save_checkpoint(f"{folder}/runs", model, optimizer, data_position=position, user_state=step + 1)
    booster.save_model(model, f"{folder}/one.safetensors", use_safetensors=True)
    booster.save_model(model, f"{folder}/model", shard=True)
    state = model.state_dict()
    assert state["model.norm.marks"].tolist() == [step + 1, step + 2]
    assert state["model.norm._extra_state"] == 10 * (step + 1)
    assert len(optimizer.state_dict()["state"]) == len(list(made("llama", num_hidden_layers=4).parameters())) - 1
    booster.close()


LAYOUTS: dict[str, tuple[int, Callable[[], Plugin]]] = {
    "pp2dp2": (4, functools.partial(stages, zero_stage=1)),
    "tp2dp2": (4, functools.partial(hybrid, tp_size=2, pp_size=1, parallel_output=False)),
    "zbv2dp2": (4, functools.partial(stages, zero_stage=2, pp_style="zbv", num_model_chunks=2)),
    "pp2dp2inside": (4, functools.partial(stages, zero_stage=2, dp_outside=False)),
    "zero1": (2, functools.partial(LowLevelZeroPlugin, stage=1, **FP32)),
    "gemini": (4, functools.partial(GeminiPlugin, tp_size=2, **SMALL, **FP32)),
    "alone": (1, functools.partial(LowLevelZeroPlugin, stage=1, **FP32)),
}


@pytest.mark.parametrize(
    "way",
    [
        ("tp2dp2", "pp2dp2"),
        *full((("pp2dp2", "tp2dp2", "pp2dp2inside", "zero1"),), (("gemini", "zbv2dp2", "alone", "zbv2dp2"),)),
    ],
    ids="-".join,
)
def test_run_continues_under_other_layouts(way: tuple[str, ...], tmp_path: Path) -> None:
    expected = plain()
    for step, name in enumerate(way):
        ranks, make = LAYOUTS[name]
        run_ranks(ranks, _go_on, make, step, str(tmp_path))
        found = load_file(tmp_path / "one.safetensors")
        assert found["model.norm.marks"].tolist() == [step + 1, step + 2]
        values = expected[step]
        assert_close({name: found[name] for name in values}, values, 1e-5, f"after step {step} under {name}")
    whole: Any = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    loaded = dict(whole.named_parameters())
    assert_close({name: loaded[name].detach() for name in values}, values, 1e-5, "from_pretrained")
