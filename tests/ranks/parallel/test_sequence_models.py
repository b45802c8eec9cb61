"""Sequence parallelism: bytes sent, dropout, refused models and inputs, registered classes, and users' forward
passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwise.core.parallel.sequence import SequenceBody, Sequences, register_sequence, share_sequences
from shardwise.core.parallel.sequence.requirements import TABLES
from shardwise.plan import SequencePlan
from shardwise.testing import assert_close
from tests.support.on_ranks import assert_refused, everywhere, on_ranks
from tests.support.sequence_setup import ROWS, Ring, averaged, batch_of, grads_of, ring_of_all
from tests.support.sets import full
from tests.support.tensor_cases import CASES, decoder
from tests.support.tensor_setup import Case, Exact

HEADS, KV_HEADS, HEAD, LAYERS, LENGTH = 8, 4, 4, 2, 16


def sharing(model: nn.Module, ring: Ring, **plan: Any) -> Sequences:
    share = share_sequences(model, SequencePlan(**plan), ring.group, ring.wire)
    share.install()
    return share


def formula(mode: str, checkpointing: bool, ranks: int) -> int:
    """Return the bytes in fp64, plus the loss, which is one fp32 number per rank, forward and backward.

    ``token`` is the size of one head on one rank.
    """
    token = ROWS * LENGTH // ranks * HEAD * 8
    if mode == "all_to_all":  # queries and outputs, keys and values: all but a rank's own share, forward and backward
        forward = backward = token * (2 * HEADS + 2 * KV_HEADS) * (ranks - 1) // ranks
    else:  # keys and values to all other ranks; in backward once more, and their gradients
        forward = token * 2 * KV_HEADS * (ranks - 1)
        backward = 2 * forward
    return LAYERS * (forward * (2 if checkpointing else 1) + backward) + 2 * 2 * (ranks - 1) * 4


@on_ranks(4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_sent_bytes_match_the_formula(mode: str, checkpointing: bool) -> None:
    """Count a forward and a backward pass on this rank's channel, and the sums over its group."""
    config = decoder("Llama", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HEADS * HEAD)
    case = replace(CASES["llama"]()[0], config=config, padded=False)
    model = case.made()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    with ring_of_all() as ring:
        share = sharing(model, ring, mode=mode)
        grads_of(model, batch_of(case, length=LENGTH), exact=False)
        share.remove()
        found = ring.wire.traffic.bytes["send"] + ring.group.traffic.bytes["all_reduce"]
    assert found == formula(mode, checkpointing, 4)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_dropout_differs_between_ranks_and_is_repeated_in_recomputation(mode: str) -> None:
    """Compare gradients with and without activation checkpointing, with every kind of dropout that a mode supports."""
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
            share = sharing(model, ring, mode=mode)
            torch.manual_seed(11)
            loss, grads = grads_of(model, batch, exact=False)
            found.append(grads | {"loss": loss})
            share.remove()
            one, other = everywhere(torch.randint(1000, ()).item())
            assert one == other  # after the body all ranks have the same random numbers
        assert_close(found[1], found[0], 0.0, mode)
        # Ranks drop different tokens: the embeddings are equal, so equal masks would leave equal outputs.
        plain = transformers.GPT2Model(transformers.GPT2Config(**sizes, **(rates | {"attn_pdrop": 0.0}))).double()
        seen: list[torch.Tensor] = []
        plain.drop.register_forward_hook(lambda *args: seen.append(args[2] == 0))
        share = sharing(plain, ring, mode=mode)
        torch.manual_seed(11)
        plain(input_ids=batch["input_ids"])
        share.remove()
        first, second = ring.axis.gathered(seen[0].double())
        assert not torch.equal(first, second)


