"""What ranks that share sequences send, draw and refuse, and what programs do with their model."""

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
    """In fp64, but the loss: one number a rank in fp32, there and back. ``token``: what a rank has, for one head."""
    token = ROWS * LENGTH // ranks * HEAD * 8
    if mode == "all_to_all":  # queries and outputs, keys and values: all but a rank's own share, there and back
        forward = backward = token * (2 * HEADS + 2 * KV_HEADS) * (ranks - 1) // ranks
    else:  # keys and values to all others; backward once more, and their gradients
        forward = token * 2 * KV_HEADS * (ranks - 1)
        backward = 2 * forward
    return LAYERS * (forward * (2 if checkpointing else 1) + backward) + 2 * 2 * (ranks - 1) * 4


@on_ranks(4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_bytes_sent_are_the_formula(mode: str, checkpointing: bool) -> None:
    """Of a pass, forward and backward, on this rank's wire, and of the sums over its group."""
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
def test_ranks_drop_tokens_of_their_own_and_layers_computed_again_the_same(mode: str) -> None:
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
            share = sharing(model, ring, mode=mode)
            torch.manual_seed(11)
            loss, grads = grads_of(model, batch, exact=False)
            found.append(grads | {"loss": loss})
            share.remove()
            one, other = everywhere(torch.randint(1000, ()).item())
            assert one == other  # behind the body all ranks draw alike
        assert_close(found[1], found[0], 0.0, mode)
        # Tokens of a rank are dropped by its own numbers: all embeddings are alike, and so would be what is left.
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
def test_what_ranks_that_share_sequences_do_not_take_is_refused_on_each() -> None:
    """By a model, a plan or an input."""
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
        before = grads_of(model, batch_of(llama))[0]  # nothing of it is left
        installed.remove()
        assert_close({"loss": before}, {"loss": grads_of(model, batch_of(llama))[0]}, 1e-11, "after what was refused")


class OwnModel(transformers.LlamaModel):
    pass


@on_ranks(2)
def test_a_class_can_be_registered() -> None:
    """An outsider's class, which is known by the class that it is derived from, or by its own name."""
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
    """What torch.compile cannot trace runs as it is, and once."""
    batch, plain, model = batch_of(LLAMA), LLAMA.made().float(), LLAMA.made().float()
    sequences = sharing(model, ring, mode="ring_attn")
    with torch.no_grad():
        found, expected = torch.compile(model, backend="eager")(**batch).loss, plain(**batch).loss
    assert_close({"loss": found}, {"loss": expected}, 1e-5, "compiled")
    sequences.remove()


def others_refused(ring: Ring) -> None:
    """What is not of whole sequences, or not the same on all ranks."""
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
    with Exact():  # the same on all ranks, whatever it is
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
def test_programs_get_whole_sequences_or_are_told_why_not(checks: list[Callable[[Ring], None]]) -> None:
    with ring_of_all() as ring:
        for check in checks:
            check(ring)
