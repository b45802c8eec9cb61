"""transformers models in pipeline stages, compared with the unsplit models in fp64: every schedule, tied weights, odd
sizes.

The parameters on each rank of a layout are compared with a formula.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.core.comm import GroupMaker
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.core.parallel.pipeline.run import StageRun
from shardwise.core.parallel.pipeline.schedule import make_schedule
from shardwise.core.parallel.pipeline.split import Passes
from shardwise.core.parallel.pipeline.staging import stage_model
from shardwise.plan import PipelinePlan, TensorPlan
from shardwise.testing import assert_close, run_ranks
from tests.parity.hybrid import with_layers
from tests.support import tensor_cases
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import campaign, full
from tests.support.tensor_setup import Case, Exact, loss_of

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "gpt2", "bert"]
LAYERS = 5
SCHEDULES = [(2, "1f1b", 1), (4, "1f1b", 1), (2, "interleaved", 2), (1, "interleaved", 2), (2, "zbv", 2)]


def criterion(outputs: Any, _inputs: Any) -> Tensor:
    with Exact():
        return loss_of(outputs)


Plain = tuple[Tensor, dict[str, Tensor]]


@functools.cache
def plain(name: str, heads: int | None, microbatches: int) -> list[Plain]:
    """Return each case's loss and gradients; the test computes them for its ranks."""
    return [_plain(with_layers(case, LAYERS), microbatches) for case in tensor_cases.CASES[name]()[:heads]]


def _plain(case: Case, microbatches: int) -> Plain:
    model = case.made()
    loss = torch.zeros((), dtype=torch.float64)
    for part in split_batch(case.batch(), microbatches, None):
        with Exact():
            own = loss_of(model(**part.kwargs)) * part.share
        own.backward()
        loss += own.detach()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss, grads