@on_ranks(2)
def test_unsupported_models_plans_and_inputs_are_refused_on_each_rank() -> None:
    llama = CASES["llama"]()[0]
    with ring_of_all() as ring:

        def share(model: nn.Module, **plan: Any) -> Callable[[], object]:
            return lambda: share_sequences(model, SequencePlan(**plan), ring.group, ring.wire)

        def given(**inputs: Any) -> Callable[[], object]:
            return lambda: model(**(batch_of(llama) | inputs))

        def config(name: str, **changes: Any) -> nn.Module:
            return replace(llama, kind=name, config=decoder(name.split("For")[0], **changes)).made()

        t5 = config("T5ForConditionalGeneration", d_model=24, num_layers=1, d_kv=4, d_ff=8)
        one_head = config("LlamaForCausalLM", num_attention_heads=1, num_key_value_heads=1)
        mixtral = config("MixtralForCausalLM", output_router_logits=True, num_local_experts=2)
        ring_attn, kinds = {"mode": "ring_attn"}, (ValueError, NotImplementedError)
        assert_refused(
            (share(nn.Linear(2, 2)), "the sequences of a Linear cannot be divided"),
            (share(t5), "it has no module of a known class (BertModel, BloomModel"),
            (share(one_head), "1 attention heads of LlamaForCausalLM are too few for 2 sequence-parallel ranks"),
            (share(config("LlamaForCausalLM", attention_dropout=0.25), **ring_attn), "attention dropout 0.25"),
            (share(config("BertForMaskedLM"), **ring_attn), "attention dropout 0.1 (Dropout)"),
            (share(llama.made(), inner_ring=3, **ring_attn), "inner_ring=3 does not divide the 2"),
            (share(llama.made(), inner_ring=2), "inner_ring=2 needs mode='ring_attn'"),
            (share(llama.made(), architecture="LlamaModel"), "architecture='LlamaModel'"),
            (share(config("LlamaForCausalLM", attn_implementation="flex_attention")), "'flex_attention'"),
            (share(mixtral), "output_router_logits=True"),
            (share(config("OPTForCausalLM", layerdrop=0.5, ffn_dim=22)), "layerdrop=0.5"),
            error=kinds,
        )
        model, rank = llama.made(), ring.group.rank
        installed = sharing(model, ring)
        shape, ids = "shape of the batch is [3, 12] on rank 1 and [3, 11] on rank 0", (ROWS, 11)
        assert_refused(
            (given(past_key_values=transformers.DynamicCache()), "past_key_values"),
            (given(output_attentions=True), "output_attentions=True"),
            (given(attention_mask=torch.ones(ROWS, 1, 11, 11)), "attention_mask=of (3, 1, 11, 11)"),
            (given(attention_mask=torch.ones(ROWS, 9)), "attention_mask=of (3, 9)"),
            (given(inputs_embeds=torch.ones(ROWS, 11, 24)), "takes either input_ids"),
            (
                given(output_attentions=rank == 1),
                "rank 1: ValueError: output_attentions=True" if rank == 0 else "output",
            ),
            (given(input_ids=torch.full(ids, rank)), "checksum of the batch is "),
            (given(input_ids=torch.ones(ROWS, 11 + rank, dtype=torch.long)), shape),
            error=kinds,
        )
        before = grads_of(model, batch_of(llama))[0]  # the refused calls left nothing
        installed.remove()
        assert_close({"loss": before}, {"loss": grads_of(model, batch_of(llama))[0]}, 1e-11, "after what was refused")


class OwnModel(transformers.LlamaModel):
    pass


@on_ranks(2)
def test_a_class_can_be_registered() -> None:
    """A user's class is known by its base class, or by its own name once it is registered."""
    model = OwnModel(decoder("Llama"))
    with ring_of_all() as ring:
        assert type(share_sequences(model, SequencePlan(), ring.group, ring.wire).body) is OwnModel
        register_sequence("OwnModel", SequenceBody(packed=False))
        try:
            assert not share_sequences(model, SequencePlan(), ring.group, ring.wire).table.packed
        finally:
            del TABLES["OwnModel"]


LLAMA = CASES["llama"]()[0]


def named(output: Any) -> dict[str, Tensor]:
    """Return every tensor, by its position."""
    flat = [each for item in output for each in (item if isinstance(item, tuple) else [item])]
    return {str(at): each for at, each in enumerate(flat) if isinstance(each, Tensor)}


class Extended(transformers.LlamaForCausalLM):
    """A user's forward pass, whose loss uses the hidden states as well as the logits."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return {"loss": loss + states.square().mean() + (logits.argmax(-1) == labels).sum()}


def of_states(ring: Ring) -> None:
    """Hidden states of all layers are those of full sequences, with labels, too."""
    batch, plain, model = batch_of(LLAMA), LLAMA.made(), LLAMA.made()
    sequences = sharing(model, ring, mode="ring_attn")
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
    sequences = sharing(model, ring, mode="ring_attn")
    found_loss, found = grads_of(model, batch)
    assert_close({"loss": found_loss}, {"loss": loss}, 1e-11, "own forward")
    assert_close(averaged(found, ring.axis), grads, 1e-11, "own forward: gradients", floor=1e-2)
    sequences.remove()


def of_compiled(ring: Ring) -> None:
    """A model that torch.compile cannot trace runs uncompiled, once."""
    batch, plain, model = batch_of(LLAMA), LLAMA.made().float(), LLAMA.made().float()
    sequences = sharing(model, ring, mode="ring_attn")
    with torch.no_grad():
        found, expected = torch.compile(model, backend="eager")(**batch).loss, plain(**batch).loss
    assert_close({"loss": found}, {"loss": expected}, 1e-5, "compiled")
    sequences.remove()


def others_refused(ring: Ring) -> None:
    """Refuse labels and positions that are shorter than the sequence, and batches that differ between ranks."""
    batch, model, rank = batch_of(LLAMA), LLAMA.made(), ring.group.rank
    sequences = sharing(model, ring, mode="ring_attn")
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
    with Exact():  # equal on all ranks, although NaN
        assert model(inputs_embeds=embeds, labels=batch["labels"]).loss.isnan()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
        )
    with pytest.raises(ValueError, match="attend to its own part alone"), Exact():
        model(**batch)
    sequences.remove()


CHECKS: list[Callable[[Ring], None]] = [of_states, of_own_forward, others_refused]


@on_ranks(2, timeout=400.0)
@pytest.mark.parametrize("checks", [CHECKS, *full([of_compiled])], ids=["usual", "compiled"])
def test_own_forward_passes_get_full_sequences_or_an_error(checks: list[Callable[[Ring], None]]) -> None:
    with ring_of_all() as ring:
        for check in checks:
            check(ring)
