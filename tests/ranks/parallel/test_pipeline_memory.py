"""What a rank of each layout holds, against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_pipeline_stages import criterion
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.plan import PipelinePlan, TensorPlan
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

VOCABULARY, WIDTH, INNER, LAYERS = 32, 16, 24, 4


def made() -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, tie_word_embeddings=False))


ZBV = PipelinePlan(schedule="zbv", chunks=2)


@on_ranks(4)
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
    plan = PLANS["zero1"].but(tp=tp, pp=pp, tensor=TensorPlan(vocabulary_multiple=1), pipeline=pipeline)
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    stage, last = dist.get_rank() * pp // 4, 0 if pipeline == ZBV else pp - 1
    norms = 2 * LAYERS // pp * WIDTH + (WIDTH if stage == last else 0)
    ends = (stage == 0) + (stage == last)
    model = made()
    with sharded(model, adam(model), plan) as session:
        ids = torch.arange(2 * 6).view(2, 6) % VOCABULARY
        batch = {"input_ids": ids, "labels": ids}
        if session.pipeline is not None:
            session.pipeline.step(batch, criterion, train=True)
        else:
            session.backward(session.module(**batch).loss)
        session.optimizer.step()
        facts = session.engine.shards.layout.facts
        numel, whole = sum(fact.numel for fact in facts), [fact.numel for fact in facts if fact.part is None]
        assert sum(whole) == (norms if tp > 1 else numel)
        assert numel == matrices // (tp * pp) + ends * VOCABULARY * WIDTH // tp + norms
        assert 0 <= session.memory().parameters_bytes - numel * 4 < 64 * len(whole) * 4 + 4096
        moments = [t.numel() for entry in session.optimizer.state.values() for t in entry.values() if t.numel() > 1]
        assert sum(session.mesh.world.exchange_object(sum(moments))) == 2 * numel
