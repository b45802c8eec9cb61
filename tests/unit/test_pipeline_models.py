"""Models that do more than a body of a known class does: in stages they are the same model, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.parallel.pipeline import Passes, StageRun, make_schedule, split_batch, stage_model
from shardwise.core.parallel.pipeline.staging import TABLES
from shardwise.testing import assert_close
from tests.support.hybrid_setup import VOCABULARY, WIDTH, made
from tests.support.tensor_setup import Exact

IDS = torch.randint(1, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(5))
BATCH = {"input_ids": IDS, "labels": IDS}


def loss_of(outputs: Any, _inputs: Any = None) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def staged(
    model: nn.Module, batch: Any, parts: int = 2, criterion: Callable[[Any, Any], Tensor] = loss_of, train: bool = True
) -> Tensor:
    """The loss of one step of two stages on this rank; gradients are added up."""
    staging = stage_model(model, 0, 1, 2)
    staging.install()
    try:
        divided = split_batch(batch, parts, None)
        schedule = make_schedule("interleaved", 1, 2, len(divided))
        loss = StageRun(staging, None).step(schedule, divided, criterion, Passes() if train else None).loss
    finally:
        staging.remove()
    assert loss is not None
    return loss


def check_is_plain(model: nn.Module, batch: Any, parts: int = 2) -> None:
    """Loss and gradients; of a batch whose rows weigh the same."""
    with Exact():
        expected = loss_of(model(**batch))
    expected.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    with Exact():
        loss = staged(model, batch, parts)
    assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-12, "loss")
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert_close(found, grads, 1e-11, "gradients", floor=1e-2)


class Wrapped(nn.Module):
    """Around a model; ``inputs(lm, input_ids)`` makes of ids what goes into it."""

    def __init__(self, inputs: Callable[[Any, Tensor], dict[str, Tensor]], **modules: nn.Module) -> None:
        super().__init__()
        self.lm = made("llama")
        self.inputs = inputs
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.lm(**self.inputs(self, input_ids), labels=labels)


def embedded(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    return lambda model, ids: {"inputs_embeds": change(model.lm.get_input_embeddings()(ids))}


PROMPT = torch.ones(1, 3, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    "inputs",
    [
        embedded(lambda x: x * 4.0),
        embedded(lambda x: torch.cat([PROMPT.expand(len(x), -1, -1), x], 1)[:, : x.shape[1]]),
        lambda _model, ids: {"inputs_embeds": torch.nn.functional.one_hot(ids % WIDTH, WIDTH).double()},
    ],
    ids=["scaled", "a prompt", "embeddings given"],
)
def test_what_is_done_between_embedding_and_layers_counts_once(inputs: Any) -> None:
    check_is_plain(Wrapped(inputs), BATCH)


def test_a_norm_behind_the_embedding_is_named_and_can_be_described(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")

    class Normed(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            given["inputs_embeds"] = self.embed_norm(self.embed_tokens(input_ids))
            return super().forward(**given)

    model.model.__class__ = Normed
    model.model.embed_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"calls model\.embed_norm before .* of Normed .*Body\.before"):
        staged(model, BATCH)
    monkeypatch.setitem(TABLES, "Normed", replace(TABLES["LlamaModel"], before=("embed_norm",)))
    check_is_plain(model, BATCH)


class Exit(nn.Module):
    def __init__(self, **asked: Any) -> None:
        super().__init__()
        self.lm, self.head = made("llama").model, nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.asked = asked

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.lm(input_ids=input_ids, **self.asked)[0]).mean()


def test_hidden_states_of_all_layers_are_refused_inside_of_a_model() -> None:
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}=True for a LlamaModel in pipeline stages"):
            staged(Exit(**{name: True}), BATCH)
    model = Exit()
    model.lm.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states=True for a LlamaModel in pipeline stages"):
        staged(model, BATCH)
    model.asked["output_hidden_states"] = False
    check_is_plain(model, BATCH)
    assert not model.lm._forward_pre_hooks


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_number_of_items_in_the_batch_is_that_of_all_micro_batches(kind: Callable[[int], Any]) -> None:
    labels = IDS.clone()
    labels[0, 2:], labels[3, 4:] = -100, -100
    for parts in (1, 3, 4):  # three: of 2, 1 and 1 rows
        check_is_plain(made("llama"), {"input_ids": IDS, "labels": labels, "num_items_in_batch": kind(17)}, parts)
