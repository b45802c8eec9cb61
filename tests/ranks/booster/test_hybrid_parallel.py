"""HybridParallelPlugin behind the Booster, against plain PyTorch in one process: fp64, dp x tp on four ranks.

Sequence parallelism behind the Booster, in every mode, against plain PyTorch in one process: fp64, four ranks.
"""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from tests.support.on_ranks import everywhere
from tests.support.sets import full

RANKS, BATCH = 4, 2
SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 6}
CHANGED: dict[str, Any] = {"enable_flash_attention": True, "gradient_checkpoint_config": GradientCheckpointConfig(1.0)}


def wide(numbers: dict[Any, float]) -> dict[str, Tensor]:
    return {str(name): torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


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
    facts = session.engine.shards.layout.facts
    assert (session.mesh.tensor.size, session.mesh.size) == (tp, replicas)
    assert tp == 1 or any(fact.part is not None for fact in facts)
    whole_logits = tp == 1 or not plugin.parallel_output or type(plugin.custom_policy) is GPT2Policy
    assert of_parts == (kind in ("llama", "gpt2") and not whole_logits)
    assert model.unwrap().config._attn_implementation == "sdpa"
    for (loss, norm, values), inputs in zip(expected, loader, strict=True):
        out = model(**inputs)
        assert (out.logits.shape[-1] == VOCABULARY) is not of_parts
        told = everywhere((out.loss.item(), inputs["input_ids"]))
        for first in range(0, len(told), tp):  # ranks with parts of one model see the same, and say the same
            assert all(one[0] == told[first][0] for one in told[first : first + tp])
            assert all(torch.equal(one[1], told[first][1]) for one in told[first : first + tp])
        booster.backward(out.loss, optimizer)
        optimizer.step()
        mean = sum(one[0] for one in told) / len(told)
        numbers = wide({"loss": mean, "norm": optimizer.get_grad_norm()})
        assert_close(numbers, wide({"loss": loss, "norm": norm}), 1e-10, "loss and norm")
        optimizer.zero_grad()
        with session.module.gathered():
            held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts}
            assert_close(held, parts, 1e-9, "parameters")
    booster.close()


@pytest.mark.parametrize(
    ("kind", "zero_stage"),
    [
        *(("llama", 0), ("gpt2", 1), ("bert", 2)),
        *full(("llama", 1), ("llama", 2), ("gpt2", 0), ("gpt2", 2), ("bert", 0), ("bert", 1)),
    ],
)
def test_training_equals_plain_pytorch(kind: str, zero_stage: int) -> None:
    check(kind, {"tp_size": 2, "zero_stage": zero_stage}, {})


@pytest.mark.parametrize(
    ("kind", "given", "changes"),
    [
        *full(("llama", {"tp_size": 4, "zero_stage": 1}, {"tie_word_embeddings": True})),
        ("gpt2", {"tp_size": 4, "parallel_output": False, "make_vocab_size_divisible_by": 3}, {}),
        *full(
            ("bert", {"tp_size": 4, "zero_stage": 2, "cpu_offload": True}, {}),
            ("llama", {"tp_size": 1, "zero_stage": 1}, {}),
        ),
        (
            "llama",
            {"tp_size": 2, "zero_stage": 2, "enable_flash_attention": True, "zero_bucket_size_in_m": 0.001},
            {"attn_implementation": "eager"},
        ),
        *full(
            ("gpt2", {"tp_size": 2, "gradient_checkpoint_config": GradientCheckpointConfig(0.5)}, {}),
            ("bert", {"tp_size": 2, "zero_stage": 1, "overlap_communication": False, "overlap_allgather": True}, {}),
        ),
    ],
    ids=str,
)
def test_arguments_that_leave_the_numbers_alone(kind: str, given: dict[str, Any], changes: dict[str, Any]) -> None:
    check(kind, given, changes)


WHOLE: dict[str, Any] = {"zero_stage": 0, "parallel_output": False}


@pytest.mark.parametrize(
    ("kind", "given"),
    [*full(("llama", WHOLE)), ("llama", {"zero_stage": 1}), *full(("gpt2", WHOLE), ("gpt2", {"zero_stage": 1}))],
    ids=str,
)
def test_a_policy_of_the_users_own(kind: str, given: dict[str, Any]) -> None:
    check(kind, {"tp_size": 2, **given}, {}, policy=True)


# -- precision, accumulation, other plugins


def _half(precision: str, zero_stage: int, expected: Steps) -> None:
    """Sixteen bits beside plain training in fp64, and accumulation without an exchange where there is one to leave
    out."""
    plugin = HybridParallelPlugin(
        tp_size=2, pp_size=1, precision=precision, zero_stage=zero_stage, initial_scale=2.0**8, max_norm=MAX_NORM
    )
    booster = Booster(plugin=plugin)
    model = made("gpt2", torch.float32)
    assert plugin.data_parallel()[1] == RANKS // 2
    loader = plugin.prepare_dataloader(Texts(STEPS * 2 * BATCH), BATCH)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    for (loss, norm, _), inputs in zip(expected, loader, strict=True):
        out = model(**inputs)
        told = everywhere(out.loss.item())
        context = booster.no_sync(model, optimizer) if plugin.support_no_sync() else contextlib.nullcontext()
        with context:
            booster.backward(out.loss / 2, optimizer)
        booster.backward(model(**inputs).loss / 2, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        numbers = wide({"loss": sum(told) / len(told), "norm": optimizer.get_grad_norm()})
        assert_close(numbers, wide({"loss": loss, "norm": norm}), 3e-2, precision)
    booster.close()


@pytest.mark.parametrize(("precision", "zero_stage"), [*full(("fp16", 0)), ("bf16", 1), *full(("bf16", 2))])
def test_sixteen_bits_and_accumulation(precision: str, zero_stage: int) -> None:
    run_ranks(RANKS, _half, precision, zero_stage, plain_steps("gpt2", RANKS // 2, BATCH, True))


# -- what cannot be


def _refused(kind: str, given: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    model: Any = nn.Linear(4, 4) if kind == "linear" else made(kind, **changes)
    optimizer = optimizer_of(model)
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    plugin = HybridParallelPlugin(pp_size=1, precision="fp32", **given)
    with pytest.raises(ValueError, match=words):
        Booster(plugin=plugin).boost(model, optimizer)
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])
    if kind != "linear":
        assert not any(layer.gradient_checkpointing for layer in model.modules() if hasattr(layer, "self_attn"))
        assert model.config._attn_implementation == "eager"
        out = model(**Texts(2).items)
        out.loss.backward()  # it is whole, and works
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("ranks", "kind", "given", "changes", "words"),
    [
        (4, "llama", {"tp_size": 3}, {}, "tp_size=3 does not divide the 4 ranks"),
        (
            4,
            "llama",
            {"tp_size": 4},
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "3 attention heads are fewer",
        ),
        (2, "linear", {"tp_size": 2}, {}, "Linear cannot be cut: it has no module of a known architecture"),
        (2, "llama", {"tp_size": 2, "custom_policy": GPT2Policy()}, {}, "names no class that a LlamaForCausalLM has"),
    ],
    ids=["ranks", "heads", "unknown", "policy"],
)
def test_what_cannot_be_is_said_on_every_rank_and_nothing_is_changed(
    ranks: int, kind: str, given: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    changed = CHANGED if kind != "linear" else {}
    run_ranks(ranks, _refused, kind, {**given, **changed}, {**changes, "attn_implementation": "eager"}, words)


RING = {"sequence_parallelism_mode": "ring_attn"}


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
