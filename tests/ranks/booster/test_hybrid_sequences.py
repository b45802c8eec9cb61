"""Sequence parallelism behind the Booster, in every mode, against plain PyTorch in one process: fp64, four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import MAX_NORM, STEPS, Steps, Texts, made, optimizer_of, plain_steps
from tests.support.sets import full

RANKS, BATCH = 4, 2
RING = {"sequence_parallelism_mode": "ring_attn"}


def _trained(kind: str, given: dict[str, Any], expected: Steps, of_parts: bool) -> None:
    tp, sp = given.get("tp_size", 1), given.get("sp_size", 1)
    shared: dict[str, Any] = {"precision": "fp32", "max_norm": MAX_NORM, "enable_sequence_parallelism": True}
    if "zero_stage" in given:
        plugin: Any = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1} | shared | given)
    else:
        plugin = GeminiPlugin(**shared | given, min_chunk_size_m=0.001, search_range_m=0.001, hidden_dim=16)
    together = tp * sp
    replica, replicas = plugin.data_parallel()
    assert (replica, replicas) == (dist.get_rank() // together, RANKS // together)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Texts(STEPS * replicas * BATCH), BATCH)
    model = made(kind)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    session = plugin.session(model)
    assert (session.mesh.sequence.size, session.mesh.tensor.size) == (sp, tp)
    facts = session.engine.shards.layout.facts
    most = 1e-9 if of_parts else 1e-6
    for (loss, norm, values), inputs in zip(expected, loader, strict=True):
        own = model(**inputs).loss
        told: list[Any] = [None] * RANKS
        dist.all_gather_object(told, own.item())
        for first in range(0, RANKS, together):
            assert told[first : first + together] == [told[first]] * together, "ranks that share a batch"
        booster.backward(own, optimizer)
        optimizer.step()
        assert abs(sum(told) / RANKS - loss) < most * loss
        assert abs(optimizer.get_grad_norm() - norm) < most * norm
        optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, most, "parameters")
    whole = model.state_dict()
    if dist.get_rank() == 0:
        assert_close({name: whole[name] for name in values}, values, most, "the whole state")
    booster.close()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llama", {"sp_size": 2, "zero_stage": 1}),
        *full(
            ("gpt2", {"sp_size": 4, **RING, "inner_ring_size": 2, "zero_stage": 2}),
            ("bert", {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", "zero_stage": 1}),
        ),
        ("llama", {"tp_size": 2, "sp_size": 2, **RING, "zero_stage": 0}),
        ("llama", {"tp_size": 2, "zero_stage": 2}),
        *full(("gpt2", {"tp_size": 4, "enable_sequence_overlap": True, "zero_stage": 1}), ("llama", {"tp_size": 2})),
    ],
    ids=str,
)
def test_every_mode_equals_plain_pytorch(kind: str, given: dict[str, Any]) -> None:
    # transformers casts logits to fp32 for its loss, whose sums round in another order over parts of sequences; a loss
    # of a vocabulary that is cut does not cast those of fp64.
    tp = given.get("tp_size", 1)
    of_parts = kind != "bert" and tp > 1
    expected = plain_steps(kind, RANKS // (tp * given.get("sp_size", 1)), BATCH, of_parts)
    run_ranks(RANKS, _trained, kind, given, expected, of_parts, timeout=120.0)


def _staged(kind: str, given: dict[str, Any], changes: dict[str, Any], expected: Steps) -> None:
    shared: dict[str, Any] = {"sp_size": 2, "enable_sequence_parallelism": True, "max_norm": MAX_NORM, "zero_stage": 1}
    plugin = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 2, "precision": "fp32"} | shared | given)
    assert plugin.data_parallel() == (0, 1)
    texts = Texts(STEPS * 2 * BATCH)
    texts.items["labels"] = texts.items["input_ids"]  # as many in each micro-batch
    loader = plugin.prepare_dataloader(texts, 2 * BATCH)
    booster = Booster(plugin=plugin)
    model = made(kind, **changes)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    batches, right = iter(loader), {}
    for loss, norm, values in expected:
        out = booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, optimizer, broadcast_loss=True)
        optimizer.step()
        assert abs(out["loss"].item() - loss) < 1e-6 * loss
        assert abs(optimizer.get_grad_norm() - norm) < 1e-6 * norm
        optimizer.zero_grad()
        right = values
    whole = model.state_dict()
    if dist.get_rank() == 0:
        assert_close({name: whole[name] for name in right}, right, 1e-6, "the whole state")
    booster.close()


@pytest.mark.parametrize(
    ("kind", "given", "changes"),
    [
        *full(("bert", {"num_microbatches": 2}, {})),
        ("gpt2", {**RING, "num_microbatches": 2, "zero_stage": 2}, {}),
        *full(("llama", {"pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 4}, {"num_hidden_layers": 4})),
    ],
    ids=str,
)
def test_the_stages_of_a_pipeline_share_sequences(kind: str, given: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = plain_steps(kind, 1, 2 * BATCH, False, True, **changes)
    run_ranks(RANKS, _staged, kind, given, changes, expected, timeout=120.0)


def _sent(compress: bool) -> tuple[float, int, float]:
    """The loss of a step, bytes from rank to rank, and the norm."""
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=1,
        sp_size=2,
        zero_stage=1,
        precision="fp32",
        enable_sequence_parallelism=True,
        fp8_communication=compress,
    )
    booster = Booster(plugin=plugin)
    model = made("llama", torch.float32)
    loader = plugin.prepare_dataloader(Texts(BATCH), BATCH)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    (inputs,) = loader
    loss = model(**inputs).loss
    booster.backward(loss, optimizer)
    sent = plugin.session(model).traffic()["send"]
    optimizer.step()
    norm = optimizer.get_grad_norm()
    booster.close()
    assert norm is not None
    return loss.item(), sent, norm


def test_heads_travel_in_8_bits() -> None:
    """Of every four bytes of heads one, and one for each 128; the sums of the loss and the gathers stay as they are."""
    wide, narrow = run_ranks(2, _sent, False), run_ranks(2, _sent, True)
    for (loss, sent, norm), (other, less, near) in zip(wide, narrow, strict=True):
        assert other != loss and abs(other - loss) < 0.02 * loss
        assert near != norm and abs(near - norm) < 0.1 * norm
        rest = 4 * 2 * BATCH  # numbers and losses, there and back
        assert 0 <= less - rest < (sent - rest) * 0.27
