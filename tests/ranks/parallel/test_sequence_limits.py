"""What ranks that share sequences send, draw and refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardwise.core.parallel.sequence import SequenceBody, register_sequence, share_sequences
from shardwise.core.parallel.sequence.requirements import TABLES
from shardwise.plan import SequencePlan
from shardwise.testing import assert_close, run_ranks
from tests.support.sequence_setup import ROWS, batch_of, grads_of, ring_of_all
from tests.support.tensor_cases import CASES, decoder
from tests.support.tensor_setup import Case

HEADS, KV_HEADS, HEAD, LAYERS, LENGTH = 8, 4, 4, 2, 16


def sent(mode: str, checkpointing: bool) -> int:
    """Bytes of a pass, forward and backward, on this rank's wire, and of the sums over its group."""
    config = decoder("Llama", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HEADS * HEAD)
    case = replace(CASES["llama"]()[0], config=config, padded=False)
    model = case.made()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    with ring_of_all() as ring:
        share = share_sequences(model, SequencePlan(mode=mode), ring.group, ring.wire)  # type: ignore[arg-type]
        share.install()
        grads_of(model, batch_of(case, length=LENGTH), exact=False)
        share.remove()
        return ring.wire.traffic.bytes["send"] + ring.group.traffic.bytes["all_reduce"]


def formula(mode: str, checkpointing: bool, ranks: int) -> int:
    """In fp64, but the loss: one number a rank in fp32, there and back. ``token``: what a rank has, for one head."""
    token = ROWS * LENGTH // ranks * HEAD * 8
    if mode == "all_to_all":  # queries and outputs, keys and values: all but a rank's own share, there and back
        forward = backward = token * (2 * HEADS + 2 * KV_HEADS) * (ranks - 1) // ranks
    else:  # keys and values to all others; backward once more, and their gradients
        forward = token * 2 * KV_HEADS * (ranks - 1)
        backward = 2 * forward
    return LAYERS * (forward * (2 if checkpointing else 1) + backward) + 2 * 2 * (ranks - 1) * 4


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_bytes_sent_are_the_formula(mode: str) -> None:
    for checkpointing in (False, True):
        assert set(run_ranks(4, sent, mode, checkpointing)) == {formula(mode, checkpointing, 4)}


def dropped(mode: str) -> tuple[list[float], bool]:
    """With dropout of all kinds that a mode has: gradients without and with layers that are computed twice."""
    rates = {"attn_pdrop": 0.3 if mode == "all_to_all" else 0.0, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 6, "vocab_size": 29, "pad_token_id": 27}
    case = Case("GPT2LMHeadModel", transformers.GPT2Config(**sizes, **rates), CASES["gpt2"]()[0].inputs)
    batch = batch_of(case)
    with ring_of_all() as ring:
        found = []
        for checkpointing in (False, True):
            model = case.made()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            share = share_sequences(model, SequencePlan(mode=mode), ring.group, ring.wire)  # type: ignore[arg-type]
            share.install()
            torch.manual_seed(11)
            found.append(grads_of(model, batch, exact=False))
            share.remove()
            after = torch.randint(1000, ()).item()
        assert_close({"loss": found[1][0]}, {"loss": found[0][0]}, 0.0, mode)
        assert_close(found[1][1], found[0][1], 0.0, mode)
        # Tokens of a rank are dropped by its own numbers: all embeddings are alike, and so would be what is left.
        plain = transformers.GPT2Model(transformers.GPT2Config(**sizes, **(rates | {"attn_pdrop": 0.0}))).double()
        seen: list[torch.Tensor] = []
        plain.drop.register_forward_hook(lambda *args: seen.append(args[2] == 0))
        share = share_sequences(plain, SequencePlan(mode=mode), ring.group, ring.wire)  # type: ignore[arg-type]
        share.install()
        torch.manual_seed(11)
        plain(**{"input_ids": batch["input_ids"]})
        share.remove()
        patterns = ring.axis.gathered(seen[0].double())
        return [float(after)], all(not torch.equal(each, patterns[0]) for each in patterns[1:])


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_ranks_drop_tokens_of_their_own_and_layers_computed_again_the_same(mode: str) -> None:
    found = run_ranks(2, dropped, mode)
    assert all(differ for _, differ in found)
    assert len({tuple(after) for after, _ in found}) == 1  # behind the body all ranks draw alike


class Other(nn.Module):
    pass


