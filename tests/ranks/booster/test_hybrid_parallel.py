"""HybridParallelPlugin: tensor and sequence parallelism on four ranks against plain PyTorch in one process (fp64)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.shardformer import GradientCheckpointConfig
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import (
    MAX_NORM,
    POLICIES,
    STEPS,
    VOCABULARY,
    GPT2Policy,
    Steps,
    Texts,
    made,
    optimizer_of,
    plain_steps,
)
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full

RANKS, BATCH = 4, 2
CHANGED: dict[str, Any] = {"enable_flash_attention": True, "gradient_checkpoint_config": GradientCheckpointConfig(1.0)}


def check(kind: str, given: dict[str, Any], changes: dict[str, Any], policy: bool = False) -> None:
    tp = given["tp_size"]
    whole_logits = tp == 1 or not given.get("parallel_output", True) or (policy and kind == "gpt2")
    of_parts = kind in ("llama", "gpt2") and not whole_logits
    more = {name: value for name, value in changes.items() if name != "attn_implementation"}
    expected = plain_steps(kind, RANKS // tp, BATCH, of_parts, **more)
    run_ranks(RANKS, _trained, kind, given, changes, expected, of_parts, policy)


def _trained(
    kind: str, given: dict[str, Any], changes: dict[str, Any], expected: Steps, of_parts: bool, policy: bool
) -> None:
    given = {**given, "custom_policy": POLICIES[kind]()} if policy else given
    plugin = HybridParallelPlugin(pp_size=1, precision="fp32", max_norm=MAX_NORM, **given)
    tp, (replica, replicas) = plugin.tp_size, plugin.data_parallel()
    assert (replica, replicas) == (dist.get_rank() // tp, dist.get_world_size() // tp)
    model = made(kind, **changes)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Texts(STEPS * replicas * BATCH), BATCH)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
    session = plugin.session(model)
    facts = session._engine.shards.layout.facts
    assert (session.mesh.tensor.size, session.mesh.size) == (tp, replicas)
    assert tp == 1 or any(fact.part is not None for fact in facts)
    assert model.unwrap().config._attn_implementation == "sdpa"
    for (loss, norm, values), inputs in zip(expected, loader, strict=True):
        out = model(**inputs)
        assert (out.logits.shape[-1] == VOCABULARY) is not of_parts
        told = everywhere((out.loss.item(), inputs["input_ids"].tolist()))
        assert all(one == told[rank // tp * tp] for rank, one in enumerate(told)), "ranks of one model say the same"
        booster.backward(out.loss, optimizer)
        optimizer.step()
        assert sum(one[0] for one in told) / len(told) == pytest.approx(loss, rel=1e-10)
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-10)
        optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, 1e-9, "parameters")
    booster.close()


SHARED = {"sp_size": 2, "enable_sequence_parallelism": True}
LATE = {"overlap_communication": False, "overlap_allgather": True}
WHOLE: dict[str, Any] = {"tp_size": 2, "zero_stage": 0, "parallel_output": False}


@pytest.mark.parametrize(
    ("kind", "given", "changes", "policy"),
    [
        ("llama", {"tp_size": 2, "zero_stage": 0}, {}, False),
        ("gpt2", {"tp_size": 4, "parallel_output": False, "make_vocab_size_divisible_by": 3}, {}, False),
        ("bert", {"tp_size": 2, "zero_stage": 2}, {}, False),
        (
            "llama",
            {"tp_size": 2, "zero_stage": 2, "enable_flash_attention": True, "zero_bucket_size_in_m": 0.001},
            {"attn_implementation": "eager"},
            False,
        ),
        ("llama", {"tp_size": 2, "zero_stage": 1}, {}, True),
        *full(
            ("llama", {"tp_size": 4, "zero_stage": 1}, {"tie_word_embeddings": True}, False),
            ("llama", {"tp_size": 1, "zero_stage": 1}, {}, False),
            ("gpt2", {"tp_size": 2, "gradient_checkpoint_config": GradientCheckpointConfig(0.5)}, {}, False),
            ("bert", {"tp_size": 4, "zero_stage": 2, "cpu_offload": True}, {}, False),
            ("bert", {"tp_size": 2, "zero_stage": 1, **LATE}, {}, False),
            ("llama", WHOLE, {}, True),
            ("gpt2", WHOLE, {}, True),
            ("gpt2", {"tp_size": 2, "zero_stage": 1}, {}, True),
        ),
    ],
    ids=str,
)
def test_training_equals_plain_pytorch(kind: str, given: dict[str, Any], changes: dict[str, Any], policy: bool) -> None:
    """``policy`` adds a custom policy. More plans of tensor parallelism: tests/ranks/parallel."""
    check(kind, given, changes, policy)


# -- refused arguments


TOO_FEW: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3}


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "kind", "given", "changes", "words"),
    [
        (4, "llama", {"tp_size": 3}, {}, "tp_size=3 does not divide the 4 ranks"),
        (4, "llama", {"tp_size": 4}, TOO_FEW, "3 attention heads are fewer"),
        (2, "linear", {"tp_size": 2}, {}, "Linear cannot be cut: it has no module of a known architecture"),
        (2, "llama", {"tp_size": 2, "custom_policy": GPT2Policy()}, {}, "names no class that a LlamaForCausalLM has"),
        (4, "llama", {"pp_size": 3}, {"num_hidden_layers": 3}, "tp_size=1 x pp_size=3 does not divide the 4 ranks"),
        (4, "llama", {"pp_size": 4}, {"num_hidden_layers": 3}, "3 layers are too few for 4 stages"),
        (
            2,
            "gpt2",
            {"pp_size": 2, "num_layers_per_stage": [1, 1]},
            {"n_layer": 3},
            r"layers=\[1, 1\] does not fit 2 stages of a model",
        ),
        (2, "linear", {"pp_size": 2}, {}, "Linear cannot be divided into stages: it has no module of a known class"),
    ],
    ids=["ranks", "heads", "unknown", "policy", "ranks of stages", "layers", "given layers", "unknown in stages"],
)
def test_refused_models_raise_on_all_ranks_and_do_not_change(
    ranks: int, kind: str, given: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    model: Any = nn.Linear(4, 4) if kind == "linear" else made(kind, attn_implementation="eager", **changes)
    optimizer = optimizer_of(model)
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    changed = CHANGED if kind == "llama" else {}
    plugin = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | changed | given)
    raises(ValueError, words, lambda: Booster(plugin=plugin).boost(model, optimizer))
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    if kind != "linear":
        assert not any(getattr(layer, "gradient_checkpointing", False) for layer in model.modules())
        assert model.config._attn_implementation == "eager"
        model(**Texts(2).items).loss.backward()  # the model is not sharded, and still works


RING = {"sequence_parallelism_mode": "ring_attn"}


def _staged(kind: str, given: dict[str, Any], changes: dict[str, Any], expected: Steps) -> None:
    shared: dict[str, Any] = {"sp_size": 2, "enable_sequence_parallelism": True, "max_norm": MAX_NORM, "zero_stage": 1}
    plugin = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 2, "precision": "fp32"} | shared | given)
    assert plugin.data_parallel() == (0, 1)
    texts = Texts(STEPS * 2 * BATCH)
    texts.items["labels"] = texts.items["input_ids"]  # the same number of labels in each micro-batch
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
def test_sequence_parallel_pipeline_stages(kind: str, given: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = plain_steps(kind, 1, 2 * BATCH, False, True, **changes)
    run_ranks(RANKS, _staged, kind, given, changes, expected, timeout=120.0)


@on_ranks(2)
def test_attention_heads_are_sent_in_fp8() -> None:
    """fp8 sends one byte instead of four, and a scale per 128 elements; sums of the loss are not compressed."""
    found = []
    for compress in (False, True):
        given: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "fp8_communication": compress, **SHARED}
        plugin = HybridParallelPlugin(zero_stage=1, precision="fp32", **given)
        booster = Booster(plugin=plugin)
        model = made("llama", torch.float32)
        loader = plugin.prepare_dataloader(Texts(BATCH), BATCH)
        model, optimizer, *_ = booster.boost(model, optimizer_of(model), None, loader)
        (inputs,) = loader
        loss = model(**inputs).loss
        booster.backward(loss, optimizer)
        sent = plugin.session(model).traffic()["send"]
        optimizer.step()
        found.append((loss.item(), sent, optimizer.get_grad_norm() or 0.0))
        booster.close()
    (loss, sent, norm), (other, less, near) = found
    assert other != loss and abs(other - loss) < 0.02 * loss
    assert near != norm and abs(near - norm) < 0.1 * norm
    rest = 4 * 2 * BATCH  # counts and losses, sent and received
    assert 0 <= less - rest < (sent - rest) * 0.27
