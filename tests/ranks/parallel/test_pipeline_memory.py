"""What a rank of each layout holds, against its formula."""

from __future__ import annotations

import pytest
import torch
from test_pipeline_stages import criterion
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.plan import PipelinePlan, Plan, TensorPlan
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.sets import full

VOCABULARY, WIDTH, INNER, LAYERS = 32, 16, 24, 4
NORMS = (2 * LAYERS + 1) * WIDTH


def made() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def held(plan: Plan) -> tuple[int, list[int], int, int]:
    """Parameters of this rank, those that are whole on each rank of its tensor-parallel set, and bytes."""
    model = made()
    with sharded(model, adam(model), plan) as session:
        optimizer, facts = session.optimizer, session.engine.shards.layout.facts
        ids = torch.arange(2 * 6).view(2, 6) % VOCABULARY
        batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
        if session.pipeline is not None:
            session.pipeline.step(batch, criterion, train=True)
        else:
            session.backward(session.module(**batch).loss)
        optimizer.step()
        numbers = [fact.numel for fact in facts]
        whole = [fact.numel for fact in facts if fact.part is None]
        report = session.memory()
        state = sum(t.numel() for entry in optimizer.state.values() for t in entry.values() if t.numel() > 1)
        return sum(numbers), whole, state, report.parameters_bytes
    raise AssertionError


ZBV = PipelinePlan(schedule="zbv", chunks=2)


@pytest.mark.parametrize(
    ("tp", "pp", "pipeline"),
    [
        (1, 1, PipelinePlan()),
        *full(*((tp, pp, PipelinePlan()) for tp, pp in ((2, 1), (1, 2)))),
        (2, 2, PipelinePlan()),
        *full(*((tp, pp, PipelinePlan()) for tp, pp in ((4, 1), (1, 4)))),
        (1, 2, ZBV),
        *full((2, 2, ZBV)),
    ],
)
def test_a_rank_holds_its_share_and_the_norms_of_its_layers(tp: int, pp: int, pipeline: PipelinePlan) -> None:
    """Matrices, embedding and head divide by tp and pp; norms by pp, with the last one where the last stage is, which
    under zbv is the first rank."""
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    plan = PLANS["zero1"].but(tp=tp, pp=pp, tensor=TensorPlan(vocabulary_multiple=1), pipeline=pipeline)
    ranks = max(tp * pp, 2)
    data = ranks // (tp * pp)
    found = run_ranks(ranks, held, plan)
    for rank, (numel, whole, state, nbytes) in enumerate(found):
        stage = rank // (data * tp)
        last = 0 if pipeline is ZBV else pp - 1
        ends = (stage == 0) + (stage == last)
        norms = 2 * LAYERS // pp * WIDTH + (WIDTH if stage == last else 0)
        assert sum(whole) == (norms if tp > 1 else numel)
        assert numel == matrices // (tp * pp) + ends * VOCABULARY * WIDTH // tp + norms
        assert nbytes >= numel * 4 and nbytes - numel * 4 < 64 * len(whole) * 4 + 4096
        if data == 1:
            assert state == 2 * numel
    if data > 1:
        assert sum(state for _, _, state, _ in found) == 2 * found[0][0]
    assert sum(sum(whole) for _, whole, _, _ in found[:: data * tp]) == NORMS or tp == 1
