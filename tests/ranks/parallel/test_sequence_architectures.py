"""Models of every architecture under sequence parallelism, compared with the same models on one rank in fp64."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.parallel.sequence import known_sequences, share_sequences
from shardwise.plan import SequencePlan
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks
from tests.support.sequence_setup import ROWS, Ring, batch_of, compare, ring_of_all
from tests.support.sets import campaign, full
from tests.support.tensor_cases import CASES, adapted, decoder
from tests.support.tensor_setup import Case, Exact

# The cases of each architecture: a language model with padding on both sides, and others with padding on the right
# (implementations differ in what a padding token before all other tokens attends to).
CHOSEN: dict[str, tuple[int, ...]] = {
    "bert": (0, 1, 2, 5, 7, 10),
    "bloom": (0, 1, 2, 4),
    "cohere": (0,),
    "deepseek_v2": (0,),
    "deepseek_v3": (0,),
    "falcon": (0, 1, 2, 3, 5),
    "gemma2": (0, 2),
    "gemma3": (0, 1),
    "gpt2": (0, 3, 5, 7),
    "gpt_neox": (0, 2, 3),
    "gptj": (0, 1, 3),
    "mistral": (0, 2),
    "mixtral": (3,),
    "opt": (0, 1, 2, 4),
    "phi3": (0,),
    "qwen2": (0, 3),
    "qwen3": (1, 2),
    "qwen3_moe": (0,),
}


@on_ranks(timeout=400.0)
@pytest.mark.parametrize(
    ("ranks", "mode", "heads"),
    [(2, "all_to_all", 1), *full((2, "ring_attn", 1), (4, "ring_attn", None)), *campaign((2, "all_to_all", None))],
)
def test_sequence_parallel_architectures_equal_one_rank(ranks: int, mode: str, heads: int | None) -> None:
    """Run all cases of each architecture, or the first ``heads``."""
    count = 0
    with ring_of_all() as ring:
        for name, chosen in CHOSEN.items():
            cases = CASES[name]()
            for at in chosen[:heads]:
                causal = cases[at].kind.endswith(("ForCausalLM", "LMHeadModel"))
                batch = batch_of(cases[at], length=11 + count % 3, padded="both" if causal else "right")
                inner = 2 if mode == "ring_attn" and count % 2 else None
                plan = SequencePlan(mode=mode, inner_ring=inner, parallel_output=count % 3 > 0)  # type: ignore[arg-type]
                compare(cases[at], batch, plan, ring)
                count += 1


def others() -> list[tuple[Case, dict[str, Tensor]]]:
    """Return cases with further inputs than ids and masks, with other rotary embeddings, and with short sequences."""
    llama, packed = CASES["llama"]()[0], {"padded": "", "packed": True}
    batch = batch_of(llama, **packed)  # type: ignore[arg-type]
    embeds = torch.randn(ROWS, 11, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    longer: dict[str, Any] = {"max_position_embeddings": 8}
    ropes = [{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}]
    ropes += [{"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 2, "long_factor": [3.0, 5.0]}]
    ropes[1] |= {"original_max_position_embeddings": 8, "factor": 4.0}
    turned = [replace(llama, config=decoder("Llama", rope_parameters=rope, **longer)) for rope in ropes]
    bert = CASES["bert"]()[0]
    types = {"token_type_ids": torch.arange(11).expand(ROWS, -1) // 6}
    return [
        (llama, {**{k: v for k, v in batch.items() if k != "input_ids"}, "inputs_embeds": embeds}),
        (llama, batch | {"num_items_in_batch": torch.tensor(17.0, dtype=torch.float64)}),
        (llama, batch | {"shift_labels": batch["labels"].roll(1, 1)}),
        (llama, batch | {"logits_to_keep": 0}),
        *[(case, batch_of(case)) for case in turned],
        (llama, batch_of(llama, length=2)),
        (llama, batch_of(llama, length=5, padded="right")),
        (bert, batch_of(bert) | types | {"position_ids": torch.arange(11).flip(0).expand(ROWS, -1)}),
    ]


def outputs(case: Case, ring: Ring, mode: str) -> None:
    """Check a model without labels: logits, hidden states and generated tokens are those of full sequences."""
    plain, model = case.made().eval(), case.made().eval()
    batch = {name: value for name, value in batch_of(case, padded="right").items() if name != "labels"}
    with torch.no_grad(), Exact():
        expected = plain(**batch, output_hidden_states=True)
        tokens = plain.generate(batch["input_ids"][:, :5], max_new_tokens=4, use_cache=False, do_sample=False)  # type: ignore[operator]
    share = share_sequences(model, SequencePlan(mode=mode), ring.group, ring.wire)  # type: ignore[arg-type]
    share.install()
    with torch.no_grad(), Exact():
        found = model(**batch, output_hidden_states=True)
        listed = model(**batch, return_dict=False)
        made = model.generate(batch["input_ids"][:, :5], max_new_tokens=4, use_cache=False, do_sample=False)  # type: ignore[operator]
    share.remove()
    assert len(found.hidden_states) == len(expected.hidden_states) and found.past_key_values is None
    names = [f"state {at}" for at in range(len(expected.hidden_states))]
    states = dict(zip(names, found.hidden_states, strict=True)) | {"logits": found.logits, "listed": listed[0]}
    wanted = dict(zip(names, expected.hidden_states, strict=True))
    assert_close(states, wanted | dict.fromkeys(("logits", "listed"), expected.logits), 1e-11, mode)
    assert torch.equal(made, tokens)


@on_ranks(timeout=400.0)
@pytest.mark.parametrize(
    ("ranks", "mode", "heads"), [(2, "ring_attn", 1), *full((4, "all_to_all", None), (2, "ring_attn", None))]
)
def test_llama_inputs_and_adapters(ranks: int, mode: str, heads: int | None) -> None:
    """Run every head (or the first ``heads``) with padding, without, and packed; then further inputs, and LoRA
    adapters."""
    with ring_of_all() as ring:
        for at, case in enumerate(CASES["llama"]()[:heads]):
            for options in ({}, {"padded": "both"}, {"packed": True}):
                plan = SequencePlan(mode=mode, parallel_output=at % 2 == 0)  # type: ignore[arg-type]
                compare(case, batch_of(case, **options), plan, ring, passes=2)  # type: ignore[arg-type]
        for case, batch in [*others(), *((case, batch_of(case, padded="both")) for case in adapted())]:
            compare(case, batch, SequencePlan(mode=mode), ring)  # type: ignore[arg-type]
        outputs(CASES["llama"]()[0], ring, mode)


@on_ranks(2)
def test_packed_rows_with_a_cache_warn_once() -> None:
    """transformers would mask them as one document; there is no warning without a cache, or with one document per
    row."""
    with ring_of_all() as ring:
        case = CASES["llama"]()[0]
        for use_cache, packed, count in ((True, True, 1), (False, True, 0), (True, False, 0)):
            model = case.made().train()
            model.config.use_cache = use_cache
            share = share_sequences(model, SequencePlan(), ring.group, ring.wire)
            share.install()
            batch = batch_of(case, padded="", packed=packed)
            # Other tests in this process may have changed the filters.
            with warnings.catch_warnings(record=True, action="default") as caught:
                for _ in range(2):
                    model(**batch)
            share.remove()
            assert sum("set model.config.use_cache = False" in str(each.message) for each in caught) == count


def test_every_known_class_is_compared() -> None:
    """Compare the known classes with the base classes of the cases above."""
    compared = {"OPTDecoder" if name == "opt" else _base(case.kind) for name in CHOSEN for case in CASES[name]()}
    assert compared | {"LlamaModel"} == set(known_sequences())


def _base(kind: str) -> str:
    stem = kind.replace("LMHeadModel", "For").replace("DoubleHeadsModel", "For").split("For")[0].removesuffix("Model")
    return {"Gemma3": "Gemma3TextModel"}.get(stem, f"{stem}Model")
