"""shardwise.shard over ranks that hold one model together: fp64 against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import shardwise
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import MAX_NORM, STEPS, VOCABULARY, Texts, made, optimizer_of, plain
from tests.support.sets import full

RANKS, BATCH = 4, 2
SETTINGS: list[dict[str, Any]] = [
    {"stage": 0, "tp": 2},
    {"stage": 3, "tp": 2, "offload": "host"},
    {"stage": 1, "pp": 2, "microbatches": 2},
    {"stage": 2, "pp": 2, "tp": 2, "sequence": "split_gather"},
    {"stage": 1, "pp": 2, "sp": 2, "microbatches": 2},
    {"stage": 2, "pp": 2, "sp": 2, "sequence": "ring_attn"},
]


def criterion(outputs: Any, inputs: Any) -> Tensor:
    # Of logits that are cut by the vocabulary the model's own loss is in fp64.
    if outputs.logits.shape[:2] != inputs["labels"].shape or outputs.logits.shape[-1] != VOCABULARY:
        return outputs.loss
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def _trained(settings: dict[str, Any]) -> None:
    model = made("llama")
    session = shardwise.shard(model, optimizer_of(model), max_norm=MAX_NORM, **settings)
    tp, pp, sp = (settings.get(name, 1) for name in ("tp", "pp", "sp"))
    assert session.data_ranks == RANKS // (tp * pp * sp)
    # Of sequences in parts the loss is transformers', which is in fp32.
    most = 1e-9 if sp == 1 else 1e-6
    texts = Texts(STEPS * BATCH * session.data_ranks)
    # Of labels that are padded unevenly the mean over micro-batches is another number than that over the batch.
    texts.items["labels"] = texts.items["input_ids"]
    sampler: Any = DistributedSampler(texts, session.data_ranks, session.data_rank, shuffle=False)
    facts = session.engine.shards.layout.facts
    oracle = plain("llama", session.data_ranks, BATCH, of_parts=sp == 1, full=True)
    for (loss, norm, values), inputs in zip(oracle, DataLoader(texts, BATCH, sampler=sampler), strict=True):
        if session.pipeline is not None:
            own = session.pipeline.everywhere(session.pipeline.step(inputs, criterion, train=True).loss)
        else:
            own = session.module(**inputs).loss
            session.backward(own)
        losses: list[Any] = [None] * RANKS
        dist.all_gather_object(losses, own.item())
        session.optimizer.step()
        assert abs(sum(losses) / RANKS - loss) < most * loss
        assert abs(session.optimizer.get_grad_norm() - norm) < most * norm
        session.optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, most, "parameters")
    session.close()


@pytest.mark.parametrize("at", [3, *full(0, 1, 2, 4, 5)])
def test_settings_over_ranks_that_hold_one_model(at: int) -> None:
    run_ranks(RANKS, _trained, SETTINGS[at])