def told(attempt: Callable[[], object]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as error:
        attempt()
    return str(error.value)


def refused() -> list[str]:
    """By a model, a plan or an input that ranks which share sequences do not take."""
    llama = CASES["llama"]()[0]
    found = []
    with ring_of_all() as ring:

        def share(model: nn.Module, **plan: Any) -> Callable[[], object]:
            return lambda: share_sequences(model, SequencePlan(**plan), ring.group, ring.wire)

        def given(**inputs: Any) -> Callable[[], object]:
            return lambda: model(**(batch_of(llama) | inputs))

        def config(name: str, **changes: Any) -> nn.Module:
            return replace(llama, kind=name, config=decoder(name.split("For")[0], **changes)).made()

        found += [
            told(share(Other())),
            told(share(config("T5ForConditionalGeneration", d_model=24, num_layers=1, d_kv=4, d_ff=8))),
            told(share(config("LlamaForCausalLM", num_attention_heads=1, num_key_value_heads=1))),
            told(share(config("LlamaForCausalLM", attention_dropout=0.25), mode="ring_attn")),
            told(share(config("BertForMaskedLM"), mode="ring_attn")),
            told(share(llama.made(), mode="ring_attn", inner_ring=3)),
            told(share(llama.made(), inner_ring=2)),
            told(share(llama.made(), architecture="LlamaModel")),
            told(share(config("LlamaForCausalLM", attn_implementation="flex_attention"))),
            told(share(config("MixtralForCausalLM", output_router_logits=True, num_local_experts=2))),
            told(share(config("OPTForCausalLM", layerdrop=0.5, ffn_dim=22))),
        ]
        model = llama.made()
        sharing = share_sequences(model, SequencePlan(), ring.group, ring.wire)
        sharing.install()
        found += [
            told(given(past_key_values=transformers.DynamicCache())),
            told(given(output_attentions=True)),
            told(given(attention_mask=torch.ones(ROWS, 1, 11, 11))),
            told(given(attention_mask=torch.ones(ROWS, 9))),
            told(given(inputs_embeds=torch.ones(ROWS, 11, 24))),
            told(given(output_attentions=ring.group.rank == 1)),
            told(given(input_ids=torch.full((ROWS, 11), ring.group.rank))),
            told(given(input_ids=torch.ones(ROWS, 11 + ring.group.rank, dtype=torch.long))),
        ]
        before = grads_of(model, batch_of(llama))[0]  # nothing of it is left
        sharing.remove()
        assert_close({"loss": before}, {"loss": grads_of(model, batch_of(llama))[0]}, 1e-11, "after what was refused")
    return found


EXPECTED = (
    "the sequences of a Other cannot be divided",
    "it has no module of a known class (BertModel, BloomModel",
    "1 attention heads of LlamaForCausalLM are too few for 2 sequence-parallel ranks",
    "attention dropout 0.25",
    "attention dropout 0.1 (Dropout)",
    "inner_ring=3 does not divide the 2",
    "inner_ring=2 needs mode='ring_attn'",
    "architecture='LlamaModel'",
    "attn_implementation='flex_attention'",
    "output_router_logits=True",
    "layerdrop=0.5",
    "past_key_values",
    "output_attentions=True",
    "attention_mask=of (3, 1, 11, 11)",
    "attention_mask=of (3, 9)",
    "takes either input_ids",
    "rank 1: ValueError: output_attentions=True",
    "checksum of the batch is ",
    "shape of the batch is [3, 12] on rank 1 and [3, 11] on rank 0",
)


def test_what_ranks_that_share_sequences_do_not_take_is_refused_on_each() -> None:
    for found in run_ranks(2, refused):
        assert len(found) == len(EXPECTED)
        for text, part in zip(found, EXPECTED, strict=True):
            assert any(each in text for each in part.split(" or "))


class OwnModel(transformers.LlamaModel):
    pass


def registered() -> list[str]:
    """An outsider's class, which is known by the class that it is derived from, or by its own name."""
    config = decoder("Llama")
    with ring_of_all() as ring:
        kinds = []
        share = share_sequences(OwnModel(config), SequencePlan(), ring.group, ring.wire)
        kinds.append(type(share.body).__name__)
        register_sequence("OwnModel", SequenceBody(packed=False))
        try:
            share = share_sequences(OwnModel(config), SequencePlan(), ring.group, ring.wire)
            kinds.append(str(share.table.packed))
        finally:
            del TABLES["OwnModel"]
        return kinds


def test_a_class_can_be_registered() -> None:
    assert run_ranks(2, registered) == [["OwnModel", "False"]] * 2