def staged(name: str, schedule_name: str, chunks: int, microbatches: int, whole: list[Plain]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    maker = GroupMaker(CPU, None, 60.0)
    wire = maker.make_wire("pp", [list(range(ranks))]) if ranks > 1 else None
    for case, (expected_loss, expected) in zip(tensor_cases.CASES[name](), whole, strict=False):
        case = with_layers(case, LAYERS)
        model = case.made()
        if getattr(case.config, "output_router_logits", False):
            with pytest.raises(ValueError, match=r"output_router_logits=True for a .* in pipeline stages"):
                stage_model(model, rank, ranks, chunks)
            continue
        names = {id(param): name for name, param in model.named_parameters()}
        shapes = {name: param.shape for name, param in model.named_parameters()}
        staging = stage_model(model, rank, ranks, chunks, v_shaped=schedule_name == "zbv")
        held = {names[id(param)] for param in model.parameters() if staging.owns(param)}
        shared = {names[id(param)] for param in model.parameters() if len(staging.ranks_of(param)) > 1}
        staging.install()
        assert {names[id(param)] for param in model.parameters()} == held
        run = StageRun(staging, wire)
        parts = split_batch(case.batch(), microbatches, None)
        schedule = make_schedule(schedule_name, ranks, chunks, len(parts))
        for turn in range(2):
            model.zero_grad()
            with Exact():
                outcome = run.step(schedule, parts, criterion, Passes(), turn == 1)
            assert (outcome.loss is None) == (staging.stages - 1 not in staging.own)
            if outcome.loss is not None:
                assert_close({"loss": outcome.loss}, {"loss": expected_loss}, 1e-12, case.kind)
                assert len(outcome.outputs) == (len(parts) if turn else 0)
            found = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
            for weight in sorted(shared):  # all stages that use a parameter add up its gradient
                total = found.get(weight, torch.zeros(shapes[weight], dtype=torch.float64)).clone()
                dist.all_reduce(total)
                if weight in held and weight in expected:
                    found[weight] = total
            own = {name: grad for name, grad in expected.items() if name in held}
            assert_close(found, own, 1e-11, f"{case.kind}: gradients", floor=1e-2)
            with torch.no_grad(), Exact():
                again = run.step(schedule, parts, criterion, None)
            if again.loss is not None:
                assert_close({"loss": again.loss}, {"loss": expected_loss}, 1e-12, f"{case.kind}: forward alone")
        staging.remove()
        assert {names[id(param)] for param in model.parameters()} == set(names.values())
    maker.close()


OTHERS = [(2, "zbv", 2, name) for name in ("bloom", "gemma2", "gpt_neox", "mixtral", "qwen3_moe")]
OTHERS += [(2, "1f1b", 1, name) for name in ("falcon", "gemma3", "gptj", "opt")]


def rows() -> list[object]:
    """Return each schedule with the first two heads of one architecture (tied and untied embeddings); more in other
    sets.

    Full: every head of two of the three architectures, and two heads of other architectures. Campaign: every head of
    the third.
    """
    found: list[object] = []
    for at, schedule in enumerate(SCHEDULES):
        found.append((*schedule, ARCHITECTURES[at % 3], 2))
        for kind, name in enumerate(ARCHITECTURES):
            found += (campaign if (at + kind) % 3 == 2 else full)((*schedule, name, None))
    return [*found, *full(*((*row, 2) for row in OTHERS))]


@pytest.mark.parametrize(("ranks", "schedule", "chunks", "name", "heads"), rows())
def test_stages_equal_the_unsplit_model(ranks: int, schedule: str, chunks: int, name: str, heads: int | None) -> None:
    """Three rows in three micro-batches, which is fewer than some schedules have stages."""
    run_ranks(ranks, staged, name, schedule, chunks, 3, plain(name, heads, 3))


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_different_stages_have_different_dropout(checkpointing: bool) -> None:
    """Check which elements of a layer's output dropout hits, and that all ranks' generators are equal afterwards."""
    torch.manual_seed(7)
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=29, n_positions=16, resid_pdrop=0.5)
    model = transformers.GPT2LMHeadModel(config).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    maker = GroupMaker(CPU, None, 60.0)
    staging = stage_model(model, dist.get_rank(), 2)
    staging.install()
    run = StageRun(staging, maker.make_wire("pp", [[0, 1]]))
    hits: list[list[bool]] = []
    model.transformer.h[dist.get_rank()].attn.resid_dropout.register_forward_hook(
        lambda _module, _inputs, output: hits.append((output == 0).flatten().tolist())
    )
    ids = torch.arange(12).view(2, 6)
    parts = split_batch({"input_ids": ids, "labels": ids}, 2, None)
    run.step(make_schedule("1f1b", 2, 1, 2), parts, criterion, Passes())
    assert len({tuple(each) for each in hits}) == 2, "two micro-batches dropped the same, or recomputation another"
    assert len(hits) == (4 if checkpointing else 2) and all(hits.count(each) == len(hits) // 2 for each in hits)
    first, second = everywhere(hits[0])
    assert first != second and 0.3 < sum(first) / len(first) < 0.7
    one, other = everywhere(torch.get_rng_state().tolist())
    assert one == other
    maker.close()


VOCABULARY, WIDTH, INNER, DEPTH = 32, 16, 24, 4


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": DEPTH}
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
def test_parameters_of_a_rank_match_the_formula(tp: int, pp: int, pipeline: PipelinePlan) -> None:
    """Matrices, embedding and head are split by tp and pp, norms by pp.

    The last norm is where the last stage is, which is the first rank under zbv.
    """
    plan = PLANS["zero1"].but(tp=tp, pp=pp, tensor=TensorPlan(vocabulary_multiple=1), pipeline=pipeline)
    matrices = DEPTH * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    stage, last = dist.get_rank() * pp // 4, 0 if pipeline == ZBV else pp - 1
    norms = 2 * DEPTH // pp * WIDTH + (WIDTH if stage == last else 0)
    ends = (stage == 0) + (stage == last)
    model = llama()
    with sharded(model, adam(model), plan) as session:
        ids = torch.arange(2 * 6).view(2, 6) % VOCABULARY
        batch = {"input_ids": ids, "labels": ids}
        if session.pipeline is not None:
            session.pipeline.step(batch, criterion, train=True)
        else:
            session.backward(session.module(**batch).loss)
        session.optimizer.step()
        facts = session._engine.shards.layout.facts
        numel, whole = sum(fact.numel for fact in facts), [fact.numel for fact in facts if fact.part is None]
        assert sum(whole) == (norms if tp > 1 else numel)
        assert numel == matrices // (tp * pp) + ends * VOCABULARY * WIDTH // tp + norms
        assert 0 <= session.memory().parameters_bytes - numel * 4 < 64 * len(whole) * 4 + 4096
        moments = [t.numel() for entry in session.optimizer.state.values() for t in entry.values() if t.numel() > 1]
        assert sum(session.mesh.world.exchange_object(sum(moments))) == 2 * numel
