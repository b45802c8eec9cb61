"""What programs do with a model whose ranks share sequences, beside one pass with labels after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwise.core.parallel.sequence import Sequences, share_sequences
from shardwise.plan import SequencePlan
from shardwise.testing import assert_close, run_ranks
from tests.support.sequence_setup import ROWS, Ring, averaged, batch_of, grads_of, ring_of_all
from tests.support.sets import full
from tests.support.tensor_cases import CASES
from tests.support.tensor_setup import Exact

LLAMA = CASES["llama"]()[0]


def shared(model: nn.Module, ring: Ring, mode: str = "ring_attn") -> Sequences:
    sequences = share_sequences(model, SequencePlan(mode=mode), ring.group, ring.wire)  # type: ignore[arg-type]
    sequences.install()
    return sequences


def named(output: Any) -> dict[str, Tensor]:
    """Every tensor, by its place."""
    flat = [each for item in output for each in (item if isinstance(item, tuple) else [item])]
    return {str(at): each for at, each in enumerate(flat) if isinstance(each, Tensor)}


class Extended(transformers.LlamaForCausalLM):
    """A forward pass of the user's own, which makes more of hidden states than logits."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return {"loss": loss + states.square().mean() + (logits.argmax(-1) == labels).sum()}


def of_states(ring: Ring) -> None:
    """All layers' states are whole, also where there are labels."""
    batch, plain, model = batch_of(LLAMA), LLAMA.made(), LLAMA.made()
    sequences = shared(model, ring)
    with Exact():
        expected, found = (each(**batch, output_hidden_states=True) for each in (plain, model))
    assert_close(named(found.hidden_states), named(expected.hidden_states), 1e-11, "states")
    sequences.remove()


def of_own_forward(ring: Ring) -> None:
    plain, model = LLAMA.made(), LLAMA.made()
    for each in (plain, model):
        each.__class__ = Extended
    batch = batch_of(LLAMA, padded="right")
    loss, grads = grads_of(plain, batch)
    sequences = shared(model, ring)
    found_loss, found = grads_of(model, batch)
    assert_close({"loss": found_loss}, {"loss": loss}, 1e-11, "own forward")
    assert_close(averaged(found, ring.axis), grads, 1e-11, "own forward: gradients", floor=1e-2)
    sequences.remove()


def of_compiled(ring: Ring) -> None:
    """What torch.compile cannot trace runs as it is, and once."""
    batch, plain, model = batch_of(LLAMA), LLAMA.made().float(), LLAMA.made().float()
    sequences = shared(model, ring)
    with torch.no_grad():
        found, expected = torch.compile(model, backend="eager")(**batch).loss, plain(**batch).loss
    assert_close({"loss": found}, {"loss": expected}, 1e-5, "compiled")
    sequences.remove()


def refused(ring: Ring) -> None:
    """What is not of whole sequences, or not the same on all ranks."""
    batch, model, rank = batch_of(LLAMA), LLAMA.made(), ring.group.rank
    sequences = shared(model, ring)
    short = batch["labels"][:, :-1]
    cases: list[tuple[str, dict[str, Tensor]]] = [
        (r"labels of \(3, 10\)", batch | {"labels": short}),
        (r"labels of \(3, 10\)", batch | {"shift_labels": short}),
        (r"position_ids of \(1, 10\)", batch | {"position_ids": torch.arange(10)[None]}),
        ("of the batch is", batch | {"input_ids": batch["input_ids"].flip(0) if rank else batch["input_ids"]}),
        ("of the batch is", batch | {"input_ids": batch["input_ids"] + rank}),
        ("of the batch is", batch | {"labels": batch["labels"].flip(0) if rank else batch["labels"]}),
        ("of the batch is", batch | {"position_ids": torch.arange(rank, 11 + rank)[None]}),
    ]
    for match, given in cases:
        with pytest.raises(ValueError, match=match), Exact():
            model(**given)
    embeds = torch.full((ROWS, 11, 24), float("nan"), dtype=torch.float64)
    with Exact():  # the same on all ranks, whatever it is
        assert model(inputs_embeds=embeds, labels=batch["labels"]).loss.isnan()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
        )
    with pytest.raises(ValueError, match="attend to its own part alone"), Exact():
        model(**batch)
    sequences.remove()


CHECKS: list[Callable[[Ring], None]] = [of_states, of_own_forward, refused]


def programs(checks: list[Callable[[Ring], None]]) -> int:
    with ring_of_all() as ring:
        for check in checks:
            check(ring)
    return len(checks)


@pytest.mark.parametrize("checks", [CHECKS, *full([of_compiled])], ids=["usual", "compiled"])
def test_programs_get_whole_sequences_or_are_told_why_not(checks: list[Callable[[Ring], None]]) -> None:
    assert run_ranks(2, programs, checks, timeout=400.0) == [len(checks)] * 2
